// Keys, for operators of a cell that wants them: listed, made (shown once) and revoked.

import { html, useEffect, useState } from "./vendor/preact-htm.js";
import { Copy, Fault, Notice, Table, Text, Twice } from "./parts.js";
import { fetched, post } from "./calls.js";

const PATH = "api/v1/keys";

export function Keys() {
  const [keys, setKeys] = useState(null);
  const [made, setMade] = useState(null);
  const [error, setError] = useState(null);
  const look = () => fetched(PATH).then(setKeys, setError);
  useEffect(() => { look(); }, []);
  const create = async (event) => {
    event.preventDefault();
    const given = new FormData(event.target);
    const days = given.get("days");
    const told = await post(PATH, { role: given.get("role"), tenant: given.get("tenant").trim(), days: days ? Number(days) : null });
    setError(told.error ?? null);
    setMade(told.error ? null : told);
    look();
  };
  const revoke = async (id) => {
    setError((await post(`${PATH}/${encodeURIComponent(id)}/revoke`, {})).error ?? null);
    look();
  };
  return html`<h1>Keys</h1>
    <form class="chosen" onSubmit=${create}>
      <label>role <select name="role">${["tenant", "admin", "node"].map((role) => html`<option value=${role}>${role}</option>`)}</select></label>
      <label>tenant <input name="tenant" maxlength="63" autocomplete="off" /></label>
      <label>days until it expires <input name="days" type="number" min="1" max="36500" placeholder="never" /></label>
      <button class="first">make a key</button>
    </form>
    <${Fault} error=${error} />
    ${made && html`<${Notice}>The key <code>${made.key}</code> is shown this once: keep it now.
      <${Copy} text=${() => made.key} /> <button onClick=${() => setMade(null)}>done</button><//>`}
    ${keys && html`<${Table} label="Keys" columns=${columns(revoke)} rows=${keys} keyOf=${(key) => key.key_id} />`}`;
}

const day = (unixS) => (unixS ? new Date(1000 * unixS).toISOString().slice(0, 10) : "–");

const columns = (revoke) => [
  { title: "key", cell: (key) => html`<code>${key.key_id}</code>` },
  { title: "role", cell: (key) => key.role },
  { title: "tenant", cell: (key) => html`<${Text}>${key.tenant || "–"}<//>` },
  { title: "made (UTC)", cell: (key) => day(key.created_unix_s) },
  { title: "expires (UTC)", cell: (key) => day(key.expires_unix_s) },
  { title: "revoked (UTC)", cell: (key) => day(key.revoked_unix_s) },
  { title: "revoke", cell: (key) => (key.revoked_unix_s ? "revoked"
    : html`<${Twice} verb="revoke" label=${`revoke ${key.key_id}`} onSure=${() => revoke(key.key_id)}>Revoke it<//>`) },
];
