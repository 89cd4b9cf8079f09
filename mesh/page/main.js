// The page: which view is shown, how the controller answers, and where else one can go.

import { html, render, Component } from "./vendor/preact-htm.js";
import { Cell } from "./cell.js";
import { Charts } from "./charts.js";
import { Deploy } from "./deploy.js";
import { Deployment } from "./deployment.js";
import { Deployments } from "./deployments.js";
import { Journal } from "./journal.js";
import { Keys } from "./keys.js";
import { Logs } from "./logs.js";
import { follow, live, onChange, silentS } from "./live.js";
import { Fault, Notice, Text } from "./parts.js";
import { Playground } from "./playground.js";
import { OneRequest, Requests } from "./requests.js";
import { Usage } from "./usage.js";
import { address, route } from "./route.js";
import { session, SignIn, signOut, whose } from "./session.js";

const SILENT_S_MAX = 3;
const VIEWS = { cell: "Cell", deployments: "Deployments", requests: "Requests", charts: "Charts", logs: "Logs", usage: "Usage", keys: "Keys", deploy: "Deploy", try: "Playground" };

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
      ${session.journal && html`<${Journal} />`}
      <${Connection} silent=${this.silent} />
      <main id="main" tabindex="-1">${this.view(view, name, asked)}</main>`;
  }

  view(view, name, asked) {
    if (session.wants_keys && (!session.role || live.error?.status === 401)) {
      return html`<${SignIn} onDone=${() => { live.error = null; follow(); this.forceUpdate(); }} />`;
    }
    if (live.error) return html`<${Refused} error=${live.error} />`;
    if (!live.state) return html`<${Notice}>Loading …<//>`;
    if (session.journal && !isThere(view)) return html`<${Notice}>A journal has no such view. <a href=${address("cell")}>The cell</a><//>`;
    if (view === "deployments" && name) return html`<${Deployment} live=${live} name=${name} />`;
    if (view === "deployments") return html`<${Deployments} state=${live.state} asked=${asked} />`;
    if (view === "requests" && name) return html`<${OneRequest} key=${name} name=${name} />`;
    if (view === "requests") return html`<${Requests} asked=${asked} />`;
    if (view === "charts") return html`<${Charts} samples=${live.samples} />`;
    if (view === "logs") return html`<${Logs} live=${live} asked=${asked} />`;
    if (view === "usage") return html`<${Usage} asked=${asked} />`;
    if (view === "keys") return html`<${Keys} />`;
    if (view === "deploy") return html`<${Deploy} asked=${asked} />`;
    if (view === "try") return html`<${Playground} state=${live.state} asked=${asked} />`;
    if (view === "cell") return html`<${Cell} live=${live} />`;
    return html`<${Notice}>There is no view of this name. <a href=${address("cell")}>The cell</a><//>`;
  }
}

function Connection({ silent }) {
  if (silent) return html`<${Notice} bad>controller silent for ${silentS().toFixed(0)} s, trying<//>`;
  return live.note ? html`<p class="notice" role="status">${live.note}. <button onClick=${() => { live.note = ""; dispatchEvent(new HashChangeEvent("hashchange")); }}>ok</button></p>` : null;
}

const Refused = ({ error }) => html`<h1>Not shown</h1><${Fault} error=${error} />`;

function skip(event) {
  event.preventDefault();
  document.getElementById("main").focus();
}

const place = document.getElementById("page");
await whose(); // nothing where the controller is silent, which is shown
if (session.role || !session.wants_keys) await follow();
place.replaceChildren();
render(html`<${Page} />`, place);
