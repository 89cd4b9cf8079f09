// A chart of the last quarter of an hour. All charts share one cursor.

import { html, Component } from "./vendor/preact-htm.js";
import { clock } from "./words.js";

const HEIGHT_PX = 130;
const SYNC = "mesh";
const PAINTED_MS = 100; // from a frame until it is on the screen

const WHOLE = [...Array(9).keys()].flatMap((n) => [1, 2, 5].map((times) => times * 10 ** n)); // between the marks of counts

let coming = null;

// uPlot comes with the first chart, once what is around it is on the screen: that need not wait for it.
export const uPlotCame = () => coming ??= painted().then(() => Promise.all([
  brought("script", { src: "page/vendor/uplot.js" }),
  brought("link", { rel: "stylesheet", href: "page/vendor/uplot.css" }),
]));

const painted = () => new Promise((resolve) => { requestAnimationFrame(() => setTimeout(resolve, PAINTED_MS)); });

const brought = (tag, given) => new Promise((resolve) => {
  const onerror = tag === "link" ? resolve : () => { coming = null; }; // the next chart asks again
  document.head.prepend(Object.assign(document.createElement(tag), { ...given, onload: resolve, onerror }));
});

const DASHES = [[], [6, 4], [2, 3], [10, 3, 2, 3], [1, 4], [12, 4], [4, 2, 1, 2]]; // lines differ without colours, too

// series: [{ label, column, digits, times }]; columns: samples by name. `least`: the axis goes up to
// it at least; `low`: it goes below 0 where values do;
// `gaps`: lines go on over seconds without a value.
export class Chart extends Component {
  componentDidMount() {
    this.observer = new ResizeObserver(() => this.fit());
    this.observer.observe(this.place);
    this.scheme = matchMedia("(prefers-color-scheme: dark)");
    uPlotCame().then(() => {
      if (this.gone) return;
      this.scheme.onchange = () => this.draw();
      this.draw();
    });
  }

  componentWillUnmount() {
    this.gone = true;
    this.observer.disconnect();
    this.scheme.onchange = null;
    this.plot?.destroy();
  }

  shouldComponentUpdate({ columns }) {
    if (columns !== this.props.columns) this.plot?.setData(this.data(columns));
    return false; // uPlot draws what is inside
  }

  data(columns) {
    return [columns.time_unix_s ?? [], ...this.props.series.map(({ column, times = 1 }) => {
      const values = columns[column] ?? [];
      return times === 1 ? values : values.map((value) => (value === null ? null : value * times));
    })];
  }

  fit() {
    this.plot?.setSize({ width: this.place.clientWidth, height: HEIGHT_PX });
  }

  draw() {
    const style = getComputedStyle(this.place);
    const colour = (name) => style.getPropertyValue(name).trim();
    const axis = { stroke: colour("--dim"), grid: { stroke: colour("--line"), width: 1 }, ticks: { show: false } };
    const y = { ...axis, size: (_, marks) => 14 + 7 * Math.max(5, ...(marks ?? []).map((mark) => mark.length)) };
    if (this.props.series.every((one) => !one.digits)) y.incrs = WHOLE;
    this.plot?.destroy();
    this.plot = new window.uPlot({
      width: this.place.clientWidth,
      height: HEIGHT_PX,
      cursor: { sync: { key: SYNC }, drag: { setScale: false } },
      scales: { y: { range: (_, least, most) => [this.props.low ? Math.min(least ?? 0, 0) : 0, Math.max(most ?? 0, this.props.least ?? 1)] } },
      axes: [{ ...axis, size: 30, space: 70, values: (_, times) => times.map(clock) }, y],
      series: [
        { value: (_, time) => (time ? clock(time) : "–") },
        ...this.props.series.map((one, n) => ({
          label: one.label, stroke: colour(`--series-${n}`), width: 1.5, dash: DASHES[n], spanGaps: this.props.gaps, points: { show: false },
          value: (_, value) => (value === null || value === undefined ? "–" : value.toFixed(one.digits ?? 0)),
        })),
      ],
    }, this.data(this.props.columns), this.place);
  }

  render({ title }) {
    return html`<figure class="chart"><figcaption>${title}</figcaption>
      <div ref=${(place) => { if (place) this.place = place; }}></div></figure>`;
  }
}
