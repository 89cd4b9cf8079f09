// Asks who views and for the cell's events while the modules are on their way. live.js reads them.

const early = { session: fetch("api/v1/session").then((answer) => (answer.ok ? answer.json() : null), () => null) };
early.events = early.session.then((session) => (
  session && (session.role || !session.wants_keys) && !document.hidden ? fetch("api/v1/events").catch(() => null) : null));
