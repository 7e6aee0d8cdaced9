// What edge_cases.py does, with openai for Node as it comes from npm. Arguments: URL of a router's HTTP APIs, model.
const OpenAI = require("openai");

async function main() {
  const [url, model] = process.argv.slice(2);
  const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: "none", maxRetries: 0 });
  const ask = (prompt, more) =>
    client.chat.completions.create({ model, messages: [{ role: "user", content: prompt }], max_tokens: 99, ...more });
  const read = async (prompt, more) => {
    const pieces = [];
    let reason = null;
    let error = null;
    try {
      for await (const chunk of await ask(prompt, { stream: true, ...more })) {
        pieces.push(chunk.choices[0].delta.content ?? "");
        reason = chunk.choices[0].finish_reason ?? reason;
      }
    } catch (caught) {
      error = [caught.constructor.name, caught.status ?? null];
    }
    return { text: pieces.join(""), pieces: pieces.filter((piece) => piece).length, reason, error };
  };

  const whole = await ask("Hello");
  const three = await ask("Hello", { n: 3 });
  const stopped = await ask("Hello", { stop: "STOP" });
  const streamed = await read("Hello");
  const streamStopped = await read("Hello", { stop: ["STOP"] });
  const broken = await read("FAIL");
  console.log(
    JSON.stringify({
      whole: whole.choices[0].message.content,
      choices: three.choices.sort((a, b) => a.index - b.index).map((choice) => choice.message.content),
      stopped: [stopped.choices[0].message.content, stopped.choices[0].finish_reason],
      streamed: streamed.text,
      pieces: streamed.pieces,
      stream_stopped: [streamStopped.text, streamStopped.reason],
      refused: (await read("Hello", { temperature: -1 })).error,
      broken: [broken.text, broken.error?.[0] ?? null],
    }),
  );
}

main();
