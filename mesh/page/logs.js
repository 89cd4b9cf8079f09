// What happened in the cell, live, as `mesh logs` has it: filtered, searched, paused, copied.

import { html, Component, useState } from "./vendor/preact-htm.js";
import { places } from "./live.js";
import { Choice, Copy, Text } from "./parts.js";
import { ask } from "./route.js";
import { session } from "./session.js";
import { clock } from "./words.js";

const KINDS = ["deployment", "instance", "request", "node", "cell"];
const SHOWN_MAX = 500;
const CHARS_MAX = 2000; // of one line; the rest is shown when it is opened

export function Logs({ state, lines: all, asked }) {
  const [held, setHeld] = useState(null); // the lines as they were when it was paused
  const wanted = Object.fromEntries(["kind", "deployment", "node", "search"].map((name) => [name, asked.get(name) ?? ""]));
  const lines = (held ?? all).filter((line) => fits(line, wanted));
  const shown = lines.slice(-SHOWN_MAX);
  const choice = (name, all) => html`<${Choice} label=${name} all=${["", ...all]} value=${wanted[name]} shown=${(one) => one || "all"} onChange=${(one) => ask({ [name]: one })} />`;
  return html`<h1>Logs</h1>
    <div class="chosen">
      ${choice("kind", KINDS)} ${choice("deployment", Object.keys(state.deployments).sort())} ${Object.keys(state.nodes).length > 0 && choice("node", Object.keys(state.nodes).sort())}
      <label>search <input type="search" value=${wanted.search} onInput=${(event) => ask({ search: event.target.value })} /></label>
      <button aria-pressed=${held !== null} onClick=${() => setHeld(held ? null : all)}>${held ? "go on" : "pause"}</button>
      <${Copy} text=${() => shown.map(written).join("\n")} />
      <span class="dim" role="status">${shown.length} of ${(held ?? all).length} lines${held ? `, paused; ${newer(held, all)} newer` : ""}</span>
    </div>
    ${shown.length ? html`<ol class="lines log">${shown.map((line) => html`<${Line} key=${line.line_id} line=${line} />`).reverse()}</ol>`
      : html`<p class="dim">${all.length ? "No line fits." : `Nothing has happened${session.role === "tenant" ? " to your deployments" : ""} of late.`}</p>`}`;
}

function newer(held, lines) {
  const last = lines.findLastIndex((one) => one.line_id === held.at(-1)?.line_id);
  return `${held.length && last < 0 ? "at least " : ""}${lines.length - 1 - last}`;
}

const written = (line) => `${clock(line.time_unix_s)} ${line.kind} ${line.subject} ${line.text}`;

export class Line extends Component {
  shouldComponentUpdate({ line }) {
    return line !== this.props.line;
  }

  render({ line }) {
    const long = line.text.length > CHARS_MAX;
    return html`<li><time>${clock(line.time_unix_s)}</time> <span class="dim">${line.kind}</span> <b><${Text}>${line.subject}<//></b> <${Text}>${long ? `${line.text.slice(0, CHARS_MAX)} …` : line.text}<//>
      ${long && html`<details><summary>all of its ${line.text.length} characters</summary><${Text}>${line.text}<//></details>`}</li>`;
  }
}

// A line is of the deployment that it is about, and of the node that it is about, by its instance, or names.
function fits(line, { kind, deployment, node, search }) {
  if (kind && line.kind !== kind) return false;
  if (deployment && line.deployment !== deployment) return false;
  if (node && ![line.subject, places.get(line.subject)].includes(node) && !named(line.text, node)) return false;
  return !search || written(line).toLowerCase().includes(search.toLowerCase());
}

const named = (text, name) => text.split(/[\s,:]+/).some((word) => word === name || word.startsWith(`${name}-`));
