// What to do where nothing runs: what a lane is, a command, a prompt, a load for a minute.

// After work, the cluster may rest for so long before this is shown again: lanes do not jump at every pause.
const REST_MS = 60000;
const start = { busyAt: -Infinity };

function takeStart(cluster) {
  if (cluster.openRequests) start.busyAt = performance.now();
}

function quoted(text) {
  return `'${text.replaceAll("'", "'\\''")}'`;
}

function startCommand() {
  const model = byId("model").value;
  const body = JSON.stringify({ ...(model && { model }), prompt: "Once upon a time", max_tokens: 64, stream: true });
  const key = link.key || byId("tenant-key").value ? ` \\\n  -H "Authorization: Bearer $INFLIGHT_API_KEY"` : "";
  return `curl -N ${location.origin}/v1/completions \\\n  -H 'Content-Type: application/json'${key} \\\n  -d ${quoted(body)}`;
}

function writeStart() {
  const now = performance.now();
  const running = load.controller !== null;
  const ended = load.doneAt > 0;
  const idle = link.state === "open" && lanes.all.size > 0 && !overview.cluster.openRequests && now - start.busyAt > REST_MS;
  setAttribute(byId("start"), "data-shown", running || ended || idle ? "" : null);
  byId("start-idle").hidden = running || ended;
  byId("start-loading").hidden = !(running || ended);
  if (running || ended) {
    const left = Math.max(0, (load.endsAt - now) / 1000);
    setText(byId("load-text"), `${running ? `Sending a load, ${Math.ceil(left)} s left` : "The load has ended"} · ${loadFigures()}`);
    setStyle(byId("load-bar"), "width", `${running ? 100 - (left * 100000) / LOAD_MS : 100}%`);
    byId("load-stop").hidden = !running;
    byId("load-again").hidden = byId("load-close").hidden = running;
  } else {
    setText(byId("start-command"), startCommand());
  }
}

function copyCommand() {
  copyText(byId("start-copy"), byId("start-command"), "The command");
}

function goToPrompt() {
  byId("playground-title").scrollIntoView({ block: "nearest" });
  byId("prompt").focus();
  byId("prompt").select();
}

function bindStart() {
  byId("start-copy").addEventListener("click", copyCommand);
  byId("start-prompt").addEventListener("click", goToPrompt);
  byId("start-load").addEventListener("click", startLoad);
  byId("load-again").addEventListener("click", startLoad);
  byId("load-stop").addEventListener("click", stopLoad);
  byId("load-close").addEventListener("click", () => {
    load.doneAt = 0;
    start.busyAt = performance.now();
    writeStart();
    focusLane(0);
  });
  lanes.writers.push(writeStart);
}
