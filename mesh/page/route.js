// A view is an address: #/deployments/NAME?sort=queued. It can be sent, reloaded and gone back from.

let known = {};

// The same object until the address changes.
export function route() {
  const { hash } = location;
  if (hash === known.hash) return known;
  const [path, query = ""] = hash.replace(/^#\/?/, "").split("?");
  const [view = "", name = ""] = path.split("/").map(decoded);
  return known = { hash, view: view || "cell", name, asked: new URLSearchParams(query) };
}

export function address(view, name = "", asked = {}) {
  const query = new URLSearchParams(Object.entries(asked).filter(([, value]) => value)).toString();
  return `#/${view}${name && `/${encodeURIComponent(name)}`}${query && `?${query}`}`;
}

// The same view, asked otherwise; it replaces the address, so that "back" leaves the view.
export function ask(changes) {
  const { view, name, asked } = route();
  history.replaceState(null, "", address(view, name, { ...Object.fromEntries(asked), ...changes }));
  dispatchEvent(new HashChangeEvent("hashchange"));
}

function decoded(text) {
  try {
    return decodeURIComponent(text);
  } catch {
    return text;
  }
}
