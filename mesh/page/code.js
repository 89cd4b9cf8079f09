// The same call as a command or a program.

import { html, useState } from "./vendor/preact-htm.js";
import { bodyOf, optionsOf } from "./chat.js";

const FORMS = {
  curl: ({ base, body }) => `curl ${base}/v1/chat/completions -H 'content-type: application/json' \\\n  -d ${quoted(JSON.stringify(body))}`,
  Python: ({ base, body: { stream, stream_options: _, ...rest } }) =>
    `from openai import OpenAI\n\nclient = OpenAI(base_url="${base}/v1", api_key="none")\nfor chunk in client.chat.completions.create(\n    stream=${stream ? "True" : "False"},\n    **json.loads(r'''${JSON.stringify(rest)}'''),\n):\n    print(chunk.choices[0].delta.content or "", end="")`.replace("from openai", "import json\n\nfrom openai"),
  "mesh invoke": ({ name, given }) => `mesh invoke ${name} ${quoted(given.prompt || "PROMPT")}`,
};

export function AsCode({ name, given }) {
  const [form, setForm] = useState("curl");
  let text;
  try {
    const body = bodyOf(name, { ...given, prompt: given.prompt || "PROMPT", options: optionsOf(given) }, []);
    text = FORMS[form]({ base: location.origin, body, name, given });
  } catch (fault) {
    text = fault.message;
  }
  return html`<details><summary>As code</summary>
    <p role="group" aria-label="Form">${Object.keys(FORMS).map((one) => html`
      <button aria-pressed=${one === form} onClick=${() => setForm(one)}>${one}</button>`)}
      <button onClick=${() => navigator.clipboard?.writeText(text)}>copy</button></p>
    <pre class="code" tabindex="0">${text}</pre></details>`;
}

const quoted = (text) => `'${text.replaceAll("'", `'\\''`)}'`;
