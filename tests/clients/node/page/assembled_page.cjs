// The page as router/src/live/page.rs assembles it, from the parts that it names, in their order.
const crypto = require("node:crypto");
const fs = require("node:fs");
const path = require("node:path");

function assembledPage() {
  const live = path.join(__dirname, "../../../../router/src/live");
  const names = [...fs.readFileSync(path.join(live, "page.rs"), "utf8").matchAll(/include_str!\("([^"]+)"\)/g)].map(([, name]) => name);
  const [markup, style, ...parts] = names.map((name) => fs.readFileSync(path.join(live, name), "utf8"));
  const script = `"use strict";\n(() => {\n${parts.join("")}})();\n`;
  const html = markup.replace("/*STYLE*/", () => style).replace("/*SCRIPT*/", () => script);
  const hash = crypto.createHash("sha256").update(script).digest("base64");
  const policy = [
    "default-src 'none'", "style-src 'unsafe-inline'", `script-src 'sha256-${hash}'`, "connect-src 'self'", "img-src data:",
    "base-uri 'none'", "form-action 'none'", "frame-ancestors 'none'",
  ].join("; ");
  return { html, policy };
}

module.exports = { assembledPage };
