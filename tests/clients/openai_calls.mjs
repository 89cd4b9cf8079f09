// OpenAI's own client for JavaScript: what came of its calls, as JSON.
import OpenAI from "openai";

const client = new OpenAI({ baseURL: process.argv[2], apiKey: "none", maxRetries: 0 });
const asked = { model: "chat", messages: [{ role: "user", content: "hi" }], max_tokens: 3 };
const found = { models: (await client.models.list()).data.map((model) => model.id) };

const whole = await client.chat.completions.create(asked);
found.whole = [whole.choices[0].message.content, whole.usage.completion_tokens, whole._request_id];

found.streamed = "";
for await (const chunk of await client.chat.completions.create({ ...asked, stream: true })) {
  found.streamed += chunk.choices[0]?.delta?.content ?? "";
}
found.helper = await client.chat.completions.stream(asked).finalContent();

const completion = await client.completions.create({ model: "chat", prompt: "x", max_tokens: 2 });
found.completion = completion.choices[0].text;

found.errors = [];
for (const wrong of [{ model: "chta" }, { n: 1000 }]) {
  try {
    await client.chat.completions.create({ ...asked, ...wrong });
  } catch (error) {
    found.errors.push([error.constructor.name, error.status, error.code, error.param]);
  }
}
console.log(JSON.stringify(found));
