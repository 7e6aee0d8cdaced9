// The stream of updates: events over `fetch`, so that a key can be sent; reconnects by itself.

const RATE = Math.min(10, Math.max(1, Number(new URLSearchParams(location.search).get("rate")) || 4));
const RETRY_FIRST_MS = 500;
const RETRY_MAX_MS = 15000;
// The router sends a comment every ten seconds.
const SILENCE_MAX_MS = 25000;
const EVENT_CHARACTERS_MAX = 64 * 1024 * 1024;
// Larger updates are parsed in parts, with room for the browser in between.
const WHOLE_CHARACTERS_MAX = 300000;
const PART_CHARACTERS = 100000;

const link = { key: "", state: "", attempt: 0, controller: null, timer: 0, retryAt: 0, lastByte: 0, updates: 0, skipped: 0, asked: false, lost: false };

function authorization() {
  return link.key ? { Authorization: `Bearer ${link.key}` } : {};
}

async function reasonOf(answer) {
  try {
    const body = await answer.json();
    return printable(body?.error?.message ?? body?.message ?? `status ${answer.status}`);
  } catch {
    return `status ${answer.status}`;
  }
}

function setConnection(state, text) {
  link.state = state;
  writeConnection(text);
}

function writeConnection(text) {
  writeTitle();
  const paused = view.paused && link.state === "open";
  setAttribute(byId("connection"), "data-state", paused ? "paused" : link.state);
  setText(byId("connection-text"), paused ? "Paused" : text);
  byId("connection-retry").hidden = link.state !== "waiting";
  byId("connection-key").hidden = link.state !== "key";
}

// Hands each event to `take`, which may be slow: meanwhile nothing is read, and the router skips updates.
async function readEvents(body, take, heard) {
  const reader = body.getReader();
  const decoder = new TextDecoder();
  let line = [];
  let lineLength = 0;
  let data = [];
  let name = "message";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    heard?.();
    const text = decoder.decode(value, { stream: true });
    let from = 0;
    for (let to = text.indexOf("\n"); to >= 0; to = text.indexOf("\n", from)) {
      line.push(text.slice(from, to));
      from = to + 1;
      const whole = line.join("").replace(/\r$/, "");
      line = [];
      lineLength = 0;
      if (whole.startsWith("data:")) data.push(whole.slice(whole[5] === " " ? 6 : 5));
      else if (whole.startsWith("event:")) name = whole.slice(6).trim();
      else if (whole === "") {
        if (data.length) await take(name, data.join("\n"));
        data = [];
        name = "message";
      }
    }
    if (from < text.length) {
      line.push(text.slice(from));
      lineLength += text.length - from;
      if (lineLength > EVENT_CHARACTERS_MAX) throw new Error("an event is too large");
    }
  }
}

// Where the list of requests ends. In JSON, a quote inside a string has a backslash before it: so neither the key nor `}],"x` can
// be part of a name that a client chose.
function requestsEnd(text, start) {
  const next = /\}\],"[A-Za-z]/g;
  next.lastIndex = start;
  const found = next.exec(text);
  if (found) return found.index + 1;
  return text.endsWith("}]}") ? text.length - 2 : -1;
}

async function parseUpdate(text) {
  const key = '"requests":[';
  const at = text.length > WHOLE_CHARACTERS_MAX ? text.indexOf(key) : -1;
  const start = at + key.length;
  const end = at < 0 ? -1 : requestsEnd(text, start);
  if (end < 0 || end - start < PART_CHARACTERS) return JSON.parse(text);
  const parts = [];
  const border = '},{"number":';
  for (let from = start; from < end;) {
    const cut = text.indexOf(border, from + PART_CHARACTERS);
    const to = cut < 0 || cut >= end ? end : cut + 1;
    parts.push(JSON.parse(`[${text.slice(from, to)}]`));
    from = to + 1;
    await breathe();
  }
  const update = JSON.parse(text.slice(0, start) + text.slice(end));
  update.parts = parts;
  return update;
}

async function takeUpdate(update, first) {
  const unixMs = update.unixMs ?? Date.now();
  if (first) {
    resetRoster();
    resetLanes();
    resetOverview();
    findings.diagnosis = null;
    byId("lanes-empty").textContent = "No worker yet.";
  }
  link.updates += 1;
  link.skipped += update.skippedUpdates ?? 0;
  setClock(unixMs);
  takeCluster(update.cluster ?? {});
  takeStart(update.cluster ?? {});
  takeDiagnosis(update.diagnosis);
  takeTenants(update.tenants ?? []);
  let moved = [];
  for (const views of [...(update.parts ?? []), update.requests ?? []]) {
    moved = moved.concat(takeRequests(views, unixMs));
    if (update.parts) await breathe();
  }
  takeWorkers(update.workers ?? [], moved, first);
  sayMoves(moved);
  findOwn();
  if (byId("model").dataset.models !== (update.cluster?.models ?? []).join("\n")) offerModels(update.cluster?.models ?? []);
}

function sayMoves(moved) {
  if (!moved.length) return;
  const byWorker = new Map();
  for (const number of moved) {
    const worker = roster.moves.get(number);
    byWorker.set(worker, (byWorker.get(worker) ?? 0) + 1);
  }
  announce(`${[...byWorker].slice(0, 4).map(([worker, number]) => `${plural(number, "request")} moved to ${printable(worker)}`).join(", ")}`);
}

async function connect() {
  clearTimeout(link.timer);
  link.controller?.abort();
  const controller = new AbortController();
  link.controller = controller;
  link.lastByte = performance.now();
  setConnection("opening", link.attempt ? "Reconnecting" : "Connecting");
  let reason = "";
  try {
    const headers = { Accept: "text/event-stream", ...authorization() };
    const answer = await fetch(`/ui/events?rate=${RATE}`, { headers, signal: controller.signal, cache: "no-store" });
    if (answer.status === 401 || answer.status === 403) {
      refuse(await reasonOf(answer), answer.status);
      return;
    }
    if (!answer.ok) throw new Error(await reasonOf(answer));
    let first = true;
    await readEvents(answer.body, async (name, data) => {
      if (name !== "update" || link.controller !== controller) return;
      const update = await parseUpdate(data);
      if (link.controller !== controller) return;
      await takeUpdate(update, first);
      if (first) opened();
      first = false;
    }, () => { link.lastByte = performance.now(); });
    reason = "The router ended the stream";
  } catch (error) {
    reason = controller.signal.aborted && link.controller === controller ? "The router was silent" : printable(error.message);
  }
  if (link.controller === controller) retryLater(reason);
}

function opened() {
  if (link.lost) announce("Connected again");
  link.attempt = 0;
  link.asked = false;
  link.lost = false;
  setConnection("open", "Live");
}

function refuse(reason, status) {
  setConnection("key", status === 401 ? "An API key is needed" : reason);
  byId("key-text").textContent = link.key ? `${reason}. The key stays in the memory of this page.` : byId("key-text").textContent;
  if (!link.asked || link.key) askForKey();
  link.asked = true;
}

function askForKey() {
  if (byId("key").open) return;
  byId("key").returnValue = "cancel";
  byId("key").showModal();
}

function retryLater(reason) {
  if (link.state === "open") announce(`Connection lost: ${reason}`);
  link.lost = true;
  const wait = Math.min(RETRY_MAX_MS, RETRY_FIRST_MS * 2 ** link.attempt) * (0.75 + Math.random() / 2);
  link.attempt += 1;
  link.retryAt = performance.now() + wait;
  link.timer = setTimeout(connect, wait);
  countDown(reason);
}

function countDown(reason) {
  const left = Math.ceil((link.retryAt - performance.now()) / 1000);
  setConnection("waiting", `${reason}; again in ${Math.max(0, left)} s`);
  if (left > 1) setTimeout(() => { if (link.state === "waiting") countDown(reason); }, 1000);
}

function watchSilence() {
  if (link.state === "open" && performance.now() - link.lastByte > SILENCE_MAX_MS) link.controller.abort();
}

let noticeTimer = 0;

// A message that matters to everyone, in sight for a while.
function showNotice(text) {
  announce(text);
  clearTimeout(noticeTimer);
  const notice = byId("notice");
  notice.textContent = text;
  notice.hidden = false;
  noticeTimer = setTimeout(() => { notice.hidden = true; }, 10000);
}
