// The cell as the controller tells it: the whole state once, then merge patches (RFC 7396), samples
// and lines. Values are never changed in place, so that what is the same object has not changed.

const LINES_MAX = 2000;
const SAMPLES_MAX = 900; // as many as the controller keeps
const RETRY_MS = 2000;

export const live = {
  state: null, // as of /api/v1/cell; null before the first answer
  samples: {}, // columns by name, the oldest first
  lines: [], // { number, time_unix_s, kind, subject, text, deployment }, the oldest first
  heardMs: performance.now(), // when the controller was heard last
  note: "", // why what is shown began anew, or nothing more was told, in the controller's words
  error: null, // { status, message, hint }: why the controller refuses to show anything
};
const listeners = new Set();
let drawing = false;
let lines = 0; // how many were told

export function onChange(listener) {
  listeners.add(listener);
  return () => listeners.delete(listener);
}

export function silentS() {
  return (performance.now() - live.heardMs) / 1000;
}

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
  cell: ({ why, samples, ...state }) => Object.assign(live, { state, samples, lines: [], note: why && `Shown anew: ${why}` }),
  change: ({ patch, samples }) => {
    live.state = merged(live.state, patch);
    live.samples = appended(live.samples, samples);
  },
  line: (line) => { live.lines = [...live.lines.slice(1 - LINES_MAX), { ...line, number: ++lines }]; },
  end: ({ why }) => { live.note = `Nothing more was told: ${why}`; },
};

export async function follow() {
  const source = (await early.source) ?? early.listen();
  early.source = null;
  early.take = ({ name, data }) => {
    live.heardMs = performance.now();
    live.error = null;
    TAKES[name](data);
    draw();
  };
  early.told.splice(0).forEach(early.take);
  const closed = async () => {
    if (source.readyState !== EventSource.CLOSED) return; // it tries again by itself
    source.close();
    live.error = await reason();
    draw();
    if (live.error?.status !== 401) setTimeout(follow, RETRY_MS);
  };
  source.onerror = closed;
  closed(); // it may be so by now
}

async function reason() {
  try {
    const answer = await fetch("api/v1/events");
    if (!answer.ok) return { status: answer.status, ...(await answer.json()).error };
    await answer.body.cancel(); // there is room again
    return null;
  } catch {
    return null; // nobody answers: the silence says so
  }
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
