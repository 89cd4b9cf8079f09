// What was used, as `mesh usage` has it: by deployment, hour, tenant or key.

import { html } from "./vendor/preact-htm.js";
import { Choice, Fault, Notice, Table, Text, useAsked } from "./parts.js";
import { fetched } from "./calls.js";
import { ask } from "./route.js";
import { count } from "./words.js";

const BY = ["deployment", "hour", "both", "tenant", "key", "class"];
const NAMES = { both: "hour and deployment", class: "deployment and SLO class" };
const HOURS = { 1: "the last hour", 24: "a day", 168: "a week", 720: "30 days" };

export function Usage({ asked }) {
  const by = asked.get("by") ?? BY[0];
  const hours = asked.get("since_h") ?? "24";
  const query = new URLSearchParams({ by, since_s: 3600 * hours });
  const { value: told, error } = useAsked(async () => ({ by, rows: await fetched(`api/v1/usage?${query}`) }), [by, hours]);
  return html`<h1>Usage</h1>
    <div class="chosen">
      <${Choice} label="by" all=${BY} value=${by} shown=${(one) => NAMES[one] ?? one} onChange=${(one) => ask({ by: one })} />
      <${Choice} label="within" all=${Object.keys(HOURS)} value=${hours} shown=${(one) => HOURS[one]} onChange=${(one) => ask({ since_h: one })} /></div>
    <${Fault} error=${error} />
    ${told && (told.rows.length
      ? html`<${Table} label="Usage" columns=${[...COLUMNS[told.by], ...COUNTS]} rows=${told.rows} keyOf=${(u) => `${u.hour_unix_s} ${u.deployment} ${u.tenant} ${u.key_id} ${u.slo_class}`} />`
      : html`<${Notice}>Nothing was used in that time.<//>`)}`;
}

const HOUR = { title: "hour (UTC)", cell: (u) => new Date(1000 * u.hour_unix_s).toISOString().slice(0, 16).replace("T", " ") };
const DEPLOYMENT = { title: "deployment", cell: (u) => html`<${Text}>${u.deployment || "(unknown)"}<//>` };
const TENANT = { title: "tenant", cell: (u) => html`<${Text}>${u.tenant || "(none)"}<//>` };
const KEY = { title: "key", cell: (u) => html`<${Text}>${u.key_id || "(none)"}<//>` };
const CLASS = { title: "SLO class", cell: (u) => html`<${Text}>${u.slo_class || "(none)"}<//>` };
const COLUMNS = { deployment: [DEPLOYMENT], hour: [HOUR], both: [HOUR, DEPLOYMENT], tenant: [TENANT], key: [TENANT, KEY], class: [DEPLOYMENT, CLASS] };
const COUNTS = [
  { title: "requests", number: true, cell: (u) => count(u.requests) },
  { title: "prompt tokens", number: true, cell: (u) => count(u.prompt_tokens) },
  { title: "output tokens", number: true, cell: (u) => count(u.output_tokens) },
  { title: "refused", number: true, cell: (u) => count(u.refused) },
  { title: "energy (J)", number: true, cell: (u) => count(u.energy_j && Math.round(u.energy_j)) },
];
