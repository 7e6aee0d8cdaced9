// Uses the chat as its users do, in a headless browser, and fails where it does not do what it should.
//   node chat.cjs URL              of a router's HTTP port, under `inflight up` with two workers
//   node chat.cjs synthetic        with a made-up cluster, and answers made for the test
// NODE_PATH names the folder with puppeteer-core (and axe-core), INFLIGHT_TEST_BROWSER the browser. Prints JSON: what was checked.
const fs = require("node:fs");
const { launch, open, setScheme, until, text, ensure } = require("./browser.cjs");
const { axe, nothingIsClipped, picture } = require("./accessibility.cjs");
const { SyntheticRouter } = require("./synthetic_router.cjs");

const ENDED = (number) => document.querySelectorAll('.turn[data-role="assistant"]:not([data-state="streaming"])').length === number && document.querySelector("#stop").hidden;
const last = (selector) => `[...document.querySelectorAll('.turn[data-role="assistant"]')].at(-1).querySelector("${selector}")`;
// Phases that took no time are not shown; each answer of several tokens decodes.
const HAS_DECODED = `${last(".phases [data-kind=decode]")} !== null`;
const LIVE = () => document.querySelector("#connection-text").textContent === "Live";

// Answers made for the test take the place of the router's, one after the other; `addToBody` is added to what is sent.
const CRAFTED = () => {
  const real = window.fetch;
  window.crafted = [];
  window.sent = [];
  window.addToBody = {};
  window.fetch = (url, options = {}) => {
    if (url !== "/v1/chat/completions") return real(url, options);
    const body = { ...JSON.parse(options.body), ...window.addToBody };
    window.sent.push(body);
    const next = window.crafted.shift();
    if (!next) return real(url, { ...options, body: JSON.stringify(body) });
    if (next.unreachable) return Promise.reject(new TypeError("Failed to fetch"));
    if (next.status) return Promise.resolve(new Response(JSON.stringify(next.body), { status: next.status }));
    const encoder = new TextEncoder();
    const source = new ReadableStream({
      start(controller) {
        for (const delta of next.deltas) {
          const chunk = typeof delta === "string" ? { choices: [{ index: 0, delta: { content: delta } }] } : delta.error ? delta : { choices: [{ index: 0, delta }] };
          controller.enqueue(encoder.encode(`data: ${JSON.stringify(chunk)}\n\n`));
        }
        if (next.hold) options.signal.addEventListener("abort", () => controller.error(new DOMException("aborted", "AbortError")));
        else {
          if (!next.cut) controller.enqueue(encoder.encode(`data: ${JSON.stringify({ choices: [], usage: { prompt_tokens: 7, completion_tokens: next.deltas.length } })}\n\ndata: [DONE]\n\n`));
          controller.close();
        }
      },
    });
    return Promise.resolve(new Response(source, { status: 200 }));
  };
};

async function openChat(browser, url, options) {
  const page = await open(browser, "about:blank", options);
  await page.evaluateOnNewDocument(CRAFTED);
  await page.goto(`${url}/chat`, { waitUntil: "domcontentloaded" });
  await until(page, "the model is known", () => document.querySelector("#model").value !== "");
  return page;
}

async function say(page, message) {
  await page.focus("#prompt");
  await page.keyboard.type(message);
  await page.keyboard.press("Enter");
}

// Sends a message that is answered by what the test has made.
async function answered(page, crafted, message = "Go on") {
  const number = (await page.$$('.turn[data-role="assistant"]')).length + 1;
  await page.evaluate((one) => window.crafted.push(one), crafted);
  await say(page, message);
  await until(page, "it is answered", ENDED, number);
}

async function anAnswerStreamsWithItsFigures(page) {
  await until(page, "it watches", LIVE);
  await say(page, "What is continuous batching?");
  await until(page, "the answer streams", `document.querySelector('.turn[data-state="streaming"]')?.querySelector(".body").textContent.length > 20`);
  ensure((await page.$eval(".turn[data-state=streaming]", (node) => node.ariaBusy)) === "true", "it is not busy");
  await until(page, "the lane of its worker is shown", `/^worker-\\d · slot \\d+ · (prefill|decode) · \\d+ of \\d+ slots? in use/.test(${last(".where")}.textContent) && ${last("canvas.strip")}.clientHeight > 30`);
  await until(page, "cells of its request are drawn", `((canvas) => { const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height); const colours = new Set(); for (let at = 0; at < data.length; at += 4) if (data[at + 3] === 255) colours.add(data.slice(at, at + 3).join()); return colours.size > 1; })(${last("canvas.strip")})`);
  await picture(page, "chat-streaming");
  await until(page, "it is answered", ENDED, 1);
  const figures = await text(page, ".figures");
  for (const word of [/first token \d/, /\d+ prompt tokens?, \d+ tokens?/, /tokens\/s/]) ensure(word.test(figures), `figures are ${figures}`);
  await until(page, "its life is shown", `${last(".trace-life")}.open && ${HAS_DECODED} && / at the router: .*decode/.test(${last("summary")}.parentElement.parentElement.querySelector(".trace-life summary").textContent)`);
  ensure(!(await page.$eval(".trace-lane", (node) => node.checkVisibility())), "the lane stays after the end");
  const link = await page.$eval(".turn-buttons a", (node) => ({ path: new URL(node.href).pathname + new URL(node.href).hash, rel: node.rel }));
  ensure(/^\/ui#request=\d+$/.test(link.path) && link.rel === "noopener", `the link is ${JSON.stringify(link)}`);
  await until(page, "screen readers hear the answer", () => document.querySelector("#announce").textContent.startsWith("Answer: "));
  return link.path;
}

async function aReloadKeepsIt(page) {
  await page.evaluate(() => { document.querySelector("#settings-open").click(); });
  await page.type("#system", "Be brief.");
  const content = () => page.$$eval(".turn", (nodes) => nodes.map((node) => [node.querySelector(".body").textContent, node.querySelector(".figures")?.textContent, node.querySelector(".phases")?.children.length]));
  const before = JSON.stringify(await content());
  await page.reload({ waitUntil: "domcontentloaded" });
  await until(page, "the conversation is back", () => document.querySelectorAll(".turn").length === 2);
  ensure(JSON.stringify(await content()) === before, `it was ${before}, is ${JSON.stringify(await content())}`);
  await until(page, "the model is known", () => document.querySelector("#model").value !== "");
  await answered(page, { deltas: ["Yes."] }, "Again");
  const [{ messages, stream, stream_options: options, model }] = await page.evaluate(() => window.sent);
  ensure(messages.map(({ role }) => role).join() === "system,user,assistant,user" && messages[0].content === "Be brief.", `messages are ${JSON.stringify(messages)}`);
  ensure(stream === true && options.include_usage === true && model, "the request is not for a stream with usage");
}

const MARKDOWN = `# Title

A *slanted*, **strong** and \`coded\` <script>window.hacked = 1</script> line with [a link](https://example.org/a_b),
[another](javascript:window.hacked=2), ![picture](http://example.org/x.png), snake_case_name and https://example.org/path.

### Deep

1. one
2. two
   - inner **bold**
   - more

> quoted

\`\`\`js
const html = "<img src=x onerror=alert(1)>";
\`\`\`
`;

async function markdownIsNodesAndHostileTextStaysText(page) {
  await answered(page, { deltas: [...MARKDOWN] });
  const found = await page.evaluate(`((body) => ({
    names: [...body.querySelectorAll("*")].map((node) => node.localName),
    links: [...body.querySelectorAll("a")].map((node) => [node.getAttribute("href"), node.rel, node.target]),
    text: body.textContent, hacked: window.hacked, headings: [...body.querySelectorAll("h3, h4")].map((node) => node.textContent),
    outer: body.querySelectorAll(":scope > ol > li").length, inner: body.querySelectorAll("ol > li > ul > li").length,
  }))(${last(".body")})`);
  for (const name of ["em", "strong", "code", "a", "h3", "h4", "ol", "ul", "blockquote", "pre"]) ensure(found.names.includes(name), `no ${name}: ${found.names}`);
  for (const name of ["script", "img", "iframe", "h5"]) ensure(!found.names.includes(name), `there is a ${name}`);
  const wanted = ["https://example.org/a_b", "http://example.org/x.png", "https://example.org/path"];
  ensure(JSON.stringify(found.links) === JSON.stringify(wanted.map((address) => [address, "noopener noreferrer", "_blank"])), `links are ${JSON.stringify(found.links)}`);
  for (const part of ["<script>window.hacked = 1</script>", "[another](javascript:window.hacked=2)", "snake_case_name", "<img src=x onerror=alert(1)>"]) ensure(found.text.includes(part), `${part} is not in ${found.text}`);
  ensure(found.hacked === undefined && found.outer === 2 && found.inner === 2, `lists: ${found.outer}, ${found.inner}`);
  // However a text is cut on its way, what is shown is the same.
  const shape = await page.evaluate(`${last(".body")}.cloneNode(true).outerHTML`);
  await answered(page, { deltas: [MARKDOWN] });
  ensure((await page.evaluate(`${last(".body")}.cloneNode(true).outerHTML`)) === shape, "the parts of a stream change what it shows");
  await page.evaluate(() => { navigator.clipboard.writeText = async (copied) => { window.copied = copied; }; });
  await page.evaluate(`${last(".code button")}.click()`);
  await until(page, "the code is copied", () => window.copied === 'const html = "<img src=x onerror=alert(1)>";');
  await page.evaluate(`[...document.querySelectorAll('.turn-buttons button')].filter((node) => node.textContent === "Copy").at(-1).click()`);
  await until(page, "the answer is copied as it was written", (wanted) => window.copied === wanted, MARKDOWN);
}

async function anyTextIsShownInBoundedTime(page) {
  const seed = Date.now() % 1e6;
  const took = await page.evaluate(async (start) => {
    let state = start;
    const random = (below) => (state = (state * 48271 + 11) % 2147483647) % below;
    const pieces = ["*", "**", "_", "`", "```", "\n", "\n\n", "[", "](", ")", "https://a.b", "# ", "- ", "  - ", "1. ", "> ", "<b>", "\\", " ", "a", "word "];
    const texts = Array.from({ length: 60 }, () => Array.from({ length: random(400) }, () => pieces[random(pieces.length)]).join(""));
    for (const piece of pieces) texts.push(piece.repeat(15000 / piece.length | 0), `x ${piece}a `.repeat(3000));
    const begun = performance.now();
    for (const text of texts) {
      window.crafted.push({ deltas: [text] });
      document.querySelector("#prompt").value = "x";
      document.querySelector("#new").click();
      document.querySelector("#prompt").value = "x";
      document.querySelector("#composer").requestSubmit();
      while (!document.querySelector("#stop").hidden) await new Promise((resolve) => setTimeout(resolve, 0));
      const body = document.querySelector('.turn[data-role="assistant"] .body');
      for (const node of body.querySelectorAll("*")) {
        if (!["p", "h3", "h4", "h5", "h6", "ul", "ol", "li", "blockquote", "pre", "code", "em", "strong", "a", "hr", "div", "span", "button"].includes(node.localName)) throw new Error(`${node.localName} of ${JSON.stringify(text)}`);
      }
    }
    return performance.now() - begun;
  }, seed).catch((error) => { throw new Error(`seed ${seed}: ${error.message}`); });
  ensure(took < 40000, `seed ${seed}: it took ${took} ms`);
  await page.click("#new");
}

async function reasoningIsFoldedAndCallsAreShown(page) {
  await answered(page, { deltas: [
    { reasoning_content: "First ", reasoning: "First " }, { reasoning_content: "think.", reasoning: "think." }, "Done.",
    { tool_calls: [{ index: 0, id: "a", type: "function", function: { name: "weather", arguments: "" } }] },
    { tool_calls: [{ index: 0, function: { arguments: '{"city": "<b>Oslo' } }] }, { tool_calls: [{ index: 0, function: { arguments: '</b>"}' } }] },
    { tool_calls: [{ index: 1, id: "b", type: "function", function: { name: "time", arguments: "{}" } }] },
  ] });
  const found = await page.evaluate(`({ reasoning: ${last(".reasoning-text")}.textContent, open: ${last(".reasoning")}.open, hidden: ${last(".reasoning")}.hidden, calls: [...${last(".calls")}.children].map((node) => node.innerText), body: ${last(".body")}.textContent })`);
  ensure(found.reasoning === "First think." && !found.open && !found.hidden && found.body === "Done.", JSON.stringify(found));
  ensure(found.calls.length === 2 && /weather[^]*"city": "<b>Oslo<\/b>"/.test(found.calls[0]) && found.calls[1].includes("time"), `calls are ${found.calls}`);
}

async function errorsAreSaidAndRetried(page) {
  const refusals = [
    [{ status: 503, body: { error: { message: "no worker serves the model" } } }, "no worker serves the model"],
    [{ unreachable: true }, "The router does not answer: Failed to fetch"],
    [{ deltas: ["Half an", { error: { message: "the worker failed" } }] }, "the worker failed"],
    [{ deltas: ["Half an"], cut: true }, "The stream ended before the answer was complete."],
  ];
  for (const [refusal, wanted] of refusals) {
    await answered(page, refusal, "Hello");
    ensure((await page.evaluate(`${last(".error p")}.textContent`)) === wanted && (await page.evaluate(`${last(".error")}.checkVisibility()`)), `the error is ${await page.evaluate(`${last(".error p")}.textContent`)}`);
    const number = (await page.$$(".turn")).length;
    await page.evaluate(() => window.crafted.push({ deltas: ["Better."] }));
    await page.evaluate(`${last(".error button")}.click()`);
    await until(page, "the retry is answered", `${last(".body")}.textContent === "Better." && document.querySelector("#stop").hidden`);
    ensure((await page.$$(".turn")).length === number, "the failed answer is still there");
  }
  const sent = await page.evaluate(() => window.sent.at(-1).messages.map(({ role, content }) => `${role}: ${content}`));
  ensure(sent.filter((line) => line === "user: Hello").length === refusals.length && !sent.join().includes("Half"), `messages are ${sent}`);
}

async function stopRegenerateAndEdit(page) {
  await page.evaluate(() => { document.querySelector("#new").click(); window.crafted.push({ deltas: ["It begins"], hold: true }); });
  await say(page, "Count");
  await until(page, "it has begun", `${last(".body")}.textContent === "It begins"`);
  await page.keyboard.press("Escape");
  await until(page, "Escape stops it", ENDED, 1);
  ensure((await text(page, ".figures")).startsWith("Stopped") && (await page.evaluate(() => document.activeElement.id)) === "prompt", "it does not say that it stopped");
  const turnButton = (name) => page.evaluate(`[...document.querySelectorAll('.turn button')].filter((node) => node.textContent === "${name}" && node.checkVisibility()).at(-1).click()`);
  await page.evaluate(() => window.crafted.push({ deltas: ["Another"] }));
  await turnButton("Regenerate");
  await until(page, "it is answered anew", `${last(".body")}.textContent === "Another" && document.querySelector("#stop").hidden`);
  ensure((await page.evaluate(() => JSON.stringify(window.sent.at(-1).messages.filter(({ role }) => role !== "system")))) === '[{"role":"user","content":"Count"}]', "the old answer is sent");
  await turnButton("Edit");
  ensure((await page.$eval("#prompt", (node) => node.value)) === "Count", "the last message is not in the field");
  await page.keyboard.down("Shift");
  await page.keyboard.press("Enter");
  await page.keyboard.up("Shift");
  await page.evaluate(() => window.crafted.push({ deltas: ["To ten"] }));
  await say(page, "to ten");
  await until(page, "the edited message is answered", `${last(".body")}.textContent === "To ten" && document.querySelector("#stop").hidden`);
  ensure((await page.$$(".turn")).length === 2 && (await text(page, '.turn[data-role="user"] .body')) === "Count\nto ten", "the message was not replaced");
  await page.click("#new");
  ensure((await page.$$(".turn")).length === 0 && (await page.$eval("#empty", (node) => node.checkVisibility())), "the chat is not new");
}

async function withoutStreamsAnswersComeWhole(browser, url) {
  const page = await open(browser, "about:blank");
  await page.evaluateOnNewDocument(CRAFTED);
  await page.evaluateOnNewDocument(() => { delete Response.prototype.body; });
  await page.goto(`${url}/chat`, { waitUntil: "domcontentloaded" });
  const message = { role: "assistant", content: "Whole.", reasoning: "Hm." };
  await answered(page, { status: 200, body: { choices: [{ message, finish_reason: "length" }], usage: { prompt_tokens: 3, completion_tokens: 2 } } });
  const [{ stream }] = await page.evaluate(() => window.sent);
  const figures = await text(page, ".figures");
  ensure(stream === false && (await page.evaluate(`${last(".body")}.textContent`)) === "Whole." && /^Cut at the limit of tokens · answered in .* · 2 tokens$/.test(figures), `${stream} ${figures}`);
  await page.close();
}

async function keysAndModels(browser, router) {
  router.key = "secret";
  router.models = ["demo", "other"];
  const page = await open(browser, `${router.url}/chat`);
  await until(page, "it asks for a key", () => document.querySelector("#key").open);
  await page.type("#key-input", "secret");
  await page.keyboard.press("Enter");
  await until(page, "the models are known", () => document.querySelectorAll("#model option").length === 2);
  await page.click("#settings-open");
  ensure(await page.$eval("#model", (node) => node.checkVisibility()), "there is no choice of a model");
  await page.select("#model", "other");
  await page.type("#temperature", "0.5");
  await page.type("#max-tokens", "9");
  await say(page, "Hello");
  await until(page, "the error of the router is shown", `${last(".error p")}.textContent === "the model other does not exist"`);
  const { body, authorization } = router.calls.at(-1);
  ensure(authorization === "Bearer secret" && body.temperature === 0.5 && body.max_tokens === 9, `sent ${JSON.stringify(body)} with ${authorization}`);
  ensure(!(await page.evaluate(() => JSON.stringify({ ...localStorage, ...sessionStorage }))).includes("secret"), "the key is kept");
  router.key = undefined;
  router.models = ["demo"];
  ensure(page.faults.length === 0, page.faults.join("\n"));
  await page.close();
}

async function everythingIsReachedByTab(page) {
  await answered(page, { deltas: [MARKDOWN] });
  await page.evaluate(() => { document.activeElement.blur(); window.scrollTo(0, 0); });
  const stops = [];
  for (let i = 0, ends = 0; i < 60 && ends < 2; i++) {
    await page.keyboard.press("Tab");
    const stop = await page.evaluate(() => {
      const node = document.activeElement;
      const marked = [node, node.closest(".composer-row")].filter(Boolean).some((one) => { const { outlineStyle, outlineWidth } = getComputedStyle(one); return outlineStyle !== "none" && parseFloat(outlineWidth) > 0; });
      return node === document.body ? null : { name: node.id || node.textContent.trim().slice(0, 30), marked };
    });
    if (stop) stops.push(stop);
    else ends += 1;
  }
  const names = stops.map(({ name }) => name);
  for (const name of ["settings-open", "new", "prompt", "send", "Live view", "Edit", "Copy", "Regenerate"]) ensure(names.includes(name), `Tab does not reach ${name}: ${names}`);
  ensure(stops.every(({ marked }) => marked), `no visible focus at ${stops.filter(({ marked }) => !marked).map(({ name }) => name)}`);
}

// The stream of a killed worker goes on elsewhere, to its end, and says so.
async function aKilledWorkersStreamGoesOn(page, tokens, synthetic) {
  await page.evaluate((most) => {
    document.querySelector("#new").click();
    window.addToBody = { ignore_eos: true, max_tokens: most };
  }, tokens);
  await until(page, "it watches", LIVE);
  await say(page, "Once upon a time");
  await until(page, "its worker is known", `/^worker-\\d · slot .* decode/.test(document.querySelector(".where")?.textContent) && ${last(".body")}.textContent.length > 30`);
  const from = /^worker-\d/.exec(await text(page, ".where"))[0];
  await page.focus(".turn .more");
  await page.keyboard.press("Enter");
  await until(page, "the kill is offered", (worker) => document.activeElement.textContent === `Kill its worker, ${worker}…`, from);
  await page.keyboard.press("Enter");
  await until(page, "it asks before it kills", (worker) => document.querySelector("#kill").open && document.querySelector("#kill-title").textContent === `Kill ${worker}?`, from);
  if (synthetic) await axe(page, "a stream and the question before its worker is killed");
  await page.click("#kill-yes");
  await until(page, "the move is told", () => /^worker-\d ended; the stream went on with worker-\d after \d/.test(document.querySelector(".moves li")?.textContent));
  const told = await text(page, ".moves li");
  const to = /with (worker-\d)/.exec(told)[1];
  ensure(told.startsWith(`${from} ended`) && to !== from, `${from}: ${told}`);
  await picture(page, "chat-moved");
  await until(page, "the answer is complete", ENDED, 1);
  ensure((await page.$eval(".turn[data-role=assistant]", (node) => node.dataset.state)) === "done", "the answer has not ended well");
  ensure((await text(page, ".figures")).includes(`, ${tokens} tokens`), `figures are ${await text(page, ".figures")}`);
  await until(page, "its life has a gap", () => document.querySelector('.phases [data-kind="gap"]') !== null);
  ensure((await text(page, ".moves li")).startsWith(`${from} ended; the stream went on with ${to} after`), "the move is forgotten");
  await page.evaluate(() => { window.addToBody = {}; });
  return { from, to, told };
}

// A link of the chat opens the life of its request.
async function theLiveViewOpensTheRequest(browser, url, link) {
  const page = await open(browser, `${url}${link}`);
  const number = /\d+$/.exec(link)[0];
  await until(page, "its life is shown", (wanted) => document.querySelector("#life-title").textContent === `Request ${wanted}` && document.querySelectorAll(".phases li").length > 1, number);
  await page.keyboard.press("Escape");
  await until(page, "it is closed", () => document.querySelector("#life").hidden && location.hash === "");
  ensure(page.faults.length === 0, page.faults.join("\n"));
  await page.close();
}

const LONG = `${MARKDOWN}\nA${"very".repeat(60)}long word, and \`${"code".repeat(40)}\`.\n`;

// Whether the charts in sight of all lanes are drawn in a scheme.
const DRAWN = (scheme) => [...document.querySelectorAll(".lane-view canvas")].every((canvas) => {
  const [red, , , alpha] = canvas.getContext("2d").getImageData(1, canvas.height - 2, 1, 1).data;
  return canvas.getBoundingClientRect().top > innerHeight || !alpha || red < 128 === (scheme === "dark");
});

// Rules of accessibility and of layout, wide and on a phone, in both schemes.
async function viewsAreTidy(browser, router) {
  const sizes = { wide: { width: 1440, height: 1000 }, phone: { width: 390, height: 844 } };
  for (const [size, view] of Object.entries(sizes)) {
    const page = await openChat(browser, router.url, view);
    const live = await open(browser, `${router.url}/ui`, view);
    await until(live, "it is live", LIVE);
    const check = async (one, name, clipped) => {
      for (const scheme of ["light", "dark"]) {
        await setScheme(one, scheme);
        await until(one, `its lanes are ${scheme}`, DRAWN, scheme);
        await picture(one, `${name}-${size}-${scheme}`);
        await axe(one, `${name}, ${size}, ${scheme}`);
        if (clipped) await nothingIsClipped(one, `${name}, ${size}, ${scheme}`);
      }
      await setScheme(one, "light");
    };
    await check(page, "chat-empty", true);
    await check(live, "live-idle", false);
    await answered(page, { deltas: [
      { reasoning_content: "Think." }, LONG, { tool_calls: [{ index: 0, function: { name: "weather", arguments: '{"city":"Oslo"}' } }] },
    ] }, "A question that is long enough for more than one line on a phone, with a wordthatiswiderthananyphonewordthatiswiderthananyphone.");
    await page.evaluate(() => { document.querySelector(".reasoning").open = true; });
    await answered(page, { status: 429, body: { error: { message: "too many requests; try again in 3 s" } } });
    await say(page, "Tell a story");
    await until(page, "its life is shown", `document.querySelector("#stop").hidden && ${HAS_DECODED}`);
    ensure(await page.$eval(".error button", (node) => node.hidden), "an answer that is not the last one can be retried");
    await check(page, "chat-answers", true);
    await page.click("#settings-open");
    await page.evaluate(() => window.scrollTo(0, 0));
    await check(page, "chat-settings", true);
    router.cluster.idle = false;
    await until(live, "requests run", () => document.querySelectorAll("#grid-body .grid-row:not([hidden])").length > 2);
    await check(live, "live-loaded", false);
    router.cluster.idle = true;
    for (const one of [page, live]) {
      ensure(one.faults.length === 0, one.faults.join("\n"));
      await one.close();
    }
  }
}

async function main() {
  const target = process.argv[2];
  const router = target === "synthetic" ? await new SyntheticRouter({ workers: 2, slots: 16, arrivals: 6 }).start() : null;
  if (router) router.cluster.idle = true;
  const url = router?.url ?? target;
  const browser = await launch();
  const checked = {};
  try {
    const page = await openChat(browser, url);
    if (!router) await page.evaluate(() => { window.addToBody = { ignore_eos: true, max_tokens: 60 }; });
    let link = "";
    const steps = {
      anAnswerStreamsWithItsFigures: async () => { link = await anAnswerStreamsWithItsFigures(page); },
      theLiveViewOpensTheRequest: () => theLiveViewOpensTheRequest(browser, url, link),
      aReloadKeepsIt: () => aReloadKeepsIt(page),
      aKilledWorkersStreamGoesOn: async () => { checked.jump = await aKilledWorkersStreamGoesOn(page, router ? 200 : 400, router !== null); },
      ...(router && {
        markdownIsNodesAndHostileTextStaysText: () => markdownIsNodesAndHostileTextStaysText(page),
        anyTextIsShownInBoundedTime: () => anyTextIsShownInBoundedTime(page),
        reasoningIsFoldedAndCallsAreShown: () => reasoningIsFoldedAndCallsAreShown(page),
        errorsAreSaidAndRetried: () => errorsAreSaidAndRetried(page),
        stopRegenerateAndEdit: () => stopRegenerateAndEdit(page),
        everythingIsReachedByTab: () => everythingIsReachedByTab(page),
        withoutStreamsAnswersComeWhole: () => withoutStreamsAnswersComeWhole(browser, url),
        keysAndModels: () => keysAndModels(browser, router),
        viewsAreTidy: () => viewsAreTidy(browser, router),
      }),
    };
    const only = process.argv.slice(3);
    for (const [name, step] of Object.entries(steps)) {
      if (only.length && !only.includes(name)) continue;
      const started = Date.now();
      await step().catch((error) => { throw new Error(`${name}: ${error.message}`); });
      checked[name] = Date.now() - started;
      console.error(`${name}: ${checked[name]} ms`);
      ensure(page.faults.length === 0, `${name}: ${page.faults.join("\n")}`);
    }
  } finally {
    await browser.close();
    await router?.close();
  }
  console.log(JSON.stringify(checked));
}

main().catch((error) => {
  // On standard output, which the test that runs this shows with its failure.
  fs.writeSync(1, `${error.message}\n`);
  process.exit(1);
});
