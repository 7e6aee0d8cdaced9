// Loop of tool calls with openai's package for Node, and its Zod helper if Zod is installed: tool_loop.cjs URL MODEL.

const OpenAI = require("openai");

const QUESTION = "How warm is it?";

async function main() {
  const [url, model] = process.argv.slice(2);
  const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: "none", maxRetries: 0 });
  const parameters = { type: "object", properties: { city: { type: "string" } }, required: ["city"] };
  const answers = [];
  for (const stream of [false, true]) {
    const runner = client.chat.completions.runTools({
      model,
      stream,
      messages: [{ role: "user", content: QUESTION }],
      tools: [
        {
          type: "function",
          function: { name: "weather", parameters, parse: JSON.parse, function: ({ city }) => `7 in ${city}` },
        },
      ],
    });
    answers.push(await runner.finalContent());
  }
  const answer = { answers };
  try {
    const { z } = require("zod");
    const { zodResponseFormat } = require("openai/helpers/zod");
    const completion = await client.chat.completions.parse({
      model,
      messages: [{ role: "user", content: "PARSE the weather" }],
      response_format: zodResponseFormat(z.object({ city: z.string() }), "weather"),
    });
    answer.parsed = completion.choices[0].message.parsed.city;
  } catch (error) {
    if (error.code !== "MODULE_NOT_FOUND") throw error;
  }
  console.log(JSON.stringify(answer));
}

main().catch((error) => {
  console.error(error);
  process.exit(1);
});
