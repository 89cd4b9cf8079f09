// Manifests: written, loaded from a file or copied from what is deployed; asked about, deployed, saved.

import { html, useEffect, useState } from "./vendor/preact-htm.js";
import { Badge, Fault, Notice, Table, Text } from "./parts.js";
import { manifestOf, post } from "./calls.js";
import { address } from "./route.js";
import { session } from "./session.js";
import { count, fixed, mib, millis, percent, seconds } from "./words.js";

const TEMPLATE = `apiVersion: mesh/v1
kind: Model
metadata: {name: my-model}
spec:
  source: hf://organisation/model
  slo: {ttft_s: 2.0, tpot_s: 0.25}
  scaling: {replicas_min: 0, replicas_max: 4, keep_alive_s: 60}
`;

export function Deploy({ asked }) {
  const from = asked.get("from") ?? "";
  const [text, setText] = useState(TEMPLATE);
  const [file, setFile] = useState("manifest");
  const [saved, setSaved] = useState("deployments.yaml");
  const [said, setSaid] = useState({});
  const [busy, setBusy] = useState("");
  useEffect(() => {
    if (!from) return;
    // The first name is the deployment's; YAML quotes some, such as 405.
    const renamed = (manifest) => manifest.replace(/^  name: .*$/m, `  name: ${JSON.stringify(`${from}-copy`)}`);
    manifestOf(from).then((manifest) => setText(renamed(manifest)), (error) => setSaid({ error }));
  }, [from]);
  const load = async (event) => {
    const [chosen] = event.target.files;
    if (!chosen) return;
    setFile(chosen.name);
    setText(await chosen.text());
  };
  const send = (verb) => async (event) => {
    event.preventDefault();
    setBusy(verb);
    setSaid({});
    setSaid({ verb, ...await post(`api/v1/${verb}`, { manifest: text, file }) });
    setBusy("");
  };
  return html`<h1>Deploy</h1>
    <div class="chosen">
      <label>load a file of manifests <input type="file" accept=".yaml,.yml" onChange=${load} /></label>
      <label>save all deployments as <input value=${saved} maxlength="100" onInput=${(event) => setSaved(event.target.value)} /></label>
      <a class="button" href="api/v1/manifest" download=${saved || "deployments.yaml"}>save</a>
    </div>
    ${session.role !== "tenant" && html`<p class="dim">A saved file does not say whose a deployment is: deployed anew by an operator, it is nobody's.</p>`}
    <form class="prompt" onSubmit=${send("deploy")}>
      <label>Manifests <textarea class="manifest" rows="16" spellcheck=${false} required value=${text} onInput=${(event) => setText(event.target.value)}></textarea></label>
      <div class="actions">
        ${session.role !== "tenant" && html`<button type="button" disabled=${busy} onClick=${send("prospect")}>will it fit, and keep its SLO?</button>`}
        <button class="first" disabled=${busy}>deploy</button>
      </div>
    </form>
    ${busy && html`<${Notice}>${busy === "deploy" ? "deploying: models that no node has are imported …" : "asking …"}<//>`}
    <${Fault} error=${said.error} />
    ${said.deployments?.map(({ name, done, error }) => html`<section aria-label=${`What became of ${name}`}>
      ${error ? html`<${Fault} error=${{ ...error, message: `${name}: ${error.message}` }} />`
        : said.verb === "deploy" ? html`<${Notice}><a href=${address("deployments", name)}><${Text}>${name}<//></a>: <${Text}>${done}<//><//>`
          : html`<${Prospect} name=${name} told=${done} />`}</section>`)}`;
}

function Prospect({ name, told }) {
  const good = told.nodes.filter((node) => node.keeps_slo && node.fit !== "never").length;
  return html`<h2><${Text}>${name}<//></h2>
    <p>${good} of ${told.nodes.length} nodes would keep its SLO, were it called as <${Text}>${told.like}<//> is:${" "}
      ${fixed(60 * told.calls_per_s, 1)} calls a minute, ${count(told.prompt_tokens)} prompt and ${count(told.output_tokens)} output tokens.</p>
    ${told.nodes.length ? html`<${Table} label=${`Prospects of ${name}`} columns=${COLUMNS} rows=${told.nodes} keyOf=${(node) => node.node_id} />`
      : html`<${Notice} bad>No node takes such a deployment.<//>`}`;
}

const verdict = (said) => said.replaceAll("_", " ");

const COLUMNS = [
  { title: "node", cell: (n) => html`<${Text}>${n.node_id}<//>` },
  { title: "memory", cell: (n) => `fits ${n.fit}` },
  { title: "needed / free / all, MiB", number: true, cell: (n) => `${mib(n.needed_bytes)} / ${mib(n.free_bytes)} / ${mib(n.capacity_bytes)}` },
  { title: "keeps its SLO", cell: (n) => html`<${Badge} state=${n.keeps_slo ? "kept" : "missed"} />` },
  { title: "load", number: true, cell: (n) => `${seconds(n.load_s)} from ${n.tier}` },
  { title: "TTFT with the load", number: true, cell: (n) => `${seconds(n.cold_ttft_s)}, ${verdict(n.cold)}` },
  { title: "TTFT once loaded", number: true, cell: (n) => `${seconds(n.warm_ttft_s)}, ${verdict(n.warm)}` },
  { title: "TPOT, at once", number: true, cell: (n) => `${millis(n.tpot_s)}, ${n.batch}` },
  { title: "share of its time", number: true, cell: (n) => percent(n.busy_share) },
  { title: "times", cell: (n) => (n.measured ? "measured" : "estimated") },
];
