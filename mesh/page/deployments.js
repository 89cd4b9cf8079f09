// All deployments in a table that can be sorted and filtered. What is asked stands in the address.

import { html } from "./vendor/preact-htm.js";
import { Badge, NothingDeployed, Table, Text } from "./parts.js";
import { address, ask } from "./route.js";
import { session } from "./session.js";
import { count, limit, millis, percent, phase, refusals, seconds, tpotLimit } from "./words.js";

export function Deployments({ state, asked }) {
  const filter = asked.get("filter") ?? "";
  const sort = asked.get("sort") ?? "name";
  const instances = Map.groupBy(Object.values(state.instances), (one) => one.deployment);
  const all = Object.entries(state.deployments).map(([name, one]) => rowOf(name, one, instances.get(name) ?? []));
  const rows = sorted(all.filter((row) => row.text.includes(filter.toLowerCase())), sort);
  return html`
    <h1>Deployments</h1>
    ${!all.length && html`<${NothingDeployed} />`}
    <p><label>Filter by name, state or source
      <input type="search" value=${filter} onInput=${(event) => ask({ filter: event.target.value })} /></label>
      <span class="dim" role="status"> ${rows.length} of ${all.length}</span></p>
    <${Table} label="Deployments" columns=${COLUMNS.filter(({ name }) => name !== "try" || !session.journal)} rows=${rows} keyOf=${(row) => row.name} sort=${sort}
      onSort=${({ name, number }) => ask({ sort: next(name, number, sort) })} />`;
}

// Rows are remade only for deployments that have changed, so that the others are not drawn again.
const rows = new WeakMap();

function rowOf(name, one, mine) {
  const loaded = mine.map((i) => i.state).join();
  if (rows.get(one)?.loaded !== loaded) {
    const ready = mine.filter((i) => i.state === "ready").length;
    rows.set(one, { name, ...one, ready, loaded, phase: phase(one), text: `${name} ${one.state} ${one.spec.source}`.toLowerCase() });
  }
  return rows.get(one);
}

function sorted(rows, sort) {
  const column = COLUMNS.find(({ name }) => name === sort.replace("-", "")) ?? COLUMNS[0];
  const sign = sort.startsWith("-") ? -1 : 1;
  const compare = (a, b) => (a === b ? 0 : a === null || a === undefined ? 1 : b === null || b === undefined ? -1 : sign * (a < b ? -1 : 1));
  return rows.sort((a, b) => compare(column.of(a), column.of(b)) || (a.name < b.name ? -1 : 1));
}

const next = (name, number, sort) => (sort === (number ? `-${name}` : name) ? (number ? name : `-${name}`) : number ? `-${name}` : name);

const pair = (say, middle, high) => (middle === undefined ? "–" : `${say(middle)} / ${say(high)}`);

// Over a journal there is nothing to try.
const COLUMNS = [
  { name: "name", title: "name", of: (d) => d.name,
    cell: (d) => html`<a href=${address("deployments", d.name)}><${Text}>${d.name}<//></a>` },
  { name: "try", title: "try", cell: (d) => html`<a href=${address("try", "", { a: d.name })} aria-label=${`try ${d.name}`}>try</a>` },
  { name: "state", title: "state", of: (d) => d.state, cell: (d) => html`<${Badge} state=${d.state} /> <${Text}>${d.phase}<//>` },
  { name: "ready", title: "ready", number: true, of: (d) => d.ready, cell: (d) => d.ready },
  { name: "running", title: "running", number: true, of: (d) => d.running, cell: (d) => count(d.running) },
  { name: "queued", title: "queued", number: true, of: (d) => d.queued, cell: (d) => count(d.queued) },
  { name: "served", title: "served", number: true, of: (d) => d.served, cell: (d) => count(d.served) },
  { name: "attainment", title: "SLO met", number: true, of: (d) => d.recent.attainment, cell: (d) => percent(d.recent.attainment) },
  { name: "ttft", title: "TTFT p50 / p95", number: true, of: (d) => d.recent.ttft_p95_s,
    cell: (d) => pair(seconds, d.recent.ttft_p50_s, d.recent.ttft_p95_s) },
  { name: "ttft_slo", title: "TTFT SLO", number: true, of: (d) => d.spec.slo.ttft_s, cell: (d) => limit(d.spec.slo.ttft_s) },
  { name: "tpot", title: "TPOT p50 / p95", number: true, of: (d) => d.recent.tpot_p95_s,
    cell: (d) => pair(millis, d.recent.tpot_p50_s, d.recent.tpot_p95_s) },
  { name: "tpot_slo", title: "TPOT SLO", number: true, of: (d) => d.spec.slo.tpot_s, cell: (d) => tpotLimit(d.spec) },
  { name: "refused", title: "refused", number: true, of: (d) => d.refused, cell: (d) => count(d.refused) },
  { name: "reasons", title: "refused lately, by reason", cell: (d) => refusals(d.recent.refused) },
  { name: "revision", title: "revision", number: true, of: (d) => d.revision, cell: (d) => d.revision },
  { name: "source", title: "source", of: (d) => d.spec.source, cell: (d) => html`<${Text}>${d.spec.source}<//>` },
];
