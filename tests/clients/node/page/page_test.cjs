// Uses the page as a viewer does, in a headless browser, and fails where it does not do what it should.
//   node page_test.cjs URL              of a router's HTTP port, under `inflight up` with two or more workers
//   node page_test.cjs synthetic        with a made-up cluster
// NODE_PATH names the folder with puppeteer-core, INFLIGHT_TEST_BROWSER the browser. Prints JSON: what was checked, and figures.
const fs = require("node:fs");
const http = require("node:http");
const net = require("node:net");
const path = require("node:path");
const { launch, open, setScheme, until, text, ensure } = require("./browser.cjs");
const { SyntheticRouter } = require("./synthetic_router.cjs");
const { defaultView } = require("./default_view.cjs");

const part = (name) => fs.readFileSync(path.join(__dirname, "../../../../router/src/live/page", name), "utf8");
const LIVE = () => document.querySelector("#connection-text").textContent === "Live";
const SLOTS_IN_USE = () => [...document.querySelectorAll(".lane-summary")].map((node) => Number(/^(\d+) of/.exec(node.textContent)?.[1] ?? 0));

// Colours of a lane's cells, as words, with how many pixels each has; only of its `last` CSS pixels at the right, if given.
const COLOURS = (lane, last) => {
  const canvas = lane.querySelector(".lane-view canvas");
  const chart = Math.round(54 * devicePixelRatio);
  const left = Math.round(last ? canvas.width - last * devicePixelRatio : 0);
  const { data } = canvas.getContext("2d").getImageData(left, 0, canvas.width - left, canvas.height - chart);
  const colours = {};
  for (let at = 0; at < data.length; at += 4) {
    if (!data[at + 3]) continue;
    const colour = `#${[data[at], data[at + 1], data[at + 2]].map((value) => value.toString(16).padStart(2, "0")).join("")}`;
    colours[colour] = (colours[colour] ?? 0) + 1;
  }
  return colours;
};

// Streams that run until they are stopped; a stream that ends is followed by the next.
class Load {
  constructor(url, streams) {
    this.url = url;
    this.running = true;
    this.calls = new Set();
    this.failures = [];
    this.streams = Array.from({ length: streams }, (_, at) => this.stream(at));
  }

  async stream(at) {
    for (let call = 0; this.running; call++) {
      const body = { model: this.model, prompt: `Stream ${at}, call ${call}: once upon a time`.repeat(1 + (at % 3)), max_tokens: 150, stream: true, ignore_eos: true, seed: at };
      await new Promise((resolve) => {
        const request = http.request(`${this.url}/v1/completions`, { method: "POST", headers: { "content-type": "application/json" } }, (response) => {
          if (response.statusCode !== 200) this.failures.push(response.statusCode);
          response.on("data", () => {});
          response.on("close", resolve);
        });
        this.calls.add(request);
        request.on("error", (error) => {
          if (this.running) this.failures.push(String(error));
          resolve();
        });
        request.on("close", () => this.calls.delete(request));
        request.end(JSON.stringify(body));
      });
    }
  }

  async stop() {
    this.running = false;
    for (const call of this.calls) call.destroy();
    await Promise.all(this.streams);
  }
}

// The page's own colours: its script keeps them to itself.
const { INKS, HUES, requestTone } = new Function("matchMedia", `${part("palette.js")}\nreturn { INKS, HUES, requestTone };`)(() => ({}));

// Whether the first lane is drawn in the colours of the scheme named: its cells without a request, and none in those of the other.
const DRAWN_IN = (scheme) => `((colours) => colours["${INKS[scheme].empty}"] > 100 && !colours["${INKS[scheme === "dark" ? "light" : "dark"].empty}"])((${COLOURS})(document.querySelector(".lane")))`;

// How many iterations of a lane have a cell in `colour` with a line of `ink` above and below it, as those of the playground's request have.
const OUTLINED = (lane, colour, ink) => {
  const canvas = lane.querySelector(".lane-view canvas");
  const { width, height } = canvas;
  const words = new Uint32Array(canvas.getContext("2d").getImageData(0, 0, width, height).data.buffer);
  const [wanted, edge] = [colour, ink].map((name) => (0xff000000 | parseInt(name.slice(5, 7) + name.slice(3, 5) + name.slice(1, 3), 16)) >>> 0);
  let found = 0;
  for (let x = 0; x < width; x++) {
    for (let y = 1, run = 0, outlined = false; y < height; y++) {
      const word = words[y * width + x];
      if (word === wanted) {
        if (run === 0) outlined = words[(y - 1) * width + x] === edge;
        run += 1;
        continue;
      }
      if (word === edge && run >= 4 && outlined) {
        found += 1;
        break;
      }
      run = 0;
    }
  }
  return found;
};

async function slotsFillAndEmpty(page, cluster) {
  await until(page, "every lane is there", (number) => document.querySelectorAll(".lane").length >= number, cluster.workers);
  const load = await cluster.load();
  await until(page, "slots of every lane are in use", `(${SLOTS_IN_USE})().every((number) => number > 0)`);
  await until(page, "cells of several colours are drawn in every lane", `[...document.querySelectorAll(".lane")].every((lane) => Object.values((${COLOURS})(lane)).filter((pixels) => pixels > 20).length >= 5)`);
  ensure(Number(await text(page, "#counts dd")) > 0, "the overview has no requests in flight");
  await until(page, "the table has rows", () => document.querySelectorAll("#grid-body .grid-row:not([hidden])").length > 2);
  await load.stop();
  ensure(!load.failures?.length, `calls of the load failed: ${load.failures}`);
  await until(page, "all slots are free", `(${SLOTS_IN_USE})().every((number) => number === 0)`);
  await until(page, "the newest columns are empty", `[...document.querySelectorAll(".lane")].every((lane) => Object.keys((${COLOURS})(lane, 3)).every((colour) => colour === "${INKS.light.empty}" || colour === "${INKS.light.surface}"))`);
}

async function bothSchemesAreDrawn(page) {
  const pageColour = () => page.$eval("body", (node) => getComputedStyle(node).backgroundColor);
  await until(page, "the lanes are light", DRAWN_IN("light"));
  const light = await pageColour();
  await setScheme(page, "dark");
  await until(page, "the lanes are dark", DRAWN_IN("dark"));
  const dark = await pageColour();
  ensure(light !== dark, `the page is ${light} in both schemes`);
  await page.select("#theme", "light");
  await until(page, "the switch overrides the system", (colour) => getComputedStyle(document.body).backgroundColor === colour, light);
  await until(page, "the lanes are light again", DRAWN_IN("light"));
  await page.select("#theme", "auto");
  await setScheme(page, "light");
}

// Starts the playground's stream, kills its worker by the menu of its lane, and sees it go on elsewhere.
async function killedWorkersStreamsJump(page, cluster) {
  const load = await cluster.load();
  await page.select("#endpoint", "completion");
  await page.$eval("#prompt", (node) => { node.value = "Once upon a time there was a lighthouse."; });
  await page.$eval("#max-tokens", (node) => { node.value = "20000"; });
  await page.click("#send");
  await until(page, "the playground streams", () => document.querySelector("#answer-text").textContent.length > 30 && /at \S+$/.test(document.querySelector("#answer-state").textContent));
  const from = /at (\S+)$/.exec(await text(page, "#answer-state"))[1];
  const lane = `[...document.querySelectorAll(".lane")].find((lane) => lane.querySelector("h3").textContent === "${from}")`;
  const number = await numberOfThePlayground(page);
  const outlinedIn = (name) => `(${OUTLINED})([...document.querySelectorAll(".lane")].find((lane) => lane.querySelector("h3").textContent === "${name}"), "${HUES.light[requestTone(number)]}", "${INKS.light.ink}") > 20`;
  await until(page, `request ${number} is drawn in its colour in the lane of ${from}`, outlinedIn(from));
  await page.evaluate(`${lane}.querySelector(".more").click()`);
  await page.evaluate(`[...${lane}.querySelectorAll("[role=menuitem]")].find((item) => item.textContent.startsWith("Kill process")).click()`);
  await until(page, "it asks before it kills", () => document.querySelector("#kill").open);
  ensure((await text(page, "#kill-title")) === `Kill ${from}?`, `it asks ${await text(page, "#kill-title")}`);
  // All that is announced from here on: a later announcement may replace one before it is looked for.
  await page.evaluate(() => {
    const node = document.querySelector("#announce");
    window.announced = [];
    new MutationObserver(() => window.announced.push(node.textContent)).observe(node, { childList: true, characterData: true, subtree: true });
  });
  await page.click("#kill-yes");
  await until(page, "the stream has moved", () => /moved .*, now at /.test(document.querySelector("#answer-state").textContent));
  const length = (await text(page, "#answer-text")).length;
  await until(page, "the stream goes on", (before) => document.querySelector("#answer-text").textContent.length > before + 60, length);
  const to = /now at (\S+)$/.exec(await text(page, "#answer-state"))[1];
  ensure(to !== from, `it moved from ${from} to ${to}`);
  await until(page, "screen readers hear of the worker and of the move", (name) => window.announced.some((said) => said.includes(name)) && window.announced.some((said) => / moved to /.test(said)), from);

  await until(page, `request ${number} is drawn in its colour in the lane of ${to}`, outlinedIn(to));

  // Its life tells of both workers.
  await page.click("#follow");
  await until(page, "its life is shown", () => document.querySelectorAll(".timeline li").length > 3);
  ensure((await text(page, "#life-title")) === `Request ${number}`, `the life shown is that of ${await text(page, "#life-title")}`);
  const life = await text(page, ".timeline");
  for (const word of [from, to, "lost", "dispatched"]) ensure(life.includes(word), `its life has no ${word}: ${life}`);
  await page.keyboard.press("Escape");
  await keyboardFindsTheStream(page, to, number);
  await page.click("#stop");
  await until(page, "the playground has stopped", () => /^(Stopped|Done)/.test(document.querySelector("#answer-state").textContent));
  await load.stop();
  await until(page, "the worker is back", (name) => [...document.querySelectorAll(".lane")].some((lane) => lane.querySelector("h3").textContent === name && lane.querySelector(".pill").textContent === "connected"), from);
  return { from, to, number };
}

async function numberOfThePlayground(page) {
  await until(page, "the playground's request is known", () => !document.querySelector("#follow").hidden);
  await page.click("#follow");
  const number = Number(/\d+/.exec(await text(page, "#life-title"))[0]);
  await page.keyboard.press("Escape");
  return number;
}

// With keys alone: to the lane, to a cell of the request, to its life and back.
async function keyboardFindsTheStream(page, worker, number) {
  await page.$eval("#help-open", (node) => node.focus());
  const inLane = () => page.evaluate(() => document.activeElement.closest(".lane")?.querySelector("h3").textContent ?? "");
  await page.keyboard.press("l");
  for (let tries = 0; (await inLane()) !== worker; tries++) {
    ensure(tries < 20, `] does not reach the lane of ${worker}`);
    await page.keyboard.press("]");
  }
  await page.keyboard.press("End");
  const cell = () => text(page, "#cell");
  const seen = [];
  for (let tries = 0; /^Request (\d+)/.exec(await cell())?.[1] !== String(number); tries++) {
    ensure(tries < 120, `arrow keys do not reach request ${number}, ${await text(page, "#answer-state")}: ${seen.join("; ")}`);
    seen.push((await cell()).slice(0, 40));
    // From the newest column, row by row; columns move on meanwhile.
    await page.keyboard.press(tries % 40 === 0 ? "End" : "ArrowDown");
    if (tries % 40 === 0) for (let up = 0; up < 20; up++) await page.keyboard.press("ArrowUp");
  }
  await page.keyboard.press("Enter");
  await until(page, "Enter opens the life", (wanted) => document.querySelector("#life-title").textContent === `Request ${wanted}` && document.activeElement.id === "life-title", number);
  await page.keyboard.press("Escape");
  ensure((await inLane()) === worker, "Escape does not return to the lane");
}

// Arrow keys choose a row, and Enter opens the life of its request. One that ends meanwhile leaves the table: the next is tried.
async function keyboardOpensALife(page) {
  const isMarked = () => page.evaluate(() => document.getElementById(document.querySelector("#grid").getAttribute("aria-activedescendant"))?.hasAttribute("data-active") ?? false);
  const isOpen = () => page.evaluate(() => document.activeElement.id === "life-title");
  for (let tries = 0; !(await isMarked()); tries++) {
    ensure(tries < 100, "arrow keys choose no row");
    await page.keyboard.press("ArrowDown");
  }
  await page.keyboard.press("Enter");
  for (let tries = 0; !(await isOpen()); tries++) {
    ensure(tries < 100, "Enter does not open the life of a row");
    await page.keyboard.press("ArrowDown");
    await page.keyboard.press("Enter");
  }
  await until(page, "the life of the row is shown", () => document.querySelectorAll(".timeline li").length > 0);
}

async function everythingWorksByKeyboard(page, cluster) {
  const load = await cluster.load();
  await page.evaluate(() => document.activeElement.blur());
  await page.keyboard.press("?");
  await until(page, "? lists the shortcuts", () => document.querySelector("#help").open && document.querySelectorAll("#shortcuts dt").length > 10);
  await page.keyboard.press("Escape");
  await until(page, "Escape closes them", () => !document.querySelector("#help").open);
  await page.keyboard.press("p");
  await until(page, "P pauses", () => document.querySelector("#pause").getAttribute("aria-pressed") === "true" && document.querySelector("#connection-text").textContent === "Paused");
  await page.keyboard.press("p");
  await page.keyboard.press("c");
  await until(page, "C colours by tenant", () => document.querySelector("#tone-tenant").getAttribute("aria-checked") === "true");
  await page.keyboard.press("c");
  await page.keyboard.press("r");
  await until(page, "the table has rows", () => document.querySelectorAll("#grid-body .grid-row:not([hidden])").length > 2);
  await keyboardOpensALife(page);
  await page.keyboard.press("Escape");
  ensure(await page.evaluate(() => document.activeElement.id === "grid"), "Escape does not return to the table");
  await page.keyboard.press("/");
  await page.keyboard.type("no such thing");
  await until(page, "the filter holds", () => !document.querySelector("#grid-empty").hidden);
  await page.$eval("#filter", (node) => { node.value = ""; node.dispatchEvent(new Event("input")); });
  await page.evaluate(() => { document.activeElement.blur(); window.scrollTo(0, 0); });
  // Every stop of the Tab key shows where it is.
  const stops = [];
  // It begins after the control that had the focus last, and goes on at the top after the end.
  for (let i = 0, ends = 0; i < 120; i++) {
    await page.keyboard.press("Tab");
    const stop = await page.evaluate(() => {
      const node = document.activeElement;
      const style = getComputedStyle(node);
      return node === document.body ? null : { name: node.id || node.className || node.textContent, outline: style.outlineStyle !== "none" && parseFloat(style.outlineWidth) > 0 };
    });
    if (stop) stops.push(stop);
    else if (++ends === 2) break;
  }
  const names = stops.map(({ name }) => name);
  for (const id of ["skip", "pause", "tone-request", "theme", "more", "lane-view", "prompt", "send", "filter", "grid"]) ensure(names.includes(id), `Tab does not reach ${id}: ${names}`);
  ensure(stops.every(({ outline }) => outline), `no visible focus at ${stops.filter(({ outline }) => !outline).map(({ name }) => name)}`);
  await load.stop();
}

async function everyControlHasAName(page) {
  const unnamed = [];
  const visit = (node) => {
    if (["button", "textbox", "searchbox", "combobox", "spinbutton", "checkbox", "radio", "application", "grid", "image", "img"].includes(node.role) && !node.name) unnamed.push(JSON.stringify(node));
    for (const child of node.children ?? []) visit(child);
  };
  visit(await page.accessibility.snapshot({ interestingOnly: true }));
  ensure(unnamed.length === 0, `without a name: ${unnamed}`);
  const landmarks = await page.evaluate(() => ["header", "main", "main section[aria-labelledby], main section[aria-label]", "aside"].map((selector) => document.querySelectorAll(selector).length));
  ensure(landmarks.every((number) => number > 0), `landmarks: ${landmarks}`);
}

// Between the browser and the router: can be cut, with what is open on it.
class Proxy {
  async start(url) {
    const { hostname, port } = new URL(url);
    this.cut = false;
    this.sockets = new Set();
    this.server = net.createServer((client) => {
      if (this.cut) return client.destroy();
      const server = net.connect(Number(port), hostname);
      for (const [from, to] of [[client, server], [server, client]]) {
        this.sockets.add(from);
        from.on("error", () => to.destroy());
        from.on("close", () => { this.sockets.delete(from); to.destroy(); });
        from.pipe(to);
      }
    });
    await new Promise((resolve) => this.server.listen(0, "127.0.0.1", resolve));
    this.url = `http://127.0.0.1:${this.server.address().port}`;
    return this;
  }

  setCut(cut) {
    this.cut = cut;
    if (cut) for (const socket of this.sockets) socket.destroy();
  }

  stop() {
    this.setCut(true);
    this.server.close();
  }
}

async function thePageReconnects(page, proxy) {
  proxy.setCut(true);
  await until(page, "it says that it waits", () => document.querySelector("#connection").dataset.state === "waiting");
  proxy.setCut(false);
  await until(page, "it is connected again", LIVE);
  await until(page, "the lanes are back", () => document.querySelectorAll(".lane").length >= 2);
}

async function aNarrowWindowIsNotTooSmall(browser, url) {
  const page = await open(browser, `${url}/ui`, { width: 400, height: 800, scheme: "dark", reducedMotion: true });
  await until(page, "it is live", LIVE);
  await until(page, "lanes are there", () => document.querySelectorAll(".lane").length >= 2);
  const wide = await page.evaluate(() => document.documentElement.scrollWidth);
  ensure(wide <= 400, `the page is ${wide} pixels wide`);
  ensure(page.faults.length === 0, page.faults.join("\n"));
  await page.close();
}

async function onlyTheSyntheticRouterCan(browser, router) {
  const page = await open(browser, `${router.url}/ui`);
  await until(page, "it is live", LIVE);
  router.cluster.idle = false;
  await until(page, "hostile names are text", () => document.body.textContent.includes("<img src=x onerror=alert(1)>"));
  ensure((await page.$$("img")).length === 0, "a name became markup");
  router.cluster.addWorker(9);
  await until(page, "a worker joins", () => [...document.querySelectorAll("h3")].some((node) => node.textContent === "worker-8"));
  router.cluster.removeWorker("worker-8");
  await until(page, "a worker leaves", () => document.querySelector('.lane[data-state="gone"]'));
  for (let i = 0; i < 50; i++) router.cluster.arrive({ outputTokens: 1e5 });
  const newest = () => Number(document.querySelector("#grid-body .grid-row:not([hidden]) .number")?.textContent ?? 0);
  await until(page, "newer requests are in the table", `(${newest})() > 50`);
  router.restart();
  router.cluster.idle = true;
  for (let i = 0; i < 5; i++) router.cluster.arrive({ outputTokens: 1e5 });
  await until(page, "a restarted router's requests replace the old ones", `[1, 2, 3, 4, 5].includes((${newest})())`);
  router.refusal = 429;
  router.dropStreams();
  await until(page, "it says why it is refused", () => document.querySelector("#connection-text").textContent.includes("as many viewers"));
  router.refusal = 0;
  await page.click("#connection-retry");
  await until(page, "it is live again", LIVE);
  router.key = "secret";
  router.dropStreams();
  await until(page, "it asks for a key", () => document.querySelector("#key").open);
  await page.type("#key-input", "wrong");
  await page.keyboard.press("Enter");
  await until(page, "it asks again", () => document.querySelector("#key").open && document.querySelector("#key-text").textContent.includes("unknown API key"));
  await page.type("#key-input", "secret");
  await page.keyboard.press("Enter");
  await until(page, "the key opens the view", LIVE);
  ensure(!(await page.evaluate(() => JSON.stringify({ ...localStorage, ...sessionStorage }))).includes("secret"), "the key is kept");
  router.key = undefined;
  ensure(page.faults.length === 0, page.faults.join("\n"));
  await page.close();
}

// Names that look like the borders at which a large update is cut must not be cut.
async function largeUpdatesAreParsedInParts() {
  const inParts = new Function("location", "breathe", `${part("updates.js")}\nreturn parseUpdate;`)({ search: "" }, () => new Promise(setImmediate));
  const names = ['},{"number":7', '}],"tenants":[', '}]}', '"requests":[{', "\\", '\\"}],"a', "plain"];
  const requests = Array.from({ length: 9000 }, (_, at) => ({ number: at + 1, requestId: names[at % names.length], tenant: names[(at * 3 + 1) % names.length], state: "queued" }));
  for (const update of [
    { number: 1, workers: [{ name: '"requests":[', requests: 3 }], requests, skippedUpdates: 2 },
    { number: 1, tenants: [{ tenant: "}]}" }], requests },
    { requests, number: 1, workers: [{ name: "}]" }] },
  ]) {
    const parsed = await inParts(JSON.stringify(update));
    ensure(parsed.parts.length > 2, `only ${parsed.parts?.length} parts`);
    const { parts, ...rest } = parsed;
    ensure(JSON.stringify(parts.flat()) === JSON.stringify(requests), "requests differ");
    ensure(JSON.stringify(rest.workers) === JSON.stringify(update.workers) && rest.skippedUpdates === update.skippedUpdates, "the rest differs");
  }
}

async function main() {
  await largeUpdatesAreParsedInParts();
  const target = process.argv[2];
  let router = null;
  if (target === "synthetic") {
    router = await new SyntheticRouter({ workers: 2, slots: 16, arrivals: 8 }).start();
    router.cluster.idle = true;
  }
  const proxy = await new Proxy().start(router?.url ?? target);
  const { url } = proxy;
  const cluster = {
    workers: 2,
    load: async () => {
      if (!router) return new Load(url, 20);
      router.cluster.idle = false;
      return { stop: async () => {
        router.cluster.idle = true;
        for (const number of [...router.cluster.requests.keys()]) router.cluster.cancel(number);
      } };
    },
  };
  const browser = await launch();
  const checked = {};
  try {
    const page = await open(browser, `${url}/ui`);
    await until(page, "it is live", LIVE);
    const steps = {
      slotsFillAndEmpty: () => slotsFillAndEmpty(page, cluster),
      bothSchemesAreDrawn: () => bothSchemesAreDrawn(page),
      everyControlHasAName: () => everyControlHasAName(page),
      killedWorkersStreamsJump: async () => { checked.jump = await killedWorkersStreamsJump(page, cluster); },
      everythingWorksByKeyboard: () => everythingWorksByKeyboard(page, cluster),
      thePageReconnects: () => thePageReconnects(page, proxy),
      aNarrowWindowIsNotTooSmall: () => aNarrowWindowIsNotTooSmall(browser, url),
      ...(router && { onlyTheSyntheticRouterCan: () => onlyTheSyntheticRouterCan(browser, router), defaultView: () => defaultView(browser) }),
    };
    for (const [name, step] of Object.entries(steps)) {
      const started = Date.now();
      await step().catch((error) => { throw new Error(`${name}: ${error.message}`); });
      checked[name] = Date.now() - started;
      console.error(`${name}: ${checked[name]} ms`);
      ensure(page.faults.length === 0, `${name}: ${page.faults.join("\n")}`);
    }
    if (process.env.INFLIGHT_PAGE_SCREENSHOT) await page.screenshot({ path: process.env.INFLIGHT_PAGE_SCREENSHOT, fullPage: true });
  } finally {
    await browser.close();
    proxy.stop();
    await router?.close();
  }
  console.log(JSON.stringify(checked));
}

main().catch((error) => {
  // On standard output, which the test that runs this shows with its failure.
  fs.writeSync(1, `${error.message}\n`);
  process.exit(1);
});
