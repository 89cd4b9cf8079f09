// The cell at a glance: how it stands, its last quarter of an hour, and a card for each node.

import { html, Component } from "./vendor/preact-htm.js";
import { Chart } from "./chart.js";
import { Badge, InSight, Loading, Notice, NothingDeployed, Saved, Share, Table, Text, Total } from "./parts.js";
import { address } from "./route.js";
import { count, fixed, mib, millis, percent, refusals, seconds, span } from "./words.js";

const CARDS_FIRST = 1;
const CARDS_AT_ONCE = 12;
const QUEUES_MAX = 6; // deployments of which it is said how many wait

export function Cell({ state, samples }) {
  const nodes = Object.values(state.nodes);
  return html`
    <h1>Cell</h1>
    <${Saved} path="api/v1/report.html?since_s=3600" name="mesh-report.html">Report of the last hour<//>
    <${Totals} state=${state} samples=${samples} />
    ${samples.time_unix_s?.length > 0 && html`<div class="charts">
      <${Chart} title="Output tokens per second" columns=${samples}
        series=${[{ label: "tokens/s", column: "tokens_per_s", digits: 1 }]} />
      <${Chart} title="Requests running and queued" columns=${samples}
        series=${[{ label: "running", column: "running" }, { label: "queued", column: "queued" }]} />
    </div>`}
    ${!Object.keys(state.deployments).length && html`<${NothingDeployed} />`}
    ${!nodes.length && html`<${Notice}>
      No node has joined that this key may see. <code>mesh node --join ADDRESS</code> brings one.<//>`}
    <${Cards} nodes=${nodes} instances=${state.instances} />`;
}

// The first cards at once, and more with each picture: a large cell is not waited for.
class Cards extends Component {
  state = { drawn: CARDS_FIRST };

  componentDidMount() { this.more(); }

  componentDidUpdate() { this.more(); }

  more() {
    if (this.state.drawn >= this.props.nodes.length || this.asked === this.state.drawn) return;
    this.asked = this.state.drawn;
    requestAnimationFrame(() => setTimeout(() => this.setState({ drawn: this.asked + CARDS_AT_ONCE })));
  }

  render({ nodes, instances }, { drawn }) {
    const here = Map.groupBy(Object.values(instances), (one) => one.node_id);
    return html`<div class="cards">${nodes.slice(0, drawn).map((node) => html`
      <${InSight} key=${node.node_id} tag="article" class="card" id="node-${node.node_id}" make=${() => card(node, here.get(node.node_id) ?? [])} />`)}</div>`;
  }
}

function Totals({ state, samples }) {
  const { status, recent } = state;
  const rate = samples.tokens_per_s?.at(-1);
  const lost = Object.values(state.nodes).filter((node) => node.state === "lost").length; // the cell counts them no more
  return html`<dl class="totals">
    <${Total} name="nodes ready" value="${status.nodes_ready} of ${status.nodes}${lost > 0 ? `, ${lost} lost` : ""}" />
    <${Total} name="requests running" value=${count(status.running)} />
    <${Total} name="queued" value=${count(status.queued)} />
    ${status.queued > 0 && html`<${Total} name="queued, by deployment" value=${queues(state.deployments)} small />`}
    <${Total} name="served" value=${count(status.served)} />
    ${status.batches.length > 0 && html`<${Total} name="lines of batches done" value="${count(sum(status.batches, "done"))} of ${count(sum(status.batches, "lines"))}" />`}
    <${Total} name="refused, by reason" value=${refusals(status.refused)} small=${Object.keys(status.refused).length > 0} />
    <${Total} name="output tokens/s" value=${fixed(rate, 1)} />
    <${Total} name="SLO met, ${recent.window_s / 60} min" value=${percent(recent.attainment)} />
    <${Total} name="up, version ${status.version}" value=${span(status.uptime_s)} />
  </dl>`;
}

function queues(deployments) {
  const waiting = Object.entries(deployments).filter(([, { queued }]) => queued).sort(([, a], [, b]) => b.queued - a.queued);
  const longest = waiting.slice(0, QUEUES_MAX).map(([name, { queued }], n) => html`${n > 0 && ", "}<${Text}>${name}<//>\u00a0${count(queued)}`);
  return html`${longest}${waiting.length > QUEUES_MAX && html`, <a href=${address("deployments", "", { sort: "-queued" })}>${waiting.length - QUEUES_MAX} more</a>`}`;
}

const sum = (all, key) => all.reduce((so_far, one) => so_far + one[key], 0);

function card(node, instances) {
  return html`
    <h2><${Text}>${node.node_id}<//> <${Badge} state=${node.state} /></h2>
    <p class="dim">${node.device}, ${node.cores} cores, ${node.engine}, <${Text}>${node.hardware}<//>;
      silent ${node.silent_s.toFixed(1)} s</p>
    ${node.phase ? html`<p>${node.phase} <${Share} share=${node.share} label="joining" /></p>` : html`<${Memory} node=${node} />`}
    ${instances.length > 0 && html`<${Table} label="Instances of ${node.node_id}" columns=${INSTANCES}
      rows=${instances} keyOf=${(one) => one.instance_id} />`}
    ${node.operations.length > 0 && html`<${Table} label="Memory operations of ${node.node_id}" columns=${OPERATIONS}
      rows=${node.operations} keyOf=${(one) => `${one.kind} ${one.instance_id}`} />`}`;
}

function Memory({ node }) {
  const all = node.parts.reduce((sum, part) => sum + part.size_bytes, 0) || 1;
  const there = node.parts.filter((part) => part.size_bytes > 0);
  return html`
    <div class="bar" role="img" aria-label=${`memory: ${there.map(sized).join(", ")} MiB`}>${there.map((part) => html`
      <span class="part-${classOf(part)}" style=${{ flexGrow: part.size_bytes / all }} title=${`${sized(part)} MiB`}>${part.letter}</span>`)}
    </div>
    <ul class="legend" aria-hidden="true">${node.parts.map((part) => html`
      <li><b class="part-${classOf(part)}">${part.letter}</b> ${sized(part)}</li>`)}<li>MiB</li></ul>
    <p class="dim">limit ${mib(node.memory_bytes)}, promised ${mib(node.promised_bytes)}, tracked ${mib(node.tracked_bytes)},
      to promise ${mib(node.free_bytes)} MiB; ${node.rss_bytes
        ? `RSS ${mib(node.rss_bytes)} MiB, unaccounted ${mib(node.unaccounted_bytes)} MiB` : "RSS not known"}</p>`;
}

const sized = (part) => `${part.name} ${mib(part.size_bytes)}`;
const classOf = (part) => part.name.replace(" ", "-");

const INSTANCES = [
  { title: "instance", cell: (i) => html`<a href=${address("deployments", i.deployment)}><${Text}>${i.instance_id}<//></a>` },
  { title: "state", cell: (i) => html`<${Badge} state=${i.state} />${i.state === "loading" && html` <${Loading} instance=${i} />`}` },
  { title: "from", cell: (i) => i.tier ?? "–" },
  { title: "batch", number: true, cell: (i) => `${i.batch} of ${i.batch_max}` },
  { title: "KV used / held / required, MiB", number: true, cell: (i) => `${mib(i.kv_used_bytes)} / ${mib(i.kv_bytes)} / ${mib(i.kv_required_bytes)}` },
  { title: "headroom least / p50", number: true, cell: (i) => `${seconds(i.headroom_least_s)} / ${seconds(i.headroom_p50_s)}` },
  { title: "iteration", number: true, cell: (i) => millis(i.iteration_s || null) },
  { title: "correction", number: true, cell: (i) => fixed(i.correction) },
  { title: "profile", cell: (i) => html`<${Text}>${i.profile || "–"}<//>` },
];

const OPERATIONS = [
  { title: "operation", cell: (o) => o.kind },
  { title: "instance", cell: (o) => html`<${Text}>${o.instance_id}<//>` },
  { title: "size, MiB", number: true, cell: (o) => mib(o.size_bytes) },
  { title: "state", cell: (o) => (o.running ? "running" : "waiting") },
  { title: "needed in", number: true, cell: (o) => seconds(o.needed_in_s) },
];
