// Who is signed in. The key is sent once; the browser keeps a cookie that no script can read, and
// what changes something carries the session's token.

import { html, useState } from "./vendor/preact-htm.js";
import { channel, fetched, post } from "./calls.js";
import { Fault } from "./parts.js";
import { clocks } from "./words.js";

const PATH = "api/v1/session";
// All windows have the cookie of who signed in last: what others show is of somebody else, or their token is old.
const windows = channel("session");
windows.onmessage = ({ data }) => {
  const same = data && data.role === session.role && data.tenant === session.tenant;
  if (same) Object.assign(session, data);
  else location.reload();
};

export const session = { wants_keys: false, role: null, tenant: null, csrf: "", journal: false };

export async function whose() {
  Object.assign(session, await early.session);
  // Somebody may have signed in elsewhere before this window listened.
  if (session.wants_keys && !session.role) Object.assign(session, await fetched(PATH));
  if (session.journal) clocks.options = { timeZone: "UTC" };
}

export const headers = () => ({
  "content-type": "application/json",
  ...(session.csrf && { "x-mesh-csrf": session.csrf }),
});

export async function signOut() {
  await fetch(PATH, { method: "DELETE", headers: headers() });
  windows.postMessage(null);
  location.reload();
}

export function SignIn({ onDone }) {
  const [error, setError] = useState(null);
  const send = async (event) => {
    event.preventDefault();
    const told = await post(PATH, { key: new FormData(event.target).get("key").trim() });
    if (told.error) return setError(told.error);
    windows.postMessage(told);
    Object.assign(session, told);
    onDone();
  };
  return html`<h1>Sign in</h1>
    <p>This cell wants a key: one of <code>mesh key create</code>. It is kept by the controller for this session alone.</p>
    <form class="prompt" onSubmit=${send}>
      <label>Key <input name="key" type="password" autocomplete="off" required maxlength="400" /></label>
      <button class="first">sign in</button>
    </form>
    <${Fault} error=${error} />`;
}
