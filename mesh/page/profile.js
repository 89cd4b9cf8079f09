// The iteration times of a deployment's model, as `mesh profile` knows them, by kind of node.

import { html } from "./vendor/preact-htm.js";
import { Fault, Text, useAsked } from "./parts.js";
import { fetched } from "./calls.js";

const [WIDE, HIGH, LEFT, BELOW] = [420, 210, 52, 34];

export function Profiles({ name, since }) {
  const told = useAsked(() => fetched(`api/v1/deployments/${encodeURIComponent(name)}/profiles`), [name, since]);
  return html`<h2>Profile</h2><${Fault} error=${told.error} />
    ${told.value && !told.value.length && html`<p class="dim">No iteration time of its model is known yet.</p>`}
    ${told.value?.map(({ profile, nodes }) => html`<section>
      <p class="dim"><${Text}>${profile.hardware}<//>, ${profile.cores} cores, ${profile.scaled_from ? html`estimated from <${Text}>${profile.scaled_from}<//>` : "measured"}${nodes.length ? `; holds for ${nodes.join(", ")}` : ""}</p>
      <div class="charts">
        <${Times} title="prefill, one iteration" grid=${profile.prefill} rows="prompt tokens" columns="past tokens" />
        ${!profile.model_id.includes("+for-") && html`<${Times} title="decode, one iteration" grid=${profile.decode} rows="batch" columns="mean context tokens" />`}
      </div></section>`)}`;
}

// Logarithmic both ways; a line for each column of the grid.
function Times({ title, grid, rows, columns }) {
  const times = grid.seconds.flat().map((s) => 1000 * s);
  const x = scale(Math.min(...grid.rows), Math.max(...grid.rows), LEFT, WIDE - 12);
  const y = scale(Math.min(...times), Math.max(...times), HIGH - BELOW, 14);
  const label = `${title}: ${times.length} times from ${shown(Math.min(...times))} to ${shown(Math.max(...times))} ms`;
  return html`<figure class="chart"><figcaption>${title}, ms</figcaption>
    <svg class="times" viewBox="0 0 ${WIDE} ${HIGH}" role="img" aria-label=${label}>
      ${[0, 0.5, 1].map((share) => { const at = y.back(share); return html`<line class="grid" x1=${LEFT} x2=${WIDE} y1=${y(at)} y2=${y(at)} /><text x="2" y=${y(at) + 4}>${shown(at)}</text>`; })}
      ${[0, 0.5, 1].map((share) => html`<text x=${x(x.back(share))} y=${HIGH - 18} text-anchor=${["start", "middle", "end"][2 * share]}>${shown(x.back(share))}</text>`)}
      <text x=${(LEFT + WIDE) / 2} y=${HIGH - 3} text-anchor="middle">${rows}</text>
      ${grid.columns.map((_, n) => html`<polyline class="line-${n % 7}" points=${grid.rows.map((row, m) => `${x(row).toFixed(1)},${y(1000 * grid.seconds[m][n]).toFixed(1)}`).join(" ")} />`)}
    </svg>
    <ul class="legend"><li>${columns}:</li>${grid.columns.map((column, n) => html`<li class="of-line-${n % 7}">${DASHES[n % 7]} ${grid.columns.length > 1 ? column : "any"}</li>`)}</ul></figure>`;
}

const DASHES = ["───", "─ ─", "···", "─·─", "· ·", "━ ━", "─··"];
const shown = (value) => Number(value.toPrecision(3)).toLocaleString("en");

function scale(least, most, from, to) {
  const [low, high] = [Math.log(least), Math.log(Math.max(most, least * 1.001))];
  const at = (value) => from + ((Math.log(value) - low) / (high - low)) * (to - from);
  return Object.assign(at, { back: (share) => Math.exp(low + share * (high - low)) });
}
