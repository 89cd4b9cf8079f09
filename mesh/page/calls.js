// Calls of the controller, and its streams of events. A failure is { status, message, hint }: thrown,
// or the `error` of what `post` gives.

import { headers } from "./session.js";

// Between the windows of this cell: others may be on the same host.
export function channel(name) {
  return new BroadcastChannel(`mesh ${name} ${new URL(".", location).pathname}`);
}

export async function answered(path, how) {
  let answer;
  try {
    answer = await fetch(path, how);
  } catch (fault) {
    if (fault.name === "AbortError") throw fault;
    throw { message: `the controller did not answer: ${fault.message}` };
  }
  if (!answer.ok) throw { status: answer.status, ...(await answer.json()).error };
  return answer;
}

export const fetched = async (path) => (await answered(path)).json();

export const manifestOf = async (name) => (await answered(`api/v1/manifest?name=${encodeURIComponent(name)}`)).text();

export async function post(path, body) {
  try {
    return await (await answered(path, { method: "POST", headers: headers(), body: JSON.stringify(body) })).json();
  } catch (error) {
    return { error };
  }
}

// Server-sent events: { name, data, id }, until the stream ends. Throws an AbortError after `signal`.
export async function* events(body, signal) {
  const reader = body.pipeThrough(new TextDecoderStream(), { signal }).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    rest += value;
    if (value[0] !== "\n" && !value.includes("\n\n")) continue; // a large event is not searched at each piece of it
    const blocks = rest.split("\n\n");
    rest = blocks.pop();
    for (const block of blocks) {
      const lines = block.split("\n");
      const field = (name) => lines.find((line) => line.startsWith(`${name}: `))?.slice(name.length + 2);
      yield { name: field("event") ?? "message", data: field("data"), id: field("id") };
    }
  }
}
