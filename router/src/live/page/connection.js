// The stream of updates: events over `fetch`, so that a key can be sent; reconnects by itself. What a page does with updates and
// refusals, how many a second it wants (`RATE`) and the title are its own: `parseUpdate`, `takeUpdate`, `refuse`, `writeTitle`.

const RETRY_FIRST_MS = 500;
const RETRY_MAX_MS = 15000;
// The router sends a comment every ten seconds.
const SILENCE_MAX_MS = 25000;
const EVENT_CHARACTERS_MAX = 64 * 1024 * 1024;

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

function askForKey() {
  if (byId("key").open) return;
  byId("key").returnValue = "cancel";
  byId("key").showModal();
}

// `then` is called with a new key in place.
function bindKey(then) {
  byId("connection-retry").addEventListener("click", connect);
  byId("connection-key").addEventListener("click", askForKey);
  byId("key-cancel").addEventListener("click", () => byId("key").close("cancel"));
  byId("key").addEventListener("close", () => {
    const key = byId("key-input").value.trim();
    byId("key-input").value = "";
    if (byId("key").returnValue !== "use" || !key) return;
    link.key = key;
    link.attempt = 0;
    then();
  });
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
