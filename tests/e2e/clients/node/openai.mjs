// The official npm client over a running stack. Prints, as JSON, what it found; the test beside it judges.
import OpenAI from "openai";

const [baseURL, apiKey, base, adapter, calling] = process.argv.slice(2);
const client = new OpenAI({ baseURL, apiKey, maxRetries: 0 });
const messages = [
  { role: "system", content: "w3 🙂" },
  { role: "user", content: "w1 日本?" },
];
const weather = {
  type: "function",
  function: {
    name: "weather",
    parameters: {
      type: "object",
      properties: { day: { enum: ["→", "日本", "🙂"] } },
      required: ["day"],
      additionalProperties: false,
    },
  },
};

const told = (completion) =>
  completion.choices.map((choice) => ({
    index: choice.index,
    finish: choice.finish_reason,
    content: choice.message.content ?? "",
    calls: (choice.message.tool_calls ?? []).map((call) => [call.function.name, call.function.arguments]),
    logprobs: choice.logprobs?.content ?? [],
  }));

async function bothWays(request) {
  const whole = await client.chat.completions.create(request);
  const stream = client.chat.completions.stream({ ...request, stream_options: { include_usage: true } });
  const streamed = await stream.finalChatCompletion();
  return { whole: told(whole), streamed: told(streamed), usages: [whole.usage, streamed.usage] };
}

async function failure(call) {
  try {
    await call();
    return null;
  } catch (error) {
    return { name: error.constructor.name, status: error.status, code: error.code, param: error.param };
  }
}

const found = { models: [], plain: [] };
for await (const model of client.models.list()) found.models.push(model.id);
for (const model of [base, adapter]) {
  found.plain.push(
    await bothWays({ model, messages, n: 2, seed: 5, max_tokens: 16, logprobs: true, top_logprobs: 2 }),
  );
}
found.calls = await bothWays({
  model: calling,
  messages,
  tools: [weather],
  tool_choice: "required",
  parallel_tool_calls: false,
  seed: 5,
  max_tokens: 120,
});
const texts = await client.completions.create({ model: base, prompt: "w1", max_tokens: 8, seed: 1 });
let text = "";
for await (const chunk of await client.completions.create({
  model: base,
  prompt: "w1",
  max_tokens: 8,
  seed: 1,
  stream: true,
})) {
  text += chunk.choices[0]?.text ?? "";
}
found.texts = [texts.choices[0].text, text];
found.missing = await failure(() => client.chat.completions.create({ model: "nobody-s", messages }));
found.wrong = await failure(() => client.chat.completions.create({ model: base, messages, top_p: 2 }));
const stranger = new OpenAI({ baseURL, apiKey: "sk-none", maxRetries: 0 });
found.unknown = await failure(() => stranger.models.list());
// A reader that leaves ends the request.
const left = await client.chat.completions.create({ model: base, messages, max_tokens: 2000, stream: true });
for await (const _ of left) break;
console.log(JSON.stringify(found));
