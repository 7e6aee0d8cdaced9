// What holds for every view of a page: rules of axe-core, no clipped text, no view wider than its window. Views are kept as pictures in the
// folder that INFLIGHT_TEST_SCREENSHOTS names.
const fs = require("node:fs");
const path = require("node:path");
const { ensure } = require("./browser.cjs");

let rules = null;
try {
  rules = fs.readFileSync(require.resolve("axe-core/axe.min.js"), "utf8");
} catch {
  console.error("skipped: rules of accessibility: NODE_PATH has no axe-core");
}

async function axe(page, what) {
  if (!rules) return;
  await page.evaluate(rules);
  const violations = await page.evaluate(async () => {
    // eslint-disable-next-line no-undef
    const { violations } = await axe.run(document, { resultTypes: ["violations"] });
    return violations.map(({ id, help, nodes }) => `${id} (${help}): ${nodes.slice(0, 4).map(({ html, any }) => `${html.slice(0, 160)} ${any[0]?.message ?? ""}`).join(" | ")}`);
  });
  ensure(violations.length === 0, `${what}: ${violations.length} rules are violated:\n${violations.join("\n")}`);
}

// Texts that are cut by their element, by one around it or by the window. What scrolls is not cut, nor is what only screen readers read.
const CLIPPED = () => {
  const faults = [];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  for (let node = walker.nextNode(); node; node = walker.nextNode()) {
    const parent = node.parentElement;
    if (!node.nodeValue.trim() || parent.closest("script, style, noscript, option, textarea, .hidden, .skip, [aria-hidden=true], dialog:not([open])") || !parent.checkVisibility({ visibilityProperty: true })) continue;
    const range = document.createRange();
    range.selectNodeContents(node);
    const box = range.getBoundingClientRect();
    if (!box.width) continue;
    const told = (why) => faults.push(`"${node.nodeValue.trim().slice(0, 60)}" ${why}`);
    for (let around = parent; around && around !== document.body; around = around.parentElement) {
      const { overflowX, overflowY } = getComputedStyle(around);
      if (/auto|scroll/.test(overflowX + overflowY)) break;
      const outer = around.getBoundingClientRect();
      const clips = /hidden|clip/.test(overflowX + overflowY);
      if (clips && (box.right > outer.right + 1 || box.left < outer.left - 1 || box.bottom > outer.bottom + 3 || box.top < outer.top - 3)) told(`is cut by ${around.className || around.tagName}`);
      // A blank at the end of a line hangs over its edge.
      else if (around === parent && !clips && getComputedStyle(around).display !== "inline" && box.width > outer.width + 6) told(`is wider than ${around.className || around.tagName}`);
    }
    if (box.right > innerWidth + 1 && !parent.closest("pre, .grid")) told("leaves the window");
  }
  const wide = document.documentElement.scrollWidth;
  if (wide > innerWidth) faults.push(`the page is ${wide} pixels wide, the window ${innerWidth}`);
  return faults;
};

async function nothingIsClipped(page, what) {
  const faults = await page.evaluate(CLIPPED);
  ensure(faults.length === 0, `${what}: ${faults.join("\n")}`);
}

async function picture(page, name) {
  const folder = process.env.INFLIGHT_TEST_SCREENSHOTS;
  if (!folder) return;
  fs.mkdirSync(folder, { recursive: true });
  await page.screenshot({ path: path.join(folder, `${name}.png`) });
}

module.exports = { axe, nothingIsClipped, picture };
