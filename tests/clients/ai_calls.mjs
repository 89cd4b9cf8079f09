// Vercel's AI SDK by its provider for servers like OpenAI's: what came of its calls, as JSON.
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { APICallError, generateText, streamText } from "ai";

const mesh = createOpenAICompatible({ name: "mesh", baseURL: process.argv[2], includeUsage: true });
const asked = { model: mesh("chat"), prompt: "hi", maxOutputTokens: 3, maxRetries: 0 };
const found = {};

const whole = await generateText(asked);
found.whole = [whole.text, whole.finishReason, whole.usage.outputTokens];

const stream = streamText(asked);
found.streamed = "";
for await (const piece of stream.textStream) found.streamed += piece;
found.ended = [await stream.finishReason, (await stream.usage).outputTokens];

try {
  await generateText({ ...asked, model: mesh("chta") });
} catch (error) {
  found.missing = [APICallError.isInstance(error), error.statusCode, error.message, error.isRetryable];
}
console.log(JSON.stringify(found));
