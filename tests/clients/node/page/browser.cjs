// A headless browser with the page in it, and what tests do with it. INFLIGHT_TEST_BROWSER names the browser's program.
const puppeteer = require("puppeteer-core");

const DEADLINE_MS = Number(process.env.INFLIGHT_PAGE_DEADLINE_MS ?? 60000);

async function launch() {
  const executablePath = process.env.INFLIGHT_TEST_BROWSER;
  if (!executablePath) throw new Error("INFLIGHT_TEST_BROWSER names no browser");
  const args = ["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run", "--font-render-hinting=none"];
  return puppeteer.launch({ executablePath, headless: true, args, protocolTimeout: 180000 });
}

// Opens the page; errors of its script and refusals of its policy are kept in `faults`.
async function open(browser, url, { width = 1440, height = 1000, scheme = "light", reducedMotion = false, scale = 1 } = {}) {
  const page = await browser.newPage();
  page.setDefaultTimeout(DEADLINE_MS);
  page.faults = [];
  page.on("pageerror", (error) => page.faults.push(String(error.stack ?? error)));
  page.on("console", (message) => {
    const text = message.text();
    // Refused requests are part of some tests.
    if (message.type() === "error" && !text.startsWith("Failed to load resource")) page.faults.push(text);
  });
  await page.setViewport({ width, height, deviceScaleFactor: scale });
  await setScheme(page, scheme, reducedMotion);
  await page.goto(url, { waitUntil: "domcontentloaded" });
  return page;
}

function setScheme(page, scheme, reducedMotion = false) {
  return page.emulateMediaFeatures([
    { name: "prefers-color-scheme", value: scheme },
    { name: "prefers-reduced-motion", value: reducedMotion ? "reduce" : "no-preference" },
  ]);
}

// Waits until `condition` holds in the page; an error says what was waited for and what the page showed.
async function until(page, what, condition, ...args) {
  try {
    return await page.waitForFunction(condition, { polling: 100, timeout: DEADLINE_MS }, ...args);
  } catch (error) {
    const shown = await page.evaluate(() => document.body.innerText.slice(0, 2500)).catch(() => "nothing");
    throw new Error(`waited in vain until ${what}: ${error.message}\nfaults: ${page.faults.join("\n")}\nthe page showed:\n${shown}`);
  }
}

const text = (page, selector) => page.$eval(selector, (node) => node.textContent);

function ensure(condition, message) {
  if (!condition) throw new Error(message);
}

module.exports = { launch, open, setScheme, until, text, ensure };
