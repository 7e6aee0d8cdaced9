// Calls chat completions, completions and responses with openai for Node, as it comes from npm.
// Arguments: URL of a router's HTTP APIs, model, prompt, seed. NODE_PATH names the folder with the package.
const OpenAI = require("openai");

async function main() {
  const [url, model, prompt, seed] = process.argv.slice(2);
  const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: "none", maxRetries: 0 });
  const ask = { model, prompt, max_tokens: 24, temperature: 0.8, seed: Number(seed), ignore_eos: true };
  const whole = await client.completions.create(ask);
  let streamed = "";
  for await (const chunk of await client.completions.create({ ...ask, stream: true })) {
    streamed += chunk.choices[0].text;
  }

  const messages = [{ role: "user", content: `${prompt} 🙂` }];
  const talk = { model, messages, max_completion_tokens: 24, temperature: 0 };
  const chat = await client.chat.completions.create(talk);
  let usage = null;
  let chatStreamed = "";
  const options = { stream: true, stream_options: { include_usage: true } };
  for await (const chunk of await client.chat.completions.create({ ...talk, ...options })) {
    chatStreamed += chunk.choices[0]?.delta.content ?? "";
    usage = chunk.usage ?? usage;
  }

  const response = await client.responses.create({ model, input: prompt, max_output_tokens: 24, temperature: 0 });
  let refused = null;
  try {
    await client.chat.completions.create({ ...talk, model: "no-such-model" });
  } catch (error) {
    refused = [error.constructor.name, error.status, error.param, error.code];
  }
  console.log(
    JSON.stringify({
      text: whole.choices[0].text,
      streamed,
      chat: chat.choices[0].message.content,
      chat_streamed: chatStreamed,
      chat_tokens: [chat.usage.completion_tokens, usage.completion_tokens],
      response: response.output_text,
      refused,
    }),
  );
}

main();
