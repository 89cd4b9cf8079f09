// The same call as a command or a program. Where keys are needed, it takes one from MESH_KEY.

import { html, useState } from "./vendor/preact-htm.js";
import { bodyOf, optionsOf } from "./chat.js";
import { Copy } from "./parts.js";
import { session } from "./session.js";

const FORMS = {
  curl: ({ base, body }) => `curl ${base}/v1/chat/completions -H 'content-type: application/json' \\\n  ${session.wants_keys ? '-H "authorization: Bearer $MESH_KEY" ' : ""}-d ${quoted(JSON.stringify(body))}`,
  Python: ({ base, body: { stream: _, stream_options: __, ...rest } }) => `import json${session.wants_keys ? "\nimport os" : ""}

from openai import OpenAI

client = OpenAI(base_url="${base}/v1", api_key=${session.wants_keys ? 'os.environ["MESH_KEY"]' : '"none"'})
for chunk in client.chat.completions.create(
    stream=True,
    **json.loads(r'''${JSON.stringify(rest).replaceAll("'", "\\u0027")}'''),
):
    print(chunk.choices[0].delta.content or "", end="")`,
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
      <${Copy} text=${() => text} /></p>
    <pre class="code" tabindex="0">${text}</pre></details>`;
}

const quoted = (text) => `'${text.replaceAll("'", `'\\''`)}'`;
