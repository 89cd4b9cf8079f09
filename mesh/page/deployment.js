// One deployment: its numbers, what an operator can do with it, its manifest, revisions and events.

import { html, useState } from "./vendor/preact-htm.js";
import { Line } from "./logs.js";
import { manifestOf, post } from "./calls.js";
import { Badge, Fault, Loading, Notice, Table, Text, Total, Twice, useAsked } from "./parts.js";
import { Profiles } from "./profile.js";
import { address } from "./route.js";
import { session } from "./session.js";
import { count, limit, millis, percent, phase, refusals, seconds, tpotLimit } from "./words.js";

export function Deployment({ state, lines: all, name }) {
  const one = state.deployments[name];
  if (!one) return html`<h1><${Text}>${name}<//></h1><${Notice}>There is no deployment of this name.${" "}
    <a href=${address("deployments")}>All deployments</a><//>`;
  const { recent, spec } = one;
  const instances = Object.values(state.instances).filter((i) => i.deployment === name);
  const lines = all.filter((line) => line.deployment === name);
  return html`
    <h1><${Text}>${name}<//> <${Badge} state=${one.state} /> <${Text}>${phase(one)}<//></h1>
    <dl class="totals">
      <${Total} name="running" value=${count(one.running)} />
      <${Total} name="queued" value=${count(one.queued)} />
      <${Total} name="served" value=${count(one.served)} />
      <${Total} name="SLO met, ${recent.window_s / 60} min" value=${percent(recent.attainment)} />
      <${Total} name="TTFT p50 / p95, SLO ${limit(spec.slo.ttft_s)}" value="${seconds(recent.ttft_p50_s)} / ${seconds(recent.ttft_p95_s)}" small />
      <${Total} name="TPOT p50 / p95, SLO ${tpotLimit(spec)}" value="${millis(recent.tpot_p50_s)} / ${millis(recent.tpot_p95_s)}" small />
      <${Total} name="refused lately, by reason" value=${refusals(recent.refused)} small />
      <${Total} name="replicas" value="${spec.scaling.replicas_min} to ${spec.scaling.replicas_max}" />
    </dl>
    ${!session.journal && html`<p class="actions"><a class="button" href=${address("try", "", { a: name })}>Try it</a>
      <a class="button" href=${address("deploy", "", { from: name })}>Copy it</a></p>
      <${Actions} key=${name} name=${name} scaling=${spec.scaling} all=${Object.keys(state.deployments).sort()} />`}
    <h2>Instances</h2>
    ${instances.length ? html`<${Table} label="Instances" columns=${INSTANCES} rows=${instances} keyOf=${(i) => i.instance_id} />`
      : html`<p class="dim">None is loaded; the next request loads one.</p>`}
    ${one.revisions.length > 0 && html`<h2>Revisions</h2>
      <${Table} label="Revisions" columns=${REVISIONS} rows=${one.revisions} keyOf=${(r) => r.number} />`}
    <${Profiles} key=${name} name=${name} since=${told(lines, instances)} />
    <h2>Events</h2>
    ${lines.length ? html`<ol class="lines">${lines.slice(-50).map((line) => html`<${Line} key=${line.line_id} line=${line} />`)}</ol>`
      : html`<p class="dim">None of late.</p>`}
    <${Manifest} key=${name} name=${name} spec=${spec} />`;
}

// Differs once there may be other profiles: after a load, and after a line that tells of one.
const told = (lines, instances) => `${instances.filter((i) => i.state === "ready").length} ${lines.findLast(({ text }) => /profile|measured model/.test(text))?.line_id}`;

function Manifest({ name, spec }) {
  const { value, error } = useAsked(() => manifestOf(name), [name, spec]);
  return html`<h2>Manifest</h2><${Fault} error=${error} />
    ${value && html`<pre class="code" tabindex="0"><${Text}>${value}<//></pre>`}`;
}

function Actions({ name, scaling, all }) {
  const [said, setSaid] = useState({});
  const [busy, setBusy] = useState("");
  const act = async (verb, body = {}) => {
    setBusy(verb);
    setSaid({});
    setSaid(await post(`api/v1/deployments/${encodeURIComponent(name)}/${verb}`, body));
    setBusy("");
  };
  const scale = (event) => {
    event.preventDefault();
    const given = new FormData(event.target);
    act("scale", Object.fromEntries(["replicas_min", "replicas_max", "keep_alive_s"].map((key) => [key, Number(given.get(key))])));
  };
  const replay = (event) => {
    event.preventDefault();
    act("replay", { of: new FormData(event.target).get("of") });
  };
  return html`<section class="actions" aria-label="Actions" aria-busy=${Boolean(busy)}>
    ${["load", "unload", "profile"].map((verb) => html`<button disabled=${busy} onClick=${() => act(verb)}>${verb}</button>`)}
    <button disabled=${busy} onClick=${() => act("undo")}>undo rollout</button>
    <${Twice} verb="delete" busy=${busy} onSure=${() => act("delete")}>Delete <${Text}>${name}<//><//>
    <form onSubmit=${scale}>
      <label>replicas from <input name="replicas_min" type="number" min="0" defaultValue=${scaling.replicas_min} /></label>
      <label> to <input name="replicas_max" type="number" min="1" defaultValue=${scaling.replicas_max} /></label>
      <label> keep alive, s <input name="keep_alive_s" type="number" min="0" step="any" defaultValue=${scaling.keep_alive_s} /></label>
      <button disabled=${busy}>scale</button>
    </form>
    <form onSubmit=${replay}>
      <label>ask it again for the last minute of <select name="of">${all.map((one) => html`<option value=${one} selected=${one === name}>${one}</option>`)}</select></label>
      <button disabled=${busy}>replay</button>
    </form>
    ${busy && html`<${Notice}>${busy === "replay" ? "replaying a minute of calls" : busy} …<//>`}
    ${said.message && html`<${Notice}><${Text}>${said.message}<//><//>`}
    <${Fault} error=${said.error} />
  </section>`;
}

const INSTANCES = [
  { title: "instance", cell: (i) => html`<${Text}>${i.instance_id}<//>` },
  { title: "node", cell: (i) => html`<${Text}>${i.node_id}<//>` },
  { title: "state", cell: (i) => html`<${Badge} state=${i.state} /> ${i.state === "loading" && html`<${Loading} instance=${i} />`}` },
  { title: "load, expected", number: true, cell: (i) => `${seconds(i.load_s)}, ${seconds(i.load_expected_s || null)}` },
  { title: "batch", number: true, cell: (i) => `${i.batch} of ${i.batch_max}` },
  { title: "headroom least", number: true, cell: (i) => seconds(i.headroom_least_s) },
  { title: "profile", cell: (i) => html`<${Text}>${i.profile || "–"}<//>` },
];

const REVISIONS = [
  { title: "revision", number: true, cell: (r) => r.number },
  { title: "state", cell: (r) => html`<${Badge} state=${r.state} />` },
  { title: "ready of wanted", number: true, cell: (r) => `${r.ready} of ${r.wanted}` },
  { title: "requests", number: true, cell: (r) => r.requests },
  { title: "message", cell: (r) => html`<${Text}>${r.message}<//>` },
];
