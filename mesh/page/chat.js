// One streamed chat: what is asked of /v1/chat/completions, and its events as they come.

import { answered, events } from "./calls.js";
import { headers } from "./session.js";

// Earlier turns that were not answered to their end are left out.
export function bodyOf(model, { system, prompt, options }, turns = []) {
  const messages = [
    ...(system ? [{ role: "system", content: system }] : []),
    ...turns.filter((turn) => turn.finish).flatMap((turn) => [
      { role: "user", content: turn.prompt },
      { role: "assistant", content: turn.text },
    ]),
    { role: "user", content: prompt },
  ];
  return { model, messages, stream: true, stream_options: { include_usage: true }, ...options };
}

// Options as fields of the protocol. Throws an Error that names the field which cannot be read.
export function optionsOf(given) {
  const options = {};
  for (const name of ["temperature", "top_p", "max_tokens", "seed"]) {
    if (given[name] !== "" && given[name] !== undefined) options[name] = Number(given[name]);
  }
  const stops = (given.stop ?? "").split("\n").filter(Boolean);
  if (stops.length) options.stop = stops;
  const schema = parsed("JSON schema", given.schema);
  if (schema) options.response_format = { type: "json_schema", json_schema: { name: "answer", schema } };
  const tools = parsed("tools", given.tools);
  if (tools) options.tools = tools;
  return options;
}

function parsed(what, text) {
  if (!text?.trim()) return null;
  try {
    return JSON.parse(text);
  } catch (fault) {
    throw new Error(`${what}: this is no JSON: ${fault.message}`);
  }
}

// Calls `told` with what is new of { text, calls, usage, finish, firstMs, lastMs, graceMs }. Throws
// { message, hint } for a refusal, and an AbortError when `signal` stops it.
export async function stream(body, signal, told) {
  const began = performance.now();
  const answer = await answered("v1/chat/completions", { method: "POST", signal, headers: headers(), body: JSON.stringify(body) });
  told({ graceMs: Number(answer.headers.get("x-slo-grace-ms") ?? 0) });
  for await (const { name, data } of events(answer.body, signal)) {
    if (name === "error") throw JSON.parse(data).error;
    if (data === "[DONE]") return;
    const chunk = JSON.parse(data);
    const choice = chunk.choices[0];
    const at = performance.now() - began;
    if (chunk.usage) told({ usage: chunk.usage });
    if (!choice) continue;
    const { content, reasoning_content: thought, tool_calls: calls } = choice.delta;
    if (content || thought || calls) told({ text: content ?? "", thought: thought ?? "", calls: calls ?? [], atMs: at });
    if (choice.finish_reason) told({ finish: choice.finish_reason });
  }
}
