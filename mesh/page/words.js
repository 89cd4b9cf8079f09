// Numbers in words, with their units. What is not known is a dash.

const NONE = "–";
export const MIB = 2 ** 20;

const known = (say) => (value, ...more) => (value === null || value === undefined ? NONE : say(value, ...more));

export const mib = known((bytes) => (bytes / MIB).toFixed(Math.abs(bytes / MIB) < 100 ? 1 : 0).replace(/^-(0\.0)$/, "$1"));
export const seconds = known((s) => `${s.toFixed(2)} s`);
export const limit = known((s) => `${Number(s.toPrecision(6))} s`);
export const millis = known((s) => `${Number((1000 * s).toFixed(1))} ms`);
// Vectors have no tokens after the first; those of best effort come as others let them.
export const tpotLimit = ({ task, slo }) => millis(task || slo.best_effort ? null : slo.tpot_s);
export const percent = known((share) => `${Number((100 * share).toFixed(1))} %`);
// For whole numbers. Browsers take 40 ms to write the first number by a locale, and the first card would wait for it.
export const count = known((n) => String(n).replace(/\B(?=(\d{3})+$)/g, ","));
export const fixed = known((n, digits = 2) => n.toFixed(digits));
// In a journal times count from its beginning, and are no time of day.
export const clocks = { options: {} };
export const clock = (unixS) => new Date(1000 * unixS).toLocaleTimeString("en-GB", clocks.options);

// How far an import or a load is; a failure has a reason alone.
export const phase = ({ phase, share, state }) =>
  (phase && state !== "failed" ? `${phase} ${Math.round(100 * share)} %` : phase);

export function span(s) {
  if (s < 120) return `${s.toFixed(0)} s`;
  if (s < 7200) return `${(s / 60).toFixed(0)} min`;
  return s < 172800 ? `${(s / 3600).toFixed(1)} h` : `${(s / 86400).toFixed(1)} days`;
}

// "queue_full 2, memory_full 1"; "0" where nothing was refused. A reason stays beside its number.
export const refusals = (byReason) =>
  Object.entries(byReason ?? {}).map(([reason, n]) => `${reason}\u00a0${count(n)}`).join(", ") || "0";
