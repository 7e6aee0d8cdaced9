// What the page shows under `inflight up` as it comes: workers of 256 slots, first at rest, then with twelve streams; and the page on
// a phone. With a made-up cluster.
const fs = require("node:fs");
const path = require("node:path");
const { open, until, text, ensure } = require("./browser.cjs");
const { SyntheticRouter } = require("./synthetic_router.cjs");

const part = (name) => fs.readFileSync(path.join(__dirname, "../../../../router/src/live/page", name), "utf8");
const LIVE = () => document.querySelector("#connection-text").textContent === "Live";
const STREAMS = 12;

// The page's own colours: its script keeps them to itself.
const FREE = new Function("matchMedia", `${part("palette.js")}\nreturn [...channels(INKS.light.empty), 255].join();`)(() => ({}));

// Colours of the rows of the first lane in its newest column; "" where the row is free.
const NEWEST = `(${(free) => {
  const canvas = document.querySelector(".lane-view canvas");
  const rows = Number(document.querySelector(".axis span:last-child").textContent) + 1;
  const context = canvas.getContext("2d");
  const high = document.querySelector(".axis").clientHeight / rows;
  const colours = Array.from({ length: rows }, (_, row) => [...context.getImageData(canvas.width - 3, Math.floor((row + 0.4) * high), 1, 1).data].join());
  return colours.map((colour) => (colour === free ? "" : colour));
}})("${FREE}")`;

// Labels of axes that are cut, reach into the canvas or out of the lane.
const CUT_LABELS = () => [...document.querySelectorAll(".axis span")].filter((label) => label.textContent && label.offsetWidth).filter((label) => {
  const range = document.createRange();
  range.selectNodeContents(label);
  const [text, axis] = [range.getBoundingClientRect(), label.parentElement.getBoundingClientRect()];
  const lane = label.closest(".lane").getBoundingClientRect();
  const canvas = label.closest(".lane").querySelector(".lane-view").getBoundingClientRect();
  return text.width > axis.width + 0.5 || text.left < lane.left || text.right > canvas.left || text.bottom > axis.bottom + 3 || text.top < axis.top - 3;
}).map((label) => label.textContent);

async function restIsExplained(page, router) {
  await until(page, "it says what to do", () => document.querySelector("#start").offsetHeight > 100);
  const shown = await page.$eval("#start", (node) => node.innerText);
  for (const word of ["lane", "iteration", "slot", "Send a prompt", "Load for a minute", `curl -N ${new URL(page.url()).origin}/v1/completions`]) {
    ensure(shown.includes(word), `the page at rest does not say ${word}: ${shown}`);
  }
  ensure((await page.title()) === "Inflight", `the title is ${await page.title()}`);
  const labels = await page.$$eval(".axis span", (nodes) => nodes.map((node) => node.textContent).join(" "));
  ensure(!/\d (µs|ms|s)\b/.test(labels), `axes at rest have times: ${labels}`);
  await page.click("#start-prompt");
  ensure((await page.evaluate(() => document.activeElement.id)) === "prompt", "the button does not lead to the prompt");

  await page.$eval("#tenant-key", (node) => { node.value = "tenant-key"; });
  await page.click("#start-load");
  await until(page, "the load has some tokens", () => /[1-9]\d* calls? · [1-9]/.test(document.querySelector("#load-text").textContent));
  const open = router.cluster.next - 1 - router.cluster.ends;
  ensure(open >= 1 && open <= 3, `${open} calls at once`);
  ensure(router.calls.every(({ authorization }) => authorization === "Bearer tenant-key"), "the load does not use the key");
  ensure(router.calls.every(({ body }) => body.max_tokens < 200 && body.prompt.length <= 2), "calls of the load are large");
  await page.click("#load-stop");
  await until(page, "the load has ended", () => document.querySelector("#load-text").textContent.startsWith("The load has ended"));
  const calls = router.calls.length;
  await page.click("#load-close");
  await until(page, "what to do is gone", () => document.querySelector("#start").offsetHeight === 0);
  ensure(router.calls.length === calls, "the load goes on");
}

async function slotsInUseHaveRows(page, router) {
  router.cluster.outputTokens = 1e6;
  const requests = Array.from({ length: STREAMS }, () => router.cluster.arrive({ promptTokens: 20, outputTokens: 1e6 }));
  await until(page, "twelve rows are shown, and the rest is folded", () => document.querySelector(".fold").textContent === "244 free");
  await until(page, "the title counts them", (title) => document.title === title, `${STREAMS} in flight – Inflight`);
  await until(page, "twelve rows have a colour", `${NEWEST}.filter(Boolean).length === 12`);
  const before = await page.evaluate(NEWEST);
  const height = await page.$eval(".lane-view canvas", (node) => node.offsetHeight);
  ensure(before.length === STREAMS && height >= STREAMS * 14, `${before.length} rows, ${height} pixels`);
  // A slot keeps its row, whatever becomes of the others.
  for (const at of [1, 6]) router.cluster.cancel(requests[at].number);
  await until(page, "two rows are free", `${NEWEST}.filter(Boolean).length === 10`);
  const after = await page.evaluate(NEWEST);
  ensure(after.every((colour, row) => colour === (row === 1 || row === 6 ? "" : before[row])), `rows were ${before}, are ${after}`);
  await page.focus(".fold");
  await page.keyboard.press("Enter");
  await until(page, "all slots are shown", () => document.querySelector(".fold").ariaExpanded === "true" && document.querySelector(".lane-view canvas").offsetHeight > 256);
  await page.keyboard.press("Enter");
  await until(page, "they are folded again", (wanted) => document.querySelector(".lane-view canvas").offsetHeight === wanted, height);
}

async function labelsAreWhole(page) {
  const fonts = ["", "*{font-family:monospace!important}", "*{font-family:serif!important;letter-spacing:3px!important}", ".axes{font-size:19px!important}"];
  for (const font of fonts) {
    const style = await page.addStyleTag({ content: font || "/**/" });
    await page.evaluate(() => dispatchEvent(new Event("resize")));
    await until(page, `no label is cut in ${font}`, `(${CUT_LABELS})().length === 0`);
    await style.evaluate((node) => node.remove());
  }
  ensure(/\d+ ms/.test(await page.$$eval(".axis span", (nodes) => nodes.map((node) => node.textContent).join(" "))), "the axis has no time");
}

async function menuByKeyboard(page) {
  const focused = () => page.evaluate(() => document.activeElement.textContent);
  await page.$eval(".lane .more", (node) => node.focus());
  await page.keyboard.press("Enter");
  ensure((await focused()) === "Show its requests", `Enter leads to ${await focused()}`);
  await page.keyboard.press("ArrowDown");
  ensure((await focused()) === "Show all 256 slots", `the next is ${await focused()}`);
  await page.keyboard.press("ArrowUp");
  await page.keyboard.press("ArrowUp");
  ensure((await focused()) === "Kill process 1…", `the last is ${await focused()}`);
  await page.keyboard.press("Escape");
  ensure(await page.evaluate(() => document.activeElement.matches(".more") && !document.querySelector(".menu")), "Escape does not close the menu");
  await page.keyboard.press("ArrowUp");
  await page.keyboard.press("Enter");
  await until(page, "it asks before it kills", () => document.querySelector("#kill").open && document.querySelector("#kill-title").textContent === "Kill worker-0?");
  await page.keyboard.press("Escape");
  await until(page, "it closes, and the focus is back", () => !document.querySelector("#kill").open && document.activeElement.matches(".more"));
  await page.keyboard.press("ArrowDown");
  await page.keyboard.press("Enter");
  await until(page, "its requests are shown", () => document.activeElement.id === "grid" && document.querySelector("#filter").value === "worker-0");
}

const EVENTS = [
  [0, "arrived"], [0, "queued"], [40, "dispatched"], [100, "admitted", 7], [160, "chunk", 7], [200, "chunk", 8], [201, "first_token"], [900, "preempted", 30],
  [1500, "resumed", 61], [1600, "chunk", 61], [1650, "chunk", 62], [3000, "lost"], [3000, "queued"], [3200, "dispatched"], [3250, "admitted", 4], [3400, "chunk", 4],
  [3402, "resumed"], [4000, "paused"], [4500, "continued"], [4510, "dispatched"], [4520, "admitted", 90], [4540, "chunk", 90], [4541, "resumed"], [5012, "ended"],
].map(([atMs, kind, iteration]) => ({ atMs, kind, iteration }));
const PHASES = [
  ["queue", 40], ["wait", 60], ["prefill", 101], ["decode", 699], ["gap", 600], ["prefill", 150], ["decode", 1350], ["gap", 250], ["prefill", 150], ["decode", 600],
  ["gap", 520], ["prefill", 20], ["decode", 472],
];

function phasesAddUp() {
  const { phasesOf, threeDigits } = new Function(`${part("format.js")}\n${part("phases.js")}\nreturn { phasesOf, threeDigits };`)();
  const found = phasesOf(EVENTS, 5012).map(({ kind, from, to }) => [kind, to - from]);
  ensure(JSON.stringify(found) === JSON.stringify(PHASES), `phases are ${JSON.stringify(found)}`);
  const seed = Date.now() % 1e6;
  let state = seed;
  const random = (below) => (state = (state * 48271 + 11) % 2147483647) % below;
  for (let round = 0; round < 500; round++) {
    // Any events at any times: each millisecond is in one phase.
    const events = Array.from({ length: random(40) }, () => ({ ...EVENTS[random(EVENTS.length)], atMs: random(1000) }));
    const phases = phasesOf(events, 900, 1 + random(2));
    const whole = phases.reduce((end, { from, to }) => (from === end && to > from ? to : NaN), 0);
    ensure(whole === 900, `seed ${seed}, round ${round}: ${JSON.stringify(phases)}`);
    ensure(phases.every(({ kind, detail }, at) => !at || kind !== phases[at - 1].kind || detail !== phases[at - 1].detail), "neighbours are alike");
  }
  for (const [ms, wanted] of [[0, "0 ms"], [0.4196, "420 µs"], [0.9996, "1 ms"], [7, "7 ms"], [7.3125, "7.31 ms"], [99.96, "100 ms"], [174, "174 ms"], [999, "999 ms"], [5012, "5.01 s"], [9999, "10.0 s"], [73249, "73.2 s"], [99960, "100 s"], [3600000, "60 min 00 s"]]) {
    ensure(threeDigits(ms) === wanted, `${ms} is ${threeDigits(ms)}`);
  }
}

// Slots come into use and out of it at random: none changes its row meanwhile, no two share one, and rows are not wasted.
function rowsHold() {
  const { createRows, assignRows } = new Function(`${part("rows.js")}\nreturn { createRows, assignRows };`)();
  const seed = Date.now() % 1e6;
  let state = seed;
  const random = (below) => (state = (state * 48271 + 11) % 2147483647) % below;
  for (let round = 0; round < 40; round++) {
    const slotRows = 1 + random(300);
    const rows = createRows();
    const used = new Map();
    let most = rows.shown;
    for (let step = 0; step < 60; step++) {
      for (let change = random(6); change > 0; change--) {
        const slot = random(slotRows);
        if (!used.delete(slot)) used.set(slot, undefined);
      }
      // Of the slots in use some are not in this iteration; a sequence without a slot comes after them.
      const slots = [...used.keys()].filter(() => random(4)).concat(slotRows + 1);
      const column = { slots: Uint16Array.from(slots), rows: new Uint16Array(slots.length), rowsUsed: 0 };
      assignRows(rows, column, slotRows, used);
      most = Math.max(most, used.size);
      slots.slice(0, -1).forEach((slot, at) => {
        ensure(used.get(slot) === undefined || used.get(slot) === column.rows[at], `seed ${seed}, round ${round}: slot ${slot} changes its row`);
        used.set(slot, column.rows[at]);
      });
      const taken = [...used.values()].filter((row) => row !== undefined);
      ensure(new Set(taken).size === taken.length && taken.every((row) => row < most), `seed ${seed}, round ${round}: rows ${taken} of ${most}`);
      ensure(column.rowsUsed === Math.max(0, ...[...column.rows].slice(0, -1).map((row) => row + 1)), `seed ${seed}: ${column.rowsUsed} rows are used`);
    }
  }
}

// However long the page is open, its curves have a bounded number of points over an hour at most, and the right mean.
function historyIsBounded() {
  const { createHistory, sampleHistory } = new Function(`${part("history.js")}\nreturn { createHistory, sampleHistory };`)();
  const history = createHistory(["steps", "none"]);
  for (let sample = 0; sample < 4 * 3 * 3600; sample++) {
    const now = 1000 + sample * 250;
    sampleHistory(history, { steps: now / 1000 }, now);
    const points = history.points.get("steps");
    const span = points.length * history.step;
    ensure(points.length <= 240 && span <= 3600000, `${points.length} points of ${history.step} ms`);
    if (sample < 100 || sample % 4096) continue;
    ensure(span >= Math.min(now - 1000, 3600000) * 0.9, `after ${now} ms, the points are of ${span} ms`);
    const middle = (now - span / 2) / 1000;
    const mean = points.reduce((sum, point) => sum + point, 0) / points.length;
    ensure(Math.abs(mean - middle) < (2 * history.step) / 1000, `the mean is ${mean}, not ${middle}`);
  }
  ensure(history.points.get("none").every((point) => point === 0), "a field without values has some");
}

async function lifeIsATimeline(page, router) {
  const request = router.cluster.arrive({ requestId: "told", outputTokens: 1e6 });
  router.cluster.cancel(request.number);
  Object.assign(request, { events: EVENTS, endedAt: request.arrivedAt + 5012, choices: 1 });
  await page.select("#filter-state", "all");
  await page.$eval("#filter", (node) => { node.value = "told"; node.dispatchEvent(new Event("input")); });
  await until(page, "the request is in the table", () => document.querySelectorAll("#grid-body .grid-row:not([hidden])").length === 1);
  await page.click("#grid-body .grid-row:not([hidden])");
  await until(page, "its phases are shown", (number) => document.querySelectorAll(".phases li").length === number, PHASES.length);
  const bars = await page.$$eval(".phases li", (rows) => rows.map((row) => {
    const [track, bar] = [row.querySelector(".track"), row.querySelector("i")].map((node) => node.getBoundingClientRect());
    return { kind: row.dataset.kind, text: row.lastChild.textContent, from: (bar.left - track.left) / track.width, to: (bar.right - track.left) / track.width };
  }));
  ensure(bars.every(({ kind }, at) => kind === PHASES[at][0]), `the order is ${bars.map(({ kind }) => kind)}`);
  let end = 0;
  for (const [at, bar] of bars.entries()) {
    ensure(Math.abs(bar.from - end) < 0.01, `bar ${at} begins at ${bar.from}, not at ${end}`);
    end += PHASES[at][1] / 5012;
  }
  ensure(bars[6].text === "1.35 s" && bars[3].text === "699 ms" && (await text(page, ".phases-sum")).includes("5.01 s"), `times are ${bars.map(({ text }) => text)}`);
  const times = await page.$$eval(".timeline time", (nodes) => nodes.map((node) => node.textContent));
  ensure(times.length === EVENTS.length && times.at(-1) === "5.01 s" && times[6] === "201 ms", `events are at ${times}`);
  await page.keyboard.press("Escape");
}

// A life of less than a millisecond has bars; its trace is a link where the router knows a viewer of traces, else text that a click selects.
async function fastLivesAndTraces(page, router) {
  const events = [[0, "arrived"], [100, "dispatched"], [200, "admitted"], [500, "first_token"], [800, "ended"]].map(([atUs, kind]) => (atUs ? { atUs, kind } : { kind }));
  const id = "4bf92f3577b34da6a3ce929d0e0e4736";
  const url = `https://traces.example/trace/${id}`;
  for (const [name, traceUrl, href] of [["linked", url, url], ["hostile", "javascript:alert(1)//", null], ["unlinked", undefined, null]]) {
    const request = router.cluster.arrive({ requestId: name, outputTokens: 1e6 });
    router.cluster.cancel(request.number);
    Object.assign(request, { events, endedAt: request.arrivedAt, choices: 1, trace: { ageUs: 800, traceId: id, traceUrl } });
    await page.$eval("#filter", (node, value) => { node.value = value; node.dispatchEvent(new Event("input")); }, name);
    await until(page, `${name} is in the table`, (wanted) => [...document.querySelectorAll("#grid-body .grid-row:not([hidden])")].map((row) => row.textContent).join().includes(wanted) && document.querySelectorAll("#grid-body .grid-row:not([hidden])").length === 1, name);
    await page.click("#grid-body .grid-row:not([hidden])");
    await until(page, "its phases are shown", (number) => document.querySelector("#life-title").textContent === `Request ${number}` && document.querySelectorAll(".phases li").length === 4, request.number);
    const shown = await page.evaluate(() => ({
      widths: [...document.querySelectorAll(".phases i")].map((bar) => Math.round(1000 * bar.offsetWidth / bar.parentElement.offsetWidth) / 1000),
      times: [...document.querySelectorAll(".phases .time")].map((node) => node.textContent), trace: document.querySelector(".trace code").textContent,
      href: document.querySelector(".trace a")?.getAttribute("href") ?? null, rel: document.querySelector(".trace a")?.rel,
    }));
    ensure(shown.widths.every((width, at) => Math.abs(width - [0.125, 0.125, 0.375, 0.375][at]) < 0.02), `bars have the widths ${shown.widths}`);
    ensure(shown.times.join() === "100 µs,100 µs,300 µs,300 µs", `times are ${shown.times}`);
    ensure(shown.trace === id && shown.href === href && (!href || shown.rel === "noopener noreferrer"), `${name}: ${JSON.stringify(shown)}`);
    await page.click(".trace code");
    ensure((await page.evaluate(() => getSelection().toString())) === id, "a click does not select the id");
    await page.keyboard.press("Escape");
  }
}

async function workersHaveDetails(page, router) {
  const line = () => page.$eval(".lane .facts-line", (node) => `${node.textContent}|${node.title}`);
  ensure((await line()).startsWith("NVIDIA H200 · context 4,096"), `the line is ${await line()}`);
  await page.$eval(".lane .more", (node) => node.focus());
  await page.keyboard.press("Enter");
  for (let i = 0; i < 2; i++) await page.keyboard.press("ArrowDown");
  await page.keyboard.press("Enter");
  await until(page, "the details are open", () => document.querySelector("#worker").open && document.querySelector("#worker-title").textContent === "worker-0");
  const details = await page.$eval("#worker-details", (node) => node.innerText.replaceAll("\n", " "));
  for (const part of ["NVIDIA H200, tensor parallel over 2", "weights 15.0 GiB, bf16 · KV 121 GiB, fp8 · of 282 GiB", "Version 0.2.0", "4,096 tokens"]) ensure(details.includes(part), `the details lack ${part}: ${details}`);
  await page.keyboard.press("Escape");
  ensure(await page.evaluate(() => !document.querySelector("#worker").open && document.activeElement.matches(".more")), "Escape does not close the details");
  // A worker of an older version says nothing of itself.
  router.cluster.workers[0].facts = {};
  await until(page, "nothing is shown of it", () => document.querySelector(".lane .facts-line").textContent.startsWith("context 4,096") && !document.querySelector(".lane .facts-line").title.includes("Device"));
}

async function findingsAreShown(page, router) {
  const state = (wanted) => until(page, `the findings say ${wanted}`, (text) => document.querySelector("#findings-state").textContent === text, wanted);
  await state("Nothing stands out in the last minute");
  const high = () => page.$eval(".findings", (node) => node.offsetHeight);
  ensure((await high()) < 60, `without findings, the panel is ${await high()} pixels high`);
  const hostile = "<img src=x onerror=alert(1)>\u202e";
  router.cluster.diagnosis = {
    findings: [
      { worker: "worker-1", otherWorkers: 2, bottleneck: "queue_time", windowShare: 0.42, evidence: "the longest wait was 3.0 s", advice: "add workers" },
      { bottleneck: "router_queue", windowShare: 0.1, evidence: hostile, advice: hostile },
    ],
    undiagnosedWorkers: 1,
  };
  await state("2 in the last minute · 1 worker without a diagnosis");
  const items = await page.$$eval("#findings li", (nodes) => nodes.map((node) => [...node.children].map((child) => child.textContent)));
  ensure(items[0].join("|") === "queue timeworker-1 and 2 others · 42 %|the longest wait was 3.0 s|add workers", `the first is ${items[0]}`);
  ensure(items[1][0] === "router queuerouter · 10 %" && items[1][1].startsWith("<img"), `the second is ${items[1]}`);
  ensure((await page.$$("img")).length === 0, "a text became markup");
  await until(page, "screen readers hear of it", () => document.querySelector("#announce").textContent.includes("Finding: queue time, worker-1 and 2 others"));
  router.cluster.diagnosis = {};
  await state("Nothing stands out in the last minute");
  ensure((await high()) < 60, "the panel stays open");
}

// What ended is not among the open ones, not even for a moment; a tile for retries is there while there are some.
async function openMeansOpen(page, router) {
  await page.select("#filter-state", "open");
  await page.$eval("#filter", (node) => { node.value = ""; node.dispatchEvent(new Event("input")); });
  ensure(await page.$eval("#counts", (node) => node.lastChild.hidden), "there is a tile for no retries");
  await page.evaluate(() => {
    window.endedShown = 0;
    new MutationObserver(() => { window.endedShown += document.querySelectorAll("#grid-body .grid-row[data-ended]:not([hidden])").length; })
      .observe(document.querySelector("#grid-body"), { subtree: true, attributes: true });
  });
  // More than the page lists anew at each update.
  for (let i = 0; i < 110; i++) router.cluster.arrive({ promptTokens: 1, outputTokens: 1e6 });
  const held = router.cluster.arrive({ outputTokens: 1e6 });
  held.state = "retry";
  router.cluster.queue = router.cluster.queue.filter((number) => number !== held.number);
  await until(page, "the tile for retries is there", () => !document.querySelector("#counts").lastChild.hidden);
  const shown = (number) => until(page, `${number} requests are listed`, (text) => document.querySelector("#requests-count").textContent === text, `${number} shown`);
  const open = () => [...router.cluster.requests.values()].filter(({ state }) => state !== "ended").length;
  await shown(open());
  // They come faster than the table is built.
  for (let i = 0; i < 8; i++) {
    const short = Array.from({ length: 6 }, () => router.cluster.arrive({ promptTokens: 1, outputTokens: 8 }));
    while (short.some(({ state }) => state !== "ended")) await new Promise((resolve) => setTimeout(resolve, 10));
  }
  await shown(open());
  ensure((await page.evaluate(() => window.endedShown)) === 0, "ended requests were among the open ones");
  router.cluster.cancel(held.number);
}

// What scrolls can be reached by keyboard, and no two landmarks have the same role and name.
async function regionsAreReachable(page) {
  const faults = await page.evaluate(() => {
    const focusable = "a[href], button:not(:disabled), input, select, textarea, [tabindex='0']";
    const scrolls = [...document.querySelectorAll("body *")].filter((node) => node.scrollHeight > node.clientHeight + 1 && /auto|scroll/.test(getComputedStyle(node).overflowY) && node.clientHeight);
    const stuck = scrolls.filter((node) => node.tabIndex < 0 && !node.querySelector(focusable)).map((node) => node.id || node.className);
    const name = (node) => node.getAttribute("aria-label") ?? document.getElementById(node.getAttribute("aria-labelledby"))?.textContent ?? "";
    const role = (node) => node.getAttribute("role") ?? { SECTION: "region", NAV: "navigation", ASIDE: "complementary", HEADER: "banner", MAIN: "main" }[node.tagName];
    const landmarks = [...document.querySelectorAll("header, main, nav, aside, section[aria-label], section[aria-labelledby], [role=region], [role=search]")].map((node) => `${role(node)} ${name(node)}`);
    return [...stuck, ...landmarks.filter((one, at) => landmarks.indexOf(one) !== at)];
  });
  ensure(faults.length === 0, `not reachable, or twice: ${faults}`);
}

async function phoneIsTidy(browser, router) {
  const page = await open(browser, `${router.url}/ui`, { width: 390, height: 844 });
  await until(page, "it is live", LIVE);
  await until(page, "lanes are drawn", () => document.querySelectorAll(".fold").length === 2);
  const wide = await page.evaluate(() => document.documentElement.scrollWidth);
  ensure(wide <= 390, `the page is ${wide} pixels wide`);
  const rows = await page.evaluate(() => {
    const lines = (nodes) => {
      const found = new Map();
      for (const node of nodes) if (node.offsetHeight) found.set(node.offsetTop, Math.max(found.get(node.offsetTop) ?? 0, node.getBoundingClientRect().right));
      return [...found.values()];
    };
    return { tiles: lines(document.querySelectorAll("#counts > div")), tools: lines(document.querySelectorAll(".tools > *")), right: document.querySelector("#counts").getBoundingClientRect().right };
  });
  ensure(rows.tiles.length === 2 && rows.tiles.every((right) => Math.abs(right - rows.right) < 2), `rows of tiles end at ${rows.tiles} of ${rows.right}`);
  ensure(rows.tools.length === 1, `the tools are ${rows.tools.length} rows`);
  await page.click('.jumps a[href="#requests"]');
  await until(page, "the requests are in sight", () => { const { top } = document.querySelector("#requests").getBoundingClientRect(); return top >= 0 && top < innerHeight - 300; });
  await regionsAreReachable(page);
  ensure(page.faults.length === 0, page.faults.join("\n"));
  await page.close();
}

async function defaultView(browser) {
  phasesAddUp();
  rowsHold();
  historyIsBounded();
  const router = await new SyntheticRouter({ workers: 2, slots: 256, arrivals: 0, tenants: [{ name: "search", weight: 1, part: 1 }], outputTokens: 40 }).start();
  router.cluster.idle = true;
  try {
    const page = await open(browser, `${router.url}/ui?rate=10`);
    await until(page, "it is live", LIVE);
    const steps = {
      restIsExplained: () => restIsExplained(page, router), slotsInUseHaveRows: () => slotsInUseHaveRows(page, router), labelsAreWhole: () => labelsAreWhole(page),
      menuByKeyboard: () => menuByKeyboard(page), lifeIsATimeline: () => lifeIsATimeline(page, router), fastLivesAndTraces: () => fastLivesAndTraces(page, router),
      workersHaveDetails: () => workersHaveDetails(page, router), findingsAreShown: () => findingsAreShown(page, router), openMeansOpen: () => openMeansOpen(page, router),
      regionsAreReachable: () => regionsAreReachable(page), phoneIsTidy: () => phoneIsTidy(browser, router),
    };
    for (const [name, step] of Object.entries(steps)) {
      const started = Date.now();
      await step().catch((error) => { throw new Error(`${name}: ${error.message}`); });
      console.error(`  ${name}: ${Date.now() - started} ms`);
      ensure(page.faults.length === 0, `${name}: ${page.faults.join("\n")}`);
    }
    await page.close();
  } finally {
    await router.close();
  }
}

module.exports = { defaultView };
