// The page: which view is shown, how the controller answers, and where else one can go.

import { html, render, Component } from "./vendor/preact-htm.js";
import { Cell } from "./cell.js";
import { uPlotCame } from "./chart.js";
import { follow, isCrowded, live, LOOK_S, onChange, silentS, STREAMS_MAX } from "./live.js";
import { Fault, Notice, Text } from "./parts.js";
import { address, route } from "./route.js";
import { session, SignIn, signOut, whose } from "./session.js";

const SILENT_S_MAX = 3;
const VIEWS = { cell: "Cell", deployments: "Deployments", requests: "Requests", charts: "Charts", logs: "Logs", usage: "Usage", keys: "Keys", deploy: "Deploy", try: "Playground" };

// The modules of these come when one is shown, or soon after the first picture: each view is there
// when the controller is silent.
const LATER_MS = 1000;
const LATER = { Charts: "charts", Deploy: "deploy", Deployment: "deployment", Deployments: "deployments", Journal: "journal", Keys: "keys", Logs: "logs", OneRequest: "requests", Playground: "playground", Requests: "requests", Usage: "usage" };
const found = { Cell };

const isThere = (view) => (view === "keys" ? session.wants_keys && session.role === "admin" : !session.journal || !["deploy", "try", "usage"].includes(view));

class Page extends Component {
  componentDidMount() {
    onChange(() => this.forceUpdate());
    addEventListener("hashchange", () => this.forceUpdate());
    setInterval(() => { if (silentS() > SILENT_S_MAX || this.silent) this.forceUpdate(); }, 1000);
  }

  render() {
    const { view, name, asked } = route();
    this.silent = silentS() > SILENT_S_MAX && !(session.wants_keys && !session.role) && !live.error;
    document.title = `${name || (VIEWS[view] ?? "mesh")} – mesh`;
    return html`
      <a class="skip" href="#main" onClick=${skip}>Skip to the view</a>
      <header><b>mesh</b><nav aria-label="Views">${Object.entries(VIEWS).filter(([one]) => isThere(one)).map(([one, title]) => html`
        <a href=${address(one)} aria-current=${one === view ? "page" : null}>${title}</a>`)}</nav>
        ${session.wants_keys && session.role && html`<span class="who">${session.role} <${Text}>${session.tenant}<//>
          <button onClick=${signOut}>sign out</button></span>`}</header>
      ${session.journal && html`<${Later} name="Journal" />`}
      <${Connection} silent=${this.silent} />
      <main id="main" tabindex="-1">${this.view(view, name, asked)}</main>`;
  }

  view(view, name, asked) {
    if (session.wants_keys && (!session.role || live.error?.status === 401)) {
      return html`<${SignIn} onDone=${() => { live.error = null; follow(); this.forceUpdate(); }} />`;
    }
    if (live.error) return html`<${Refused} error=${live.error} />`;
    if (!live.state) return html`<h1>Loading …</h1>`;
    if (session.journal && !isThere(view)) return html`<h1>Not shown</h1><${Notice}>A journal has no such view. <a href=${address("cell")}>The cell</a><//>`;
    if (view === "deployments" && name) return html`<${Later} name="Deployment" given=${{ state: live.state, lines: live.lines, name }} />`;
    if (view === "deployments") return html`<${Later} name="Deployments" given=${{ state: live.state, asked }} />`;
    if (view === "requests" && name) return html`<${Later} name="OneRequest" given=${{ key: name, name, state: live.state }} />`;
    if (view === "requests") return html`<${Later} name="Requests" given=${{ asked }} />`;
    if (view === "charts") return html`<${Later} name="Charts" given=${{ samples: live.samples }} />`;
    if (view === "logs") return html`<${Later} name="Logs" given=${{ state: live.state, lines: live.lines, asked }} />`;
    if (view === "usage") return html`<${Later} name="Usage" given=${{ asked }} />`;
    if (view === "keys") return html`<${Later} name="Keys" />`;
    if (view === "deploy") return html`<${Later} name="Deploy" given=${{ asked }} />`;
    if (view === "try") return html`<${Later} name="Playground" given=${{ state: live.state, asked }} />`;
    if (view === "cell") return html`<${Later} name="Cell" given=${{ state: live.state, samples: live.samples }} />`;
    return html`<h1>Not shown</h1><${Notice}>There is no view of this name. <a href=${address("cell")}>The cell</a><//>`;
  }
}

async function bring(name) {
  found[name] ??= (await import(`./${LATER[name]}.js`))[name];
}

// A view, which is drawn anew when something of what it is given has changed.
class Later extends Component {
  async ask({ name }) {
    if (found[name] || this.asked === name) return;
    this.asked = name;
    await bring(name).catch(() => this.setState({ missing: name }));
    this.forceUpdate();
  }

  componentDidMount() { this.ask(this.props); }

  componentDidUpdate() { this.ask(this.props); }

  shouldComponentUpdate({ name, given = {} }) {
    return name !== this.props.name || Object.keys(given).some((key) => given[key] !== this.props.given[key]);
  }

  render({ name, given }, { missing }) {
    if (found[name]) return html`<${found[name]} ...${given} />`;
    if (missing === name) return html`<h1>Not shown</h1><${Notice} bad>This view did not come. <button onClick=${() => location.reload()}>Load the page again</button><//>`;
    return html`<h1>Loading …</h1>`;
  }
}

function Connection({ silent }) {
  if (silent) return html`<${Notice} bad>controller silent for ${silentS().toFixed(0)} s, trying<//>`;
  if (isCrowded()) return html`<${Notice}>More than ${STREAMS_MAX} windows of this page are open in this browser, and it opens six connections to a host: until it is used this one is told every ${LOOK_S} s.<//>`;
  if (live.ended) return html`<${Notice}>${live.ended}.<//>`;
  return live.note ? html`<p class="notice" role="status">${live.note}. <button onClick=${() => { live.note = ""; dispatchEvent(new HashChangeEvent("hashchange")); }}>ok</button></p>` : null;
}

const Refused = ({ error }) => html`<h1>Not shown</h1><${Fault} error=${error} />`;

function skip(event) {
  event.preventDefault();
  document.getElementById("main").focus();
}

const place = document.getElementById("page");
await whose(); // nothing where the controller is silent, which is shown
if (session.role || !session.wants_keys) follow();
place.replaceChildren();
render(html`<${Page} />`, place);
const stop = onChange(() => {
  stop();
  setTimeout(async () => {
    uPlotCame();
    for (const name of Object.keys(LATER)) { // one by one: no frame and no token waits for all of them, and none for one that stalls
      await Promise.race([bring(name).catch(() => {}), new Promise((go) => { setTimeout(go, LATER_MS); })]);
    }
  }, LATER_MS);
});
