// Longest main-thread tasks of the page: at 4 workers of 256 slots with 10 updates a second, and with 10,000 requests in the roster.
// The synthetic cluster runs in a process of its own. Prints JSON. Arguments: seconds of each trace.
const { spawn } = require("node:child_process");
const fs = require("node:fs");
const os = require("node:os");
const path = require("node:path");
const { launch, open, until } = require("./browser.cjs");

const CASES = {
  "4 workers x 256 slots, 10 updates a second": { workers: 4, slots: 256, arrivals: 160, outputTokens: 300 },
  "10,000 open requests, 4 workers x 256 slots, 10 updates a second": { workers: 4, slots: 256, arrivals: 60, outputTokens: 300, roster: 10000 },
};

function startRouter(options) {
  const child = spawn(process.execPath, [path.join(__dirname, "synthetic_router.cjs"), "0", JSON.stringify(options)], { stdio: ["ignore", "pipe", "inherit"] });
  return new Promise((resolve, reject) => {
    child.stdout.once("data", (line) => resolve({ child, url: String(line).trim() }));
    child.once("exit", (code) => reject(new Error(`the router ended with ${code}`)));
  });
}

// Tasks of the renderer's main thread, longest first, with what each did longest.
function tasksOf(trace) {
  const events = trace.traceEvents;
  // Of several renderers, the page's is the busiest.
  const busiest = new Map();
  const isTask = ({ ph, name }) => ph === "X" && name === "RunTask";
  for (const event of events.filter(isTask)) busiest.set(`${event.pid}/${event.tid}`, (busiest.get(`${event.pid}/${event.tid}`) ?? 0) + event.dur);
  const mains = events.filter(({ name, args }) => name === "thread_name" && args.name === "CrRendererMain").map(({ pid, tid }) => `${pid}/${tid}`);
  const main = mains.sort((one, other) => (busiest.get(other) ?? 0) - (busiest.get(one) ?? 0))[0];
  const ours = events.filter(({ ph, pid, tid, dur }) => ph === "X" && dur && `${pid}/${tid}` === main);
  const tasks = ours.filter(isTask).sort((one, other) => other.dur - one.dur);
  return tasks.map((task) => ({
    ms: task.dur / 1000,
    parts: ours.filter((part) => part !== task && part.ts >= task.ts && part.ts + part.dur <= task.ts + task.dur && part.dur > task.dur * 0.15)
      .sort((one, other) => other.dur - one.dur).slice(0, 5)
      .map(({ name, dur, args }) => `${name}${args?.data?.functionName ? ` ${args.data.functionName}` : ""} ${(dur / 1000).toFixed(1)} ms`),
  }));
}

async function measure(options, seconds) {
  const { child, url } = await startRouter(options);
  const browser = await launch();
  const file = path.join(fs.mkdtempSync(path.join(os.tmpdir(), "inflight-page-")), "trace.json");
  try {
    const page = await browser.newPage();
    await page.close();
    const viewed = await open(browser, "about:blank", { width: 1600, height: 1100 });
    await viewed.tracing.start({ path: file, categories: ["toplevel", "devtools.timeline", "disabled-by-default-devtools.timeline", "blink.user_timing"] });
    await viewed.goto(`${url}?rate=10`, { waitUntil: "domcontentloaded" });
    await until(viewed, "it is live", () => document.querySelector("#connection-text").textContent === "Live");
    await new Promise((resolve) => setTimeout(resolve, (seconds * 1000) / 2));
    // What a viewer does meanwhile: sort, filter, scroll, colour, hover.
    await viewed.evaluate(() => document.querySelectorAll("#grid-head button")[2].click());
    await viewed.evaluate(() => { document.querySelector("#filter").value = "sup"; document.querySelector("#filter").dispatchEvent(new Event("input")); });
    await viewed.evaluate(() => document.querySelector("#tone-tenant").click());
    await viewed.mouse.move(700, 400, { steps: 10 });
    await viewed.evaluate(() => { document.querySelector("#grid").scrollTop = 5000; });
    await new Promise((resolve) => setTimeout(resolve, (seconds * 1000) / 2));
    const heap = (await viewed.metrics()).JSHeapUsedSize;
    await viewed.tracing.stop();
    const tasks = tasksOf(JSON.parse(fs.readFileSync(file, "utf8")));
    const busy = tasks.reduce((sum, { ms }) => sum + ms, 0);
    return {
      longestMs: Number(tasks[0].ms.toFixed(1)), over50Ms: tasks.filter(({ ms }) => ms > 50).length, tasks: tasks.length, busyShare: Number((busy / 1000 / seconds).toFixed(2)),
      heapMB: Number((heap / 1e6).toFixed(1)), longest: tasks.slice(0, 4), faults: viewed.faults,
    };
  } finally {
    await browser.close();
    child.removeAllListeners("exit");
    child.kill();
    fs.rmSync(path.dirname(file), { recursive: true });
  }
}

async function main() {
  const seconds = Number(process.argv[2] ?? 12);
  for (const [name, options] of Object.entries(CASES)) console.log(JSON.stringify({ [name]: await measure(options, seconds) }, null, 1));
}

main().catch((error) => {
  console.error(error);
  process.exit(1);
});
