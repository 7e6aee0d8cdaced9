// Screenshots of the page with a synthetic cluster, to look at. Arguments: folder.
const path = require("node:path");
const { launch, open, until } = require("./browser.cjs");
const { SyntheticRouter } = require("./synthetic_router.cjs");

const VIEWS = [
  ["wide-light", { width: 1600, height: 1250, scheme: "light" }],
  ["wide-dark", { width: 1600, height: 1250, scheme: "dark" }],
  ["narrow-light", { width: 400, height: 900, scheme: "light" }],
  ["narrow-dark", { width: 400, height: 900, scheme: "dark" }],
];

async function main() {
  const folder = process.argv[2];
  const wanted = process.argv.slice(3);
  const router = await new SyntheticRouter({ workers: 3, slots: 16, arrivals: 7, seed: 3 }).start();
  const browser = await launch();
  for (const [name, options] of VIEWS) {
    if (wanted.length && !wanted.includes(name)) continue;
    const page = await open(browser, `${router.url}/ui`, options);
    await until(page, "it is live", () => document.querySelector("#connection-text").textContent === "Live");
    await page.evaluate(() => {
      document.querySelector("#max-tokens").value = "400";
      document.querySelector("#send").click();
    });
    await new Promise((resolve) => setTimeout(resolve, 5000));
    router.cluster.kill(1);
    await new Promise((resolve) => setTimeout(resolve, 2500));
    await page.screenshot({ path: path.join(folder, `${name}.png`), fullPage: true });
    await page.evaluate(() => {
      document.querySelector("#follow").click();
      document.querySelector("#tone-tenant").click();
    });
    await new Promise((resolve) => setTimeout(resolve, 1200));
    await page.screenshot({ path: path.join(folder, `${name}-life.png`) });
    if (page.faults.length) console.log(name, page.faults);
    await page.close();
  }
  await browser.close();
  await router.close();
}

main().catch((error) => {
  console.error(error);
  process.exit(1);
});
