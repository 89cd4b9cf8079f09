// Over a journal: where one stands in it, and how one moves: a slider, steps by decision, and speed.

import { html, useEffect, useState } from "./vendor/preact-htm.js";
import { Fault, Text } from "./parts.js";
import { fetched, post } from "./calls.js";
import { count, span } from "./words.js";

const PATH = "api/v1/journal";
const [PLAYED_MS, STILL_MS] = [500, 3000]; // another tab may move, too
const SPEEDS = [1, 10, 60, 600];

export function Journal() {
  const [where, setWhere] = useState(null);
  const [error, setError] = useState(null);
  const [speed, setSpeed] = useState(10);
  const [dragged, setDragged] = useState(null); // where the slider is, until it is let go
  const [busy, setBusy] = useState(false); // each step goes out from where the last one led
  const take = (told) => (told.error ? setError(told.error) : (setError(null), setWhere(told)));
  const move = async (asked) => {
    setBusy(true);
    take(await post(PATH, asked));
    setBusy(false);
    setDragged((at) => (at === asked.index ? null : at)); // unless it is dragged anew
  };
  useEffect(() => { fetched(PATH).then(take, setError); }, []);
  useEffect(() => {
    if (!where) return undefined;
    const again = (fault) => { setError(fault); setWhere((known) => ({ ...known })); };
    const timer = setTimeout(() => fetched(PATH).then(take, again), where.speed ? PLAYED_MS : STILL_MS);
    return () => clearTimeout(timer);
  }, [where]);
  if (!where) return error ? html`<${Fault} error=${error} />` : null;
  const { index, events } = where;
  return html`<section class="journal" aria-label="Journal">
    <label>decision <input type="range" min="0" max=${events} value=${dragged ?? index} onInput=${(event) => setDragged(Number(event.target.value))} onBlur=${() => setDragged(null)} onChange=${(event) => move({ index: Number(event.target.value) })} /></label>
    <button disabled=${busy || index === 0} onClick=${() => move({ index: index - 1 })}>step back</button>
    <button disabled=${busy || index === events} onClick=${() => move({ index: index + 1 })}>step on</button>
    <button disabled=${busy || index === events} onClick=${() => move({ index: events })}>to its end</button>
    ${where.speed ? html`<button onClick=${() => move({ speed: 0 })}>pause</button>`
      : html`<button disabled=${busy || index === events} onClick=${() => move({ speed })}>play</button>`}
    <label>speed <select value=${speed} onChange=${(event) => { setSpeed(Number(event.target.value)); if (where.speed) move({ speed: Number(event.target.value) }); }}>
      ${SPEEDS.map((one) => html`<option value=${one} selected=${one === speed}>${one} ×</option>`)}</select></label>
    <span role="status">${count(index)} of ${count(events)} decisions, ${where.at_s.toFixed(3)} s of ${span(where.span_s)}${where.event && `: ${where.event}`}</span>
    ${where.trouble && html`<${Fault} error=${{ message: where.trouble }} />`}<${Fault} error=${error} />
    ${where.decision && html`<details><summary>The last decision</summary><pre class="code" tabindex="0"><${Text}>${where.decision}<//></pre></details>`}
  </section>`;
}
