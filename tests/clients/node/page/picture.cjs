// Makes the picture of README: the page over two workers, one of which is killed while 12 streams run.
//   node picture.cjs PROGRAM FILE.png
// NODE_PATH names the folder with puppeteer-core, INFLIGHT_TEST_BROWSER the browser.
const http = require("node:http");
const { spawn } = require("node:child_process");
const readline = require("node:readline");
const { launch, open, until } = require("./browser.cjs");

const STREAMS = 12;

// Starts a cluster; returns its process and the address of its HTTP port.
function start(program) {
  const flags = ["up", "--json", "--port=0", "--workers=2", "--device=sim:flat,step=0.015,sequence=0.003", "--max-sequences=12", "--kv-cache-bytes=64MiB"];
  const cluster = spawn(program, flags, { stdio: ["ignore", "pipe", "inherit"] });
  const ready = new Promise((resolve, reject) => {
    cluster.on("exit", (code) => reject(new Error(`the cluster ended with ${code}`)));
    readline.createInterface({ input: cluster.stdout }).on("line", (line) => {
      const event = JSON.parse(line);
      if (event.event === "ready") resolve(event.http);
    });
  });
  return { cluster, ready };
}

// One stream after the other, each of another length.
async function stream(url, at, isRunning) {
  for (let call = 0; isRunning(); call++) {
    const body = { prompt: `Stream ${at}, call ${call}: once upon a time `.repeat(2 + ((at * 7 + call) % 9)), max_tokens: 60 + ((at * 31 + call * 17) % 160), stream: true, ignore_eos: true };
    await new Promise((resolve) => {
      const request = http.request(`${url}/v1/completions`, { method: "POST", headers: { "content-type": "application/json" } }, (response) => {
        response.on("data", () => {});
        response.on("close", resolve);
      });
      request.on("error", resolve);
      request.end(JSON.stringify(body));
    });
  }
}

async function main() {
  const [program, file] = process.argv.slice(2);
  const { cluster, ready } = start(program);
  const url = await ready;
  let running = true;
  for (let at = 0; at < STREAMS; at++) stream(url, at, () => running);
  const browser = await launch();
  const page = await open(browser, `${url}/ui`, { width: 1360, height: 900, scheme: "light" });
  await until(page, "all streams are shown", (least) => {
    const used = [...document.querySelectorAll(".lane-summary")].map((node) => Number(/^(\d+) of/.exec(node.textContent)?.[1] ?? 0));
    return used.length === 2 && used[0] + used[1] >= least;
  }, STREAMS - 1);
  // A stretch of time, then the kill, then what follows.
  await new Promise((resolve) => setTimeout(resolve, 9000));
  await page.evaluate(() => document.querySelector(".lane .menu-button, .lane [aria-haspopup=menu]").click());
  await page.evaluate(() => [...document.querySelectorAll("[role=menuitem]")].find((item) => /kill/i.test(item.textContent)).click());
  await page.evaluate(() => [...document.querySelectorAll("dialog button")].find((button) => button.textContent === "Kill worker").click());
  await new Promise((resolve) => setTimeout(resolve, 5500));
  await page.screenshot({ path: file });
  running = false;
  await browser.close();
  cluster.removeAllListeners("exit");
  cluster.kill("SIGINT");
}

main().catch((error) => {
  console.error(error);
  process.exit(1);
});
