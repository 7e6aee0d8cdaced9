// Unpacks the Chromium of the npm package @sparticuz/chromium, with the libraries it needs, and prints the path of a program that
// starts it. Needs no root. Arguments: folder to unpack into. NODE_PATH names the folder with the package.
const fs = require("node:fs");
const path = require("node:path");

async function main() {
  const folder = path.resolve(process.argv[2]);
  fs.mkdirSync(folder, { recursive: true });
  // The package unpacks into the temporary folder, its libraries only where it believes to be in this environment.
  process.env.TMPDIR = folder;
  process.env.AWS_LAMBDA_JS_RUNTIME = "nodejs22.x";
  const packaged = require("@sparticuz/chromium");
  const chromium = packaged.default ?? packaged;
  const program = await chromium.executablePath();
  const started = path.join(folder, "chromium-with-libraries");
  const script = `#!/bin/sh\nLD_LIBRARY_PATH="${folder}/al2023/lib\${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}" exec "${program}" "$@"\n`;
  fs.writeFileSync(started, script, { mode: 0o755 });
  console.log(started);
}

main().catch((error) => {
  console.error(error);
  process.exit(1);
});
