// A page as router/src/live/page.rs assembles it, from the parts that it names, in their order; indentation and comments are left in.
const crypto = require("node:crypto");
const fs = require("node:fs");
const path = require("node:path");

// `constant` names the parts: LIVE or CHAT.
function assembledPage(constant = "LIVE") {
  const live = path.join(__dirname, "../../../../router/src/live");
  const [, parts] = fs.readFileSync(path.join(live, "page.rs"), "utf8").split(`const ${constant}: Parts`);
  const [declared] = parts.split("};");
  const [markup, ...others] = [...declared.matchAll(/include_str!\("([^"]+)"\)/g)].map(([, name]) => name);
  const joined = (ending) => others.filter((name) => name.endsWith(ending)).map((name) => fs.readFileSync(path.join(live, name), "utf8")).join("");
  const script = `"use strict";\n(() => {\n${joined(".js")}})();\n`;
  const html = fs.readFileSync(path.join(live, markup), "utf8").replace("/*STYLE*/", () => joined(".css")).replace("/*SCRIPT*/", () => script);
  const hash = crypto.createHash("sha256").update(script).digest("base64");
  const policy = [
    "default-src 'none'", "style-src 'unsafe-inline'", `script-src 'sha256-${hash}'`, "connect-src 'self'", "img-src data:",
    "base-uri 'none'", "form-action 'none'", "frame-ancestors 'none'",
  ].join("; ");
  return { html, policy };
}

module.exports = { assembledPage };
