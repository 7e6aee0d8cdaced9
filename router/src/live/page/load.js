// A load for a minute, sent from this page: a few streams at once, a bounded number of calls, stopped by a button.

const LOAD_MS = 60000;
// Browsers open six connections to a router; updates, the playground and a request's life need the others.
const LOAD_CALLS = 3;
const LOAD_PROMPTS = 2;
const LOAD_CALLS_MAX = 600;
const LOAD_FAILURES_MAX = 5;
const LOAD_RETRY_MS = 1000;
const LOAD_TEXTS = [
  "The lighthouse keeper wrote in his log that the night was calm and the sea without a sail. ",
  "To bake bread, one needs flour, water, salt, and above all time. ",
  "A scheduler decides before every step which sequences run and which have to wait. ",
];
const load = { controller: null, endsAt: 0, calls: 0, ended: 0, tokens: 0, failed: 0, inRow: 0, reason: "", doneAt: 0 };

function loadBody(call) {
  const text = LOAD_TEXTS[call % LOAD_TEXTS.length];
  return {
    model: byId("model").value || undefined,
    prompt: Array.from({ length: LOAD_PROMPTS }, (_, at) => `${call}.${at} ${text.repeat(1 + Math.floor(Math.random() ** 2 * 12))}`),
    max_tokens: 32 + Math.floor(Math.random() * 160), temperature: 0.8, stream: true, stream_options: { include_usage: true },
  };
}

function takeLoadChunk(_name, data) {
  if (data === "[DONE]") return;
  const chunk = JSON.parse(data);
  if (chunk.error) throw new Error(chunk.error.message ?? "the stream failed");
  load.tokens += chunk.usage?.completion_tokens ?? 0;
}

async function oneCall(signal) {
  const call = ++load.calls;
  try {
    const headers = { "Content-Type": "application/json", ...playgroundKey() };
    const answer = await fetch("/v1/completions", { method: "POST", headers, body: JSON.stringify(loadBody(call)), signal });
    if (!answer.ok) throw new Error(await reasonOf(answer));
    await readEvents(answer.body, takeLoadChunk);
    load.ended += 1;
    load.inRow = 0;
  } catch (error) {
    if (signal.aborted) return;
    load.failed += 1;
    load.inRow += 1;
    load.reason = printable(error.message);
    await new Promise((resolve) => setTimeout(resolve, LOAD_RETRY_MS));
  }
}

async function sendCalls(signal) {
  while (!signal.aborted && load.calls < LOAD_CALLS_MAX && load.inRow < LOAD_FAILURES_MAX) await oneCall(signal);
}

async function startLoad() {
  if (load.controller) return;
  const controller = new AbortController();
  Object.assign(load, { controller, endsAt: performance.now() + LOAD_MS, calls: 0, ended: 0, tokens: 0, failed: 0, inRow: 0, reason: "" });
  const timer = setTimeout(() => controller.abort(), LOAD_MS);
  writeStart();
  byId("load-stop").focus();
  announce("Sending a load for a minute");
  await Promise.all(Array.from({ length: LOAD_CALLS }, () => sendCalls(controller.signal)));
  clearTimeout(timer);
  controller.abort();
  Object.assign(load, { controller: null, doneAt: performance.now() });
  announce(`The load has ended: ${loadFigures()}`);
  const focused = document.activeElement === byId("load-stop");
  writeStart();
  if (focused) byId("load-close").focus();
}

function stopLoad() {
  load.controller?.abort();
}

function loadFigures() {
  const parts = [plural(load.ended, "call"), plural(load.tokens, "token")];
  if (load.failed) parts.push(`${count(load.failed)} failed: ${load.reason}`);
  return parts.join(" · ");
}
