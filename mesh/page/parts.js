// What several views are made of: tables, badges, bars.

import { html, Component, useEffect, useState } from "./vendor/preact-htm.js";
import { answered } from "./calls.js";

const ROWS_TOGETHER = 40;
const ROWS_A_PIECE = 10; // of a long table: as many as are drawn within a frame
const ROOM_PX = 6; // for one more digit
const KEPT_MS = 60_000; // browsers read what is saved a little later

export const Badge = ({ state }) => html`<span class="badge is-${state}">${state}</span>`;

export const Text = ({ children }) => html`<bdi>${children}</bdi>`;

export const Notice = ({ children, bad = false }) =>
  html`<p class="notice ${bad ? "bad" : ""}" role=${bad ? "alert" : "status"}>${children}</p>`;

export const NothingDeployed = () => html`<${Notice}>Nothing is deployed yet. <code>mesh deploy MODEL.yaml</code> deploys a model.<//>`;

// A number in a list of the class "totals".
export const Total = ({ name, value, small = false }) => html`<div><dt>${name}</dt><dd class=${small ? "small" : ""}>${value}</dd></div>`;

export const Choice = ({ label, all, value, shown = String, onChange }) => html`<label>${label}
  <select value=${value} onChange=${(event) => onChange(event.target.value)}>${all.map((one) => html`
    <option value=${one} selected=${one === value}>${shown(one)}</option>`)}</select></label>`;

// A button for what cannot be undone: it asks a second time.
export function Twice({ verb, label, busy = false, onSure, children }) {
  const [asking, setAsking] = useState(false);
  if (!asking) return html`<button class="bad" disabled=${busy} aria-label=${label} onClick=${() => setAsking(true)}>${verb} …</button>`;
  return html`<span class="asked">${children} for good?
    <button class="bad" onClick=${() => { setAsking(false); onSure(); }}>${verb} it</button> <button onClick=${() => setAsking(false)}>keep it</button></span>`;
}

export const Fault = ({ error }) =>
  error && html`<p class="notice bad" role="alert"><${Text}>${error.message}<//>
    ${error.hint && html`<br /><span class="dim">hint: <${Text}>${error.hint}<//></span>`}</p>`;

// Saves what the controller makes when it is asked, or says why it is refused.
export function Saved({ path, name, children, note = null }) {
  const [{ busy = false, error }, setTold] = useState({});
  const save = async (event) => {
    event.preventDefault();
    setTold({ busy: true });
    try {
      const href = URL.createObjectURL(await (await answered(path)).blob());
      Object.assign(document.createElement("a"), { href, download: name }).click();
      setTimeout(() => URL.revokeObjectURL(href), KEPT_MS);
      setTold({});
    } catch (fault) {
      setTold({ error: fault.message ? fault : { message: String(fault) } });
    }
  };
  return html`<p><a class="button" href=${path} download=${name} aria-busy=${busy} onClick=${save}>${children}</a>${note}${busy && " …"}</p>
    <${Fault} error=${error} />`;
}

// Copies what `text` gives. Browsers keep their clipboard's interface from pages over plain HTTP.
export function Copy({ text }) {
  const [said, setSaid] = useState("copy");
  const copy = async () => {
    const done = await navigator.clipboard?.writeText(text()).then(() => true, () => false) || copiedSelected(text());
    setSaid(done ? "copied" : "not copied: select it, and press Ctrl+C");
    setTimeout(() => setSaid("copy"), 2000);
  };
  return html`<button type="button" onClick=${copy}>${said}</button>`;
}

function copiedSelected(text) {
  const area = Object.assign(document.createElement("textarea"), { value: text });
  document.body.append(area);
  area.select();
  const done = document.execCommand("copy");
  area.remove();
  return done;
}

// What `get` gives, as { value } or { error }; asked for anew when one of `keys` changes.
export function useAsked(get, keys) {
  const [told, setTold] = useState({});
  useEffect(() => {
    let left = false;
    get().then((value) => left || setTold({ value }), (error) => left || setTold({ error }));
    return () => { left = true; };
  }, keys);
  return told;
}

export const Share = ({ share, label }) => html`
  <progress max="1" value=${share} aria-label=${label}></progress> ${Math.round(100 * share)} %`;

// A load: what its node is at, and how far it is by the time that earlier loads took.
export function Loading({ instance: { phase, load_s: s, load_expected_s: expected, share } }) {
  if (!expected) return html`${phase} <${Share} share=${share} label="load" />`;
  return html`${phase} <progress max="1" value=${Math.min(s / expected, 1)} aria-label="load"></progress>
    ${s.toFixed(1)} of about ${expected.toFixed(1)} s`;
}

// An element of which `make` makes the inside, but not anew while it is out of sight, unless it is `whole` or has `others` in it than before:
// its style has `content-visibility: auto`.
export class InSight extends Component {
  shouldComponentUpdate({ whole, others }) {
    return whole || !this.skipped || others !== this.props.others;
  }

  render({ tag, make, whole, others, ...given }) {
    const seen = ({ target, currentTarget, skipped }) => {
      if (target !== currentTarget) return; // in some browsers it bubbles
      this.skipped = skipped;
      if (!skipped) this.forceUpdate();
    };
    return html`<${tag} ...${given} oncontentvisibilityautostatechange=${seen}>${make()}<//>`;
  }
}

// columns: { name, title, cell(row), of(row) to sort by, number }. It scrolls in itself when narrow.
// A browser lays out all of a table when a cell changes. The rows of a long one are each a grid, in
// columns as wide as rows from all over it need, and those out of sight are not laid out. Roles are named, for
// browsers derive them from boxes, too.
export class Table extends Component {
  componentDidMount() { this.measure(); }

  componentDidUpdate() { this.measure(); }

  measure() {
    const of = titles(this.props);
    if (this.props.rows.length <= ROWS_TOGETHER || this.state.of === of) return;
    const widths = Array.from(this.base.querySelectorAll("th"), (one) => one.offsetWidth + ROOM_PX);
    const style = { "--columns": widths.map((px) => `minmax(${px}px, ${px}fr)`).join(" "), minWidth: `${widths.reduce((sum, px) => sum + px)}px` };
    this.setState({ of, style });
  }

  render({ label, columns, rows, keyOf, sort = "", onSort = null }, { of, style }) {
    const whole = rows.length <= ROWS_TOGETHER;
    const long = !whole && of === titles({ columns });
    return html`<div class="scroll ${long ? "tall" : ""}" role="region" aria-label=${label} tabindex="0"><table role="table" class=${whole ? "" : long ? "long" : "measured"} style=${long ? style : null}>
      <thead role="rowgroup"><tr role="row">${columns.map((column) => html`
        <th scope="col" role="columnheader" class=${column.number ? "number" : ""} aria-sort=${order(column, sort)}>
          ${onSort && column.of
            ? html`<button class="sort" onClick=${() => onSort(column)}>${column.title}${arrow(column, sort)}</button>`
            : column.title}</th>`)}</tr></thead>
      ${pieces(long || whole ? rows : rows.filter((_, n) => n % Math.ceil(rows.length / ROWS_TOGETHER) === 0), long ? ROWS_A_PIECE : ROWS_TOGETHER).map((some) => html`
        <${InSight} tag="tbody" role="rowgroup" whole=${whole} others=${some.map(keyOf).join()} make=${() => some.map((row) => html`<${Row} key=${keyOf(row)} row=${row} columns=${columns} />`)} />`)}
    </table></div>`;
  }
}

const titles = ({ columns }) => String(columns.map(({ title }) => title));
export const pieces = (rows, size) => Array.from({ length: Math.ceil(rows.length / size) }, (_, n) => rows.slice(n * size, (n + 1) * size));

class Row extends Component {
  shouldComponentUpdate({ row }) {
    return row !== this.props.row;
  }

  render({ row, columns }) {
    return html`<tr role="row">${columns.map((column) => html`
      <td role="cell" class=${column.number ? "number" : ""}>${column.cell(row)}</td>`)}</tr>`;
  }
}

const order = ({ name }, sort) =>
  sort === name ? "ascending" : sort === `-${name}` ? "descending" : null;
const arrow = (column, sort) => ({ ascending: " ↑", descending: " ↓" })[order(column, sort)] ?? "";
