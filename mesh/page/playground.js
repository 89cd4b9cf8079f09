// A place to try a deployment, or two side by side on one prompt. The conversation stays in this tab.

import { html, useEffect, useLayoutEffect, useRef, useState } from "./vendor/preact-htm.js";
import { bodyOf, optionsOf, stream } from "./chat.js";
import { AsCode } from "./code.js";
import { Choice, Fault, Loading, Notice, NothingDeployed, Share, Text } from "./parts.js";
import { ask } from "./route.js";
import { count, limit, millis, seconds, tpotLimit } from "./words.js";

const KEPT = "mesh.playground";
const END_PX = 40;
const FRESH = { system: "", prompt: "", temperature: "", top_p: "", max_tokens: "256", seed: "", stop: "", schema: "", tools: "" };

export function Playground({ state, asked }) {
  const names = Object.keys(state.deployments).sort();
  const chosen = [asked.get("a") ?? names[0] ?? "", asked.get("b") ?? ""];
  const shown = [...new Set(chosen)].filter(Boolean);
  const [given, setGiven] = useState(() => ({ ...FRESH, ...kept().given }));
  const [turns, setTurns] = useState(() => kept().turns ?? {});
  const [running, setRunning] = useState(null); // an AbortController while an answer comes
  const [fault, setFault] = useState(null);
  const latest = useRef(turns);
  latest.current = turns;
  useEffect(() => keep({ given, turns }), [given, turns]);
  useEffect(() => {
    const leave = () => running?.abort();
    addEventListener("beforeunload", leave); // or else it ends as by a broken network
    return () => { removeEventListener("beforeunload", leave); leave(); };
  }, [running]);

  // What streams is followed by who is at the end of it.
  const { scrollHeight } = document.documentElement;
  const follows = running && innerHeight + scrollY > scrollHeight - END_PX;
  useLayoutEffect(() => { if (follows) scrollTo(0, document.documentElement.scrollHeight); }, [turns]);

  const set = (name) => (event) => setGiven({ ...given, [name]: event.target.value });
  const update = (name, change) => setTurns((all) => {
    const mine = all[name] ?? [];
    return { ...all, [name]: [...mine.slice(0, -1), change(mine.at(-1))] };
  });

  const send = async (event) => {
    event.preventDefault();
    if (running) return;
    let options;
    try {
      options = optionsOf(given);
    } catch (error) {
      return setFault({ message: error.message });
    }
    setFault(null);
    const abort = new AbortController();
    setRunning(abort);
    const answered = await Promise.all(shown.map(async (name) => {
      const earlier = latest.current[name];
      const turn = { prompt: given.prompt, text: "", thought: "", calls: [], waiting: true };
      setTurns((all) => ({ ...all, [name]: [...(all[name] ?? []), turn] }));
      try {
        await stream(bodyOf(name, { ...given, options }, earlier), abort.signal, (told) => update(name, (one) => added(one, told)));
        update(name, (one) => ({ ...one, waiting: false }));
        return true;
      } catch (error) {
        const stopped = error.name === "AbortError";
        update(name, (one) => ({ ...one, waiting: false, stopped, error: stopped ? null : { message: String(error.message ?? error), hint: error.hint } }));
        return stopped;
      }
    }));
    setRunning(null);
    if (answered.some(Boolean)) setGiven((all) => ({ ...all, prompt: "" })); // a refused one can be sent again
  };

  if (!names.length) return html`<h1>Playground</h1><${NothingDeployed} />`;
  return html`
    <h1>Playground</h1>
    <div class="chosen">
      <${Choice} label="Deployment" all=${names} value=${chosen[0]} onChange=${(a) => ask({ a })} />
      <${Choice} label="Beside it" all=${["", ...names.filter((name) => name !== chosen[0])]} value=${chosen[1]} shown=${(name) => name || "none"} onChange=${(b) => ask({ b })} />
      <button onClick=${() => setTurns({})} disabled=${running}>new conversation</button>
    </div>
    <details><summary>System prompt, sampling, schema, tools</summary><div class="options">
      <label class="wide">system prompt <textarea rows="2" value=${given.system} onInput=${set("system")}></textarea></label>
      <label>temperature <input type="number" min="0" max="2" step="any" value=${given.temperature} onInput=${set("temperature")} /></label>
      <label>top p <input type="number" min="0" max="1" step="any" value=${given.top_p} onInput=${set("top_p")} /></label>
      <label>at most so many tokens <input type="number" min="1" value=${given.max_tokens} onInput=${set("max_tokens")} /></label>
      <label>seed <input type="number" value=${given.seed} onInput=${set("seed")} /></label>
      <label class="wide">stop strings, one a line <textarea rows="2" value=${given.stop} onInput=${set("stop")}></textarea></label>
      <label class="wide">JSON schema of the answer <textarea rows="3" value=${given.schema} onInput=${set("schema")}></textarea></label>
      <label class="wide">tools, as JSON <textarea rows="3" value=${given.tools} onInput=${set("tools")}></textarea></label>
    </div></details>
    <${AsCode} names=${shown} given=${given} turns=${turns} />
    <div class="answers">${shown.map((name) => html`
      <${Answers} key=${name} name=${name} state=${state} turns=${turns[name] ?? []} />`)}</div>
    <form class="prompt bottom" onSubmit=${send}>
      <${Fault} error=${fault} />
      <label>Prompt <textarea rows="3" required value=${given.prompt} onInput=${set("prompt")}
        onKeyDown=${(event) => { if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) event.target.form.requestSubmit(); }}></textarea></label>
      <div><button class="first" aria-disabled=${Boolean(running)}>send <span class="dim">Ctrl+Enter</span></button>
        <button type="button" class="bad" aria-disabled=${!running} onClick=${() => running?.abort()}>stop</button></div>
    </form>`;
}

function Answers({ name, state, turns }) {
  const deployment = state.deployments[name];
  if (!deployment) return html`<section><h2><${Text}>${name}<//></h2><${Notice}>There is no deployment of this name.<//></section>`;
  return html`<section aria-label=${`Answers of ${name}`}>
    <h2><${Text}>${name}<//></h2>
    ${turns.map((turn) => html`
      <p class="said user" dir="auto">${turn.prompt}</p>
      ${turn.thought && html`<p class="said thought" dir="auto">${turn.thought}</p>`}
      <p class="said" dir="auto" aria-live="polite">${turn.text}</p>
      ${turn.calls.map((call) => html`<pre class="code" tabindex="0">${call.name}(${call.arguments})</pre>`)}
      ${turn.waiting && turn.firstMs === undefined && html`<${Waiting} name=${name} deployment=${deployment} state=${state} />`}
      <${Measured} turn=${turn} slo=${deployment.spec.slo} />
      <${Fault} error=${turn.error} />`)}
  </section>`;
}

function Waiting({ name, deployment: { phase, share, queued }, state }) {
  const loading = Object.values(state.instances).find((i) => i.deployment === name && i.state === "loading");
  return html`<p class="dim" role="status">waits${queued > 0 && `, one of ${count(queued)} queued`}${loading ? html`: <${Loading} instance=${loading} />` : phase ? html`: ${phase} <${Share} share=${share} label=${phase} />` : " for its first token"}</p>`;
}

function Measured({ turn, slo }) {
  if (turn.firstMs === undefined) return turn.stopped ? html`<p class="dim">stopped before the first token</p>` : null;
  const more = (turn.usage?.completion_tokens ?? turn.pieces) - 1;
  const tpot = more > 0 ? (turn.lastMs - turn.firstMs) / 1000 / more : null;
  const due = turn.usage ? limit(Math.max(slo.ttft_s, turn.usage.prompt_tokens / slo.ttft_tokens_per_s)) : `${limit(slo.ttft_s)} or more`;
  return html`<p class="dim">TTFT ${seconds(turn.firstMs / 1000)} (SLO ${due}${turn.graceMs ? `, and ${turn.graceMs} ms of grace for a load` : ""}),
    TPOT ${millis(tpot)} (SLO ${tpotLimit({ slo })})${turn.usage ? `; ${turn.usage.prompt_tokens} + ${turn.usage.completion_tokens} tokens` : ""}; ${turn.stopped ? "stopped" : turn.finish ? `ended by ${turn.finish}` : turn.waiting ? "answering" : "not finished"}</p>`;
}

function added(turn, told) {
  const { text = "", thought = "", calls = [], atMs, ...rest } = told;
  if (atMs === undefined) return { ...turn, ...rest };
  return {
    ...turn,
    text: turn.text + text,
    thought: turn.thought + thought,
    calls: calls.reduce(joined, turn.calls),
    firstMs: turn.firstMs ?? atMs,
    lastMs: atMs,
    pieces: (turn.pieces ?? 0) + 1,
  };
}

function joined(calls, { index, function: part }) {
  const known = calls[index] ?? { name: "", arguments: "" };
  const whole = { name: known.name + (part?.name ?? ""), arguments: known.arguments + (part?.arguments ?? "") };
  return [...calls.slice(0, index), whole, ...calls.slice(index + 1)];
}

// An answer that came when the page was left is stopped: leaving it ends the call.
function kept() {
  try {
    const { given, turns = {} } = JSON.parse(sessionStorage.getItem(KEPT));
    const left = (turn) => (turn.waiting ? { ...turn, waiting: false, stopped: true } : turn);
    return { given, turns: Object.fromEntries(Object.entries(turns).map(([name, mine]) => [name, mine.map(left)])) };
  } catch {
    return {};
  }
}

function keep(value) {
  try {
    sessionStorage.setItem(KEPT, JSON.stringify(value));
  } catch {
    // A conversation beyond the browser's limit is not kept over a reload.
  }
}
