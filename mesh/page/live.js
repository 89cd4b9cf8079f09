// The cell as the controller tells it: the whole state once, then merge patches (RFC 7396), samples
// and lines. Values are never changed in place, so that what is the same object has not changed.

import { answered, channel, events } from "./calls.js";
import { session } from "./session.js";

const LINES_MAX = 2000;
const SAMPLES_MAX = 900; // as many as the controller keeps
const PLACES_MAX = 4000;
const RETRY_MS = 2000;
// Browsers open six connections to a host, all windows together. Those that began to follow last keep
// one; another looks every few seconds at what it has missed, until it is used again. A place that
// becomes free is taken by the one that looks next: woken together, all that wait would take it.
export const STREAMS_MAX = 4;
export const LOOK_S = 5;
const STAY_MS = 100; // of a look, after its first event: a window that is opened needs connections for its files

export const live = {
  state: null, // as of /api/v1/cell; null before the first answer
  samples: {}, // columns by name, the oldest first
  lines: [], // { line_id, time_unix_s, kind, subject, text, deployment }, the oldest first
  heardMs: performance.now(), // when the controller was heard last
  note: "", // why what is shown began anew, in the controller's words
  ended: "", // why nothing more was told, until something is
  error: null, // { status, message, hint }: why the controller refuses to show anything
};
export const places = new Map(); // the node of each instance that is or was there, by its id
const listeners = new Set();
let drawing = false;
let lastId = ""; // of the last event that was taken
let follows = false; // whether the other windows were told that this one follows
let left = false; // whether the events ended because this window was hidden, or had to make room
const me = Math.random();
const newer = new Set(); // the windows that began to follow after this one
const windows = channel("events");
const tell = (now) => {
  if (now || follows) windows.postMessage({ of: me, follows: now });
  follows = now;
};
const tellNewest = () => {
  newer.clear();
  tell(true);
};

export function onChange(listener) {
  listeners.add(listener);
  return () => listeners.delete(listener);
}

export const isCrowded = () => newer.size >= STREAMS_MAX;

const waits = () => isCrowded() || !follows;

windows.onmessage = ({ data }) => {
  const was = isCrowded();
  if (data.follows) newer.add(data.of); else newer.delete(data.of);
  if (isCrowded() && !was) dispatchEvent(new Event("crowded"));
};
addEventListener("focus", tellNewest); // it follows, or is about to
addEventListener("pagehide", () => tell(false));

// A hidden tab follows nothing, so no silence is counted; shown again it counts from then on.
export function silentS() {
  return document.hidden ? 0 : (performance.now() - live.heardMs) / 1000 - (waits() ? LOOK_S : 0);
}

addEventListener("visibilitychange", () => {
  live.heardMs = performance.now();
  draw();
});

export function merged(target, patch) {
  const result = { ...target };
  for (const [name, value] of Object.entries(patch)) {
    if (value === null) delete result[name];
    else if (isObject(value)) result[name] = merged(isObject(result[name]) ? result[name] : {}, value);
    else result[name] = value;
  }
  return result;
}

const TAKES = {
  cell: ({ why, samples, ...state }) => {
    placed(state.instances);
    const lines = why && left && !session.journal ? live.lines : []; // over a journal one may have gone back
    Object.assign(live, { state, samples, lines, note: why && !left && `Shown anew: ${why}` });
  },
  change: ({ patch, samples }) => {
    placed(patch.instances);
    live.state = merged(live.state, patch);
    live.samples = appended(live.samples, samples);
  },
  lines: (told) => {
    const known = new Set(live.lines.map((one) => one.line_id));
    const fresh = told.filter((one) => !one.line_id || !known.has(one.line_id)); // an earlier version tells none
    live.lines = [...live.lines, ...fresh].slice(-LINES_MAX);
  },
  end: () => {},
};

const happens = (names, withinMs = 60_000) => new Promise((resolve) => {
  const signal = AbortSignal.timeout(withinMs);
  signal.onabort = resolve;
  for (const name of names.split(" ")) addEventListener(name, resolve, { once: true, signal });
});

// Follows the cell's events until a key is wanted. A hidden tab follows none. Shown again it goes on
// after the last event; where that is not kept any more it is told the whole, and keeps the lines that
// it has.
export async function follow() {
  for (;;) {
    if (isCrowded()) await happens("focus", (500 + 500 * me) * LOOK_S); // windows do not look in step
    while (document.hidden) await happens("visibilitychange");
    if (!isCrowded()) tellNewest();
    const leaving = new AbortController();
    const { signal } = leaving;
    for (const name of ["visibilitychange", "crowded"]) addEventListener(name, () => leaving.abort(), { signal });
    let stays;
    try {
      const answer = await ask(signal);
      live.error = null;
      for await (const { name, data, id } of events(answer.body, signal)) {
        const last = id ?? lastId;
        lastId = ""; // after an event that cannot be taken, the whole is wanted
        take(name, JSON.parse(data));
        lastId = last;
        if (waits()) stays ??= setTimeout(() => leaving.abort(), STAY_MS);
      }
    } catch (error) {
      live.error = error.status ? error : null; // where nobody answers, the silence says so
      draw();
      if (error.status === 401) { // another may sign in, who may see other things
        lastId = "";
        Object.assign(live, { state: null, lines: [] });
        return;
      }
    } finally {
      left = signal.aborted;
      if (left) tell(false);
      leaving.abort();
    }
    if (!left) await happens("visibilitychange", RETRY_MS);
  }
}

async function ask(signal) {
  const asked = await early.events; // by early.js, once
  early.events = null;
  return asked?.ok ? asked : answered("api/v1/events", { headers: { "last-event-id": lastId }, signal });
}

function take(name, told) {
  live.heardMs = performance.now();
  live.ended = name === "end" ? `Nothing more was told: ${told.why}` : "";
  TAKES[name]?.(told); // a controller of another version may tell more
  draw();
}

function placed(instances) {
  for (const [id, one] of Object.entries(instances ?? {})) if (one?.node_id) places.set(id, one.node_id);
  for (const id of [...places.keys()].slice(0, -PLACES_MAX)) places.delete(id);
}

function appended(columns, samples) {
  const last = columns.time_unix_s?.at(-1) ?? -Infinity; // a journal that stands still has no new ones
  samples = samples.filter((one) => one.time_unix_s > last);
  if (!samples.length) return columns;
  return Object.fromEntries(
    Object.keys(samples[0]).map((name) => [
      name, [...(columns[name] ?? []), ...samples.map((one) => one[name])].slice(-SAMPLES_MAX),
    ]),
  );
}

function draw() {
  if (drawing) return;
  drawing = true;
  requestAnimationFrame(() => {
    drawing = false;
    for (const listener of listeners) listener();
  });
}

function isObject(value) {
  return typeof value === "object" && value !== null && !Array.isArray(value);
}
