// Pages in jsdom, which enforces CORS as browsers do: what each origin's page could read, as JSON.
import { JSDOM, VirtualConsole } from "jsdom";

const [base, ...origins] = process.argv.slice(2);
const asked = { model: "chat", messages: [{ role: "user", content: "hi" }], max_tokens: 3 };

function send(window, how, path, headers, body) {
  return new Promise((resolve) => {
    const request = new window.XMLHttpRequest();
    request.open(how, base + path);
    for (const [name, value] of Object.entries(headers)) request.setRequestHeader(name, value);
    request.onload = () => {
      resolve([request.status, request.getResponseHeader("x-request-id"), request.responseText]);
    };
    request.onerror = () => resolve("blocked");
    request.send(body && JSON.stringify(body));
  });
}

const found = {};
for (const origin of origins) {
  const page = new JSDOM("", { url: origin, virtualConsole: new VirtualConsole() });
  const headers = { Authorization: "Bearer none", "Content-Type": "application/json" };
  const chat = (body) => send(page.window, "POST", "/chat/completions", headers, body);
  found[origin] = {
    models: await send(page.window, "GET", "/models", headers),
    whole: await chat(asked),
    streamed: await chat({ ...asked, stream: true }),
    wrong: await chat({ ...asked, n: 1000 }),
  };
  page.window.close();
}
console.log(JSON.stringify(found));
