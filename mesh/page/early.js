// Asks who views and for the cell's state while the modules are on their way. What is told meanwhile
// waits in `told` until live.js takes it.

const early = {
  told: [],
  take(one) { early.told.push(one); },
  session: fetch("api/v1/session").then((answer) => (answer.ok ? answer.json() : null), () => null),
  listen() {
    const source = new EventSource("api/v1/events");
    for (const name of ["cell", "change", "line", "end"]) {
      source.addEventListener(name, ({ data }) => early.take({ name, data: JSON.parse(data) }));
    }
    return source;
  },
};
early.source = early.session.then((session) => (session && (session.role || !session.wants_keys) ? early.listen() : null));
