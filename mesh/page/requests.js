// Requests: what is open, with a button to cancel; the last minutes as a timeline; one story whole.

import { html, useEffect, useMemo, useState } from "./vendor/preact-htm.js";
import { Badge, Fault, InSight, Notice, pieces, Saved, Table, Text } from "./parts.js";
import { fetched, post } from "./calls.js";
import { address, ask } from "./route.js";
import { session } from "./session.js";
import { clock, count, limit, seconds, span, tpotLimit } from "./words.js";

const PATH = "api/v1/requests";
const POLL_MS = 2000;
const SPANS_S = [300, 60, 15];
const ENDED_MAX = 2000;
const ENDED_LISTED = 25;

// What `get` gives, asked for again each two seconds while the view is shown; the last error, too.
function usePolled(get, key) {
  const [told, setTold] = useState({});
  useEffect(() => {
    let left = false;
    let timer;
    const ask = async () => {
      try {
        const value = await get();
        if (!left) setTold({ value });
      } catch (error) {
        if (!left) setTold((known) => ({ ...known, error }));
      }
      if (!left) timer = setTimeout(ask, POLL_MS);
    };
    ask();
    return () => { left = true; clearTimeout(timer); };
  }, [key]);
  return told;
}

// Ends are sent once; what was told of them is kept while the view is shown.
function timelineOf() {
  let after = 0;
  let ended = [];
  return async () => {
    const told = await fetched(`${PATH}?after=${after}`);
    if (told.after < after) ended = []; // another controller, which counts anew
    after = told.after;
    ended = [...ended, ...told.ended].filter((call) => endOf(call) > told.time_unix_s - told.window_s).slice(-ENDED_MAX);
    return { ...told, ended };
  };
}

const endOf = (call) => call.ended_unix_s ?? Math.max(...call.spans.map((part) => part.ended_unix_s ?? Infinity));

export function Requests({ asked }) {
  const [get] = useState(timelineOf);
  const { value, error } = usePolled(get, "all");
  const [said, setSaid] = useState({});
  const cancel = async (id) => setSaid(await post(`${PATH}/${encodeURIComponent(id)}/cancel`, {}));
  const only = asked.get("filter") ?? "";
  const fits = (call) => !only || call.deployment === only;
  const [open, ended] = [value?.open.filter(fits), value?.ended.filter(fits)];
  const of = only && html` of <${Text}>${only}<//>`;
  const spanS = SPANS_S.find((one) => one === Number(asked.get("span_s"))) ?? SPANS_S[0];
  return html`<h1>Requests</h1>
    <${Fault} error=${error} />
    ${said.message && html`<${Notice}><${Text}>${said.message}<//><//>`}<${Fault} error=${said.error} />
    ${!value ? html`<${Notice}>Loading …<//>` : html`
      <h2>Queued and running: ${count(value.open_count)}${only && html`, ${count(open.length)}${of}`}</h2>
      ${open.length ? html`<${Table} label="Open requests" columns=${columns(session.journal ? null : cancel)} rows=${open} keyOf=${(r) => r.request_id} />`
        : html`<p class="dim">Nobody waits for an answer${of}.</p>`}
      ${value.open_count > value.open.length && html`<p class="dim">Only the oldest ${value.open.length} are ${only ? "looked through" : "shown"}.</p>`}
      <h2>The last ${value.window_s / 60} minutes</h2>
      <${Saved} path="api/v1/trace" name="mesh-trace.json" note=${html`<span class="dim"> for ui.perfetto.dev or chrome://tracing</span>`}>Chrome trace<//>
      <p role="group" aria-label="Span">${SPANS_S.map((one) => html`
        <button aria-pressed=${one === spanS} onClick=${() => ask({ span_s: one })}>${span(one)}</button> `)}</p>
      <${Timeline} told=${value} only=${only} spanS=${spanS} />
      <h2>Ended lately</h2>
      ${ended.length ? html`<${Table} label="Ended requests" columns=${ENDED} rows=${ended.slice(-ENDED_LISTED).reverse()} keyOf=${(r) => r.request_id} />`
        : html`<p class="dim">None within ${value.window_s / 60} minutes${of}.</p>`}`}`;
}

const link = (r) => html`<a href=${address("requests", r.request_id)}>${r.request_id}</a>`;

const columns = (cancel) => [
  { title: "request", cell: link },
  { title: "deployment", cell: (r) => html`<a href=${address("deployments", r.deployment)}><${Text}>${r.deployment}<//></a>` },
  { title: "phase", cell: (r) => html`<${Badge} state=${r.phase} />` },
  { title: "where", cell: (r) => (r.instance_id ? html`<${Text}>${r.instance_id}<//> on <${Text}>${r.node_id}<//>` : "–") },
  { title: "age", number: true, cell: (r) => seconds(r.age_s) },
  { title: "prompt tokens", number: true, cell: (r) => count(r.prompt_tokens) },
  { title: "output tokens", number: true, cell: (r) => `${count(r.output_tokens)} of ${count(r.output_tokens_max)}` },
  { title: "headroom", number: true, cell: (r) => seconds(r.headroom_s) },
  { title: "tenant", cell: (r) => html`<${Text}>${r.tenant || "–"}<//>` },
  ...(cancel ? [{ title: "end it", cell: (r) => html`<button class="bad" aria-label=${`cancel ${r.request_id}`} onClick=${() => cancel(r.request_id)}>cancel</button>` }] : []),
];

const ENDED = [
  { title: "request", cell: link },
  { title: "deployment", cell: (r) => html`<${Text}>${r.deployment}<//>` },
  { title: "ended by", cell: (r) => r.end },
  { title: "at", number: true, cell: (r) => clock(endOf(r)) },
  { title: "took", number: true, cell: (r) => seconds(endOf(r) - r.spans[0].begun_unix_s) },
  { title: "late tokens", number: true, cell: (r) => count(r.late_tokens) },
];

// The words' letters stand in the bars, so that no meaning is in a colour alone.
const KINDS = { wait: "w", load: "L", prefill: "p", decode: "d", evicted: "e", move: "m" };
const ROW_PX = 18;
const LANES_MAX = 12;
const LANES_A_PIECE = 10; // a browser looks at each piece with each frame

// A lane each for the queue, and for each instance by node: bars that overlap are drawn below each other.
function lanes({ told, only, from }) {
  const found = new Map();
  const add = (place, bar) => {
    if ((bar.ended_unix_s ?? told.time_unix_s) <= from) return;
    if (!found.has(place)) found.set(place, []);
    found.get(place).push(bar);
  };
  for (const call of [...told.ended, ...told.open]) {
    if (only && call.deployment !== only) continue;
    call.spans.forEach((part, n) => {
      const last = n === call.spans.length - 1;
      add(part.instance_id ? `${part.node_id} / ${part.instance_id}` : "queue", { ...part, call, late: last ? call.late_unix_s : [], end: last && call.end });
    });
  }
  for (const load of told.loads) {
    if (only && load.deployment !== only) continue;
    add(`${load.node_id} / ${load.instance_id}`, { ...load, kind: "load", late: [] });
  }
  return [...found].sort(([a], [b]) => (a === "queue" ? -1 : b === "queue" ? 1 : a < b ? -1 : 1));
}

function stacked(bars, nowS) {
  const free = [];
  const sorted = [...bars].sort((a, b) => a.begun_unix_s - b.begun_unix_s);
  return sorted.map((bar) => {
    let row = free.findIndex((until) => until <= bar.begun_unix_s);
    if (row < 0) row = Math.min(free.length, LANES_MAX - 1);
    free[row] = bar.ended_unix_s ?? nowS;
    return { ...bar, row };
  });
}

// A link for each deployment, drawn anew only where there are others.
const Only = ({ names, only, spanS }) => useMemo(() => html`<p>Only ${names.map((name) => html`
  <a class="button" href=${address("requests", "", { filter: name === only ? "" : name, span_s: spanS })} aria-current=${name === only}><${Text}>${name}<//></a> `)}</p>`, [names.join(), only, spanS]);

// Drawn when calls were asked for anew, not with each event of the cell.
const Timeline = (given) => useMemo(() => timeline(given), Object.values(given));

function timeline({ told, only, spanS }) {
  const from = told.time_unix_s - spanS;
  const at = (unixS) => Math.max(0, Math.min(100, (100 * (unixS - from)) / spanS));
  const all = lanes({ told, only, from });
  const names = [...new Set([...told.ended, ...told.open].map((call) => call.deployment))].sort();
  return html`
    <ul class="legend">${Object.entries(KINDS).map(([kind, letter]) => html`<li><b class="span-${kind}">${letter}</b> ${kind}</li>`)}
      <li><b class="late">!</b> late token</li><li><b class="end">|</b> end</li></ul>
    ${names.length > 1 && html`<${Only} names=${names} only=${only} spanS=${spanS} />`}
    ${!all.length ? html`<p class="dim">No request within ${span(spanS)}.</p>` : html`<div class="timeline" role="region" aria-label="Timeline" tabindex="0">
      <p class="lane-times"><span>${clock(from)}</span><span>${clock(from + spanS / 2)}</span><span>${clock(told.time_unix_s)}</span></p>
      ${pieces(all, LANES_A_PIECE).map((some) => {
        const make = () => some.map(([place, bars]) => {
          const rows = stacked(bars, told.time_unix_s);
          const height = ROW_PX * (1 + Math.max(0, ...rows.map((bar) => bar.row)));
          const [{ node_id, instance_id }] = bars;
          return html`<div class="lane" key=${place}><p>${instance_id ? html`<${Text}>${node_id}<//> / <${Text}>${instance_id}<//>` : place}</p><div class="bars" style=${{ height: `${height}px` }}>${rows.map((bar) => {
            const [left, right] = [at(bar.begun_unix_s), at(bar.ended_unix_s ?? told.time_unix_s)];
            const name = bar.call ? `${bar.call.request_id}, ${bar.call.deployment}: ${bar.kind}` : `${bar.instance_id}: load${bar.tier && ` from ${bar.tier}`}`;
            const title = `${name}, ${seconds((bar.ended_unix_s ?? told.time_unix_s) - bar.begun_unix_s)}${bar.end ? `, ended by ${bar.end}` : ""}`;
            const place = { left: `${left}%`, width: `max(3px, ${right - left}%)`, top: `${ROW_PX * bar.row}px` };
            const marks = bar.late.map((unixS) => html`<i class="late" style=${{ left: `${at(unixS)}%`, top: place.top }} title="late token">!</i>`);
            return [bar.call
              ? html`<a class="span-${bar.kind} ${bar.end ? "ended" : ""}" style=${place} title=${title} aria-label=${title} href=${address("requests", bar.call.request_id)}>${KINDS[bar.kind]}</a>`
              : html`<span class="span-load" style=${place} title=${title}>${KINDS.load}</span>`, ...marks];
          })}</div></div>`;
        });
        return html`<${InSight} tag="div" class="lanes" style=${{ containIntrinsicSize: `auto ${3 * some.length}rem` }} others=${some.map(([place]) => place).join()} make=${make} />`;
      })}
    </div>`}`;
}

export function OneRequest({ name, state }) {
  const { value: told, error } = usePolled(() => fetched(`${PATH}/${encodeURIComponent(name)}`), name);
  if (!told) return html`<h1><${Text}>${name}<//></h1>${error ? html`<${Fault} error=${error} />` : html`<${Notice}>Loading …<//>`}
    <p><a href=${address("requests")}>All requests</a></p>`;
  const task = state.deployments[told.deployment]?.spec.task;
  const late = told.tokens_after_s.filter((s, n) => s > told.due_after_s[n]).length;
  return html`<h1>${told.request_id} <${Badge} state=${told.phase} /></h1>
    <p>To <a href=${address("deployments", told.deployment)}><${Text}>${told.deployment}<//></a>: ${count(told.prompt_tokens)} prompt tokens${!task && `, ${count(told.output_tokens)} of up to ${count(told.output_tokens_max)} output tokens`}, ${seconds(told.age_s)}. TTFT limit ${seconds(told.slo.ttft_s)}${told.grace_s ? ` and ${seconds(told.grace_s)} of grace` : ""}, TPOT limit ${tpotLimit({ task, slo: told.slo })}; ${told.late_tokens} late tokens.</p>
    <h2>What was decided</h2>
    <ol class="lines">${told.steps.map((step) => html`<li><time>${seconds(step.after_s)}</time> <${Text}>${step.text}<//></li>`)}</ol>
    ${told.steps_left_out > 0 && html`<p class="dim">${told.steps_left_out} more are left out.</p>`}
    ${!task && html`<h2>Tokens against their deadlines</h2>
    ${told.tokens_after_s.length ? html`<div class="scroll" role="region" aria-label="Tokens" tabindex="0"><${Tokens} told=${told} /></div>
      <p class="dim">${told.tokens_after_s.length} tokens, ${late} of them late. The line is when each was due, the dots are when they came.</p>`
      : html`<p class="dim">It has no token yet.</p>`}`}
    <p><a href=${address("requests")}>All requests</a></p>`;
}

const [WIDE, HIGH, EDGE] = [800, 220, 64];

const Tokens = ({ told }) => useMemo(() => tokens(told), [told]);

function tokens(told) {
  const most = Math.max(told.due_after_s.at(-1), ...told.tokens_after_s) || 1;
  const n = Math.max(told.tokens_after_s.length - 1, 1);
  const x = (index) => EDGE + ((WIDE - EDGE - 8) * index) / n;
  const y = (s) => HIGH - 22 - ((HIGH - 34) * s) / most;
  const line = told.due_after_s.map((s, index) => `${x(index).toFixed(1)},${y(s).toFixed(1)}`).join(" ");
  return html`<svg class="tokens" viewBox="0 0 ${WIDE} ${HIGH}" role="img" aria-label=${`${told.tokens_after_s.length} tokens beside their deadlines`}>
    ${[0, 0.5, 1].map((share) => html`<text x="2" y=${y(share * most) + 4}>${limit(share * most)}</text>
      <line class="grid" x1=${EDGE} x2=${WIDE} y1=${y(share * most)} y2=${y(share * most)} />`)}
    <text x=${EDGE} y=${HIGH - 4}>token 1</text><text x=${WIDE - 8} y=${HIGH - 4} text-anchor="end">${told.tokens_after_s.length}</text>
    <polyline class="due" points=${line} />
    ${told.tokens_after_s.map((s, index) => html`<circle class=${s > told.due_after_s[index] ? "bad" : ""} cx=${x(index)} cy=${y(s)} r="2.5" />`)}
  </svg>`;
}
