// The cell's last quarter of an hour in charts with one cursor.

import { html } from "./vendor/preact-htm.js";
import { Chart } from "./chart.js";
import { Notice } from "./parts.js";
import { MIB } from "./words.js";

const CHARTS = [
  { title: "Output tokens per second", series: [{ label: "tokens/s", column: "tokens_per_s", digits: 1 }] },
  { title: "Requests running and queued", series: [{ label: "running", column: "running" }, { label: "queued", column: "queued" }] },
  { title: "Refusals per second", series: [{ label: "refused/s", column: "refused_per_s", digits: 2 }] },
  { title: "SLO met within five minutes, %", least: 100, series: [{ label: "SLO met, %", column: "attainment", digits: 1, times: 100 }] },
  { title: "Least headroom of all requests, s", low: true, series: [{ label: "headroom, s", column: "headroom_least_s", digits: 2 }] },
  { title: "Iteration of busy instances in the mean, ms", series: [
    { label: "predicted, ms", column: "iteration_s", digits: 1, times: 1000 },
    { label: "measured, ms", column: "iteration_measured_s", digits: 1, times: 1000 }] },
  { title: "Memory that is held or promised, all nodes, MiB", gaps: true, series: [
    ["base", "base_bytes"], ["weights", "weights_bytes"], ["KV", "kv_used_bytes"], ["cached", "kv_cached_bytes"],
    ["idle", "kv_idle_bytes"], ["in flight", "in_flight_bytes"],
  ].map(([label, column]) => ({ label, column, digits: 0, times: 1 / MIB })) },
  { title: "Nodes ready and in use", gaps: true, series: [{ label: "ready", column: "nodes_ready" }, { label: "in use", column: "nodes_used" }] },
];

export function Charts({ samples }) {
  if (!samples.time_unix_s?.length) return html`<h1>Charts</h1>
    <${Notice}>There are no samples that this key may see: they count what all tenants do.<//>`;
  return html`<h1>Charts</h1>
    <p class="dim">The last 15 minutes, one cursor through all. Memory, headroom and iterations are looked at once a second
      while somebody views, and every 15 seconds otherwise.</p>
    <div class="charts">${CHARTS.map((one) => html`<${Chart} key=${one.title} ...${one} columns=${samples} />`)}</div>`;
}
