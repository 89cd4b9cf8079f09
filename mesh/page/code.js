// The same calls as commands or a program. Where keys are needed, they take one from MESH_KEY.

import { html, useState } from "./vendor/preact-htm.js";
import { bodyOf, optionsOf } from "./chat.js";
import { Copy } from "./parts.js";
import { session } from "./session.js";

const FORMS = {
  curl: (bodies) => bodies.map((body) => `curl -N ${location.origin}/v1/chat/completions -H 'content-type: application/json' \\
  ${session.wants_keys ? '-H "authorization: Bearer $MESH_KEY" ' : ""}-d ${quoted(JSON.stringify(body))}`).join("\n"),
  Python: (bodies) => `import json${session.wants_keys ? "\nimport os" : ""}

from openai import OpenAI

client = OpenAI(base_url="${location.origin}/v1", api_key=${session.wants_keys ? 'os.environ["MESH_KEY"]' : '"none"'})
for asked in (
${bodies.map(({ stream_options: _, ...body }) => `    r'''${JSON.stringify(body).replaceAll("'", "\\u0027")}''',\n`).join("")}):
    for chunk in client.chat.completions.create(**json.loads(asked)):
        print(chunk.choices[0].delta.content or "", end="")
    print()`,
  "mesh invoke": (bodies) => bodies.map(invoked).join("\n"),
};

const FLAGS = { temperature: "temperature", top_p: "top-p", max_tokens: "max-tokens", seed: "seed" };

// It sends a prompt alone, and takes the likeliest token where no temperature is given.
function invoked({ model, messages, tools, stop = [], response_format: form, ...options }) {
  const flags = Object.entries({ temperature: 1, ...options }).filter(([name]) => name in FLAGS).map(([name, value]) => `--${FLAGS[name]} ${value}`);
  for (const one of stop) flags.push(`--stop=${quoted(one)}`);
  if (form) flags.push(`--json-schema <(printf %s ${quoted(JSON.stringify(form.json_schema.schema))})`);
  const less = messages.length > 1 || tools ? "# mesh invoke sends a prompt alone: without the system prompt, earlier turns and tools\n" : "";
  return `${less}mesh invoke ${flags.join(" ")} -- ${model} ${quoted(messages.at(-1).content)}`;
}

export function AsCode({ names, given, turns }) {
  const [form, setForm] = useState("curl");
  let text;
  try {
    const asked = { ...given, prompt: given.prompt || "PROMPT", options: optionsOf(given) };
    text = FORMS[form](names.map((name) => bodyOf(name, asked, turns[name])));
  } catch (fault) {
    text = fault.message;
  }
  return html`<details><summary>As code</summary>
    <p role="group" aria-label="Form">${Object.keys(FORMS).map((one) => html`
      <button aria-pressed=${one === form} onClick=${() => setForm(one)}>${one}</button>`)}
      <${Copy} text=${() => text} /></p>
    <pre class="code" tabindex="0">${text}</pre></details>`;
}

const quoted = (text) => `'${text.replaceAll("'", `'\\''`)}'`;
