// The side panel: one request, its phases and each change of its state.

const LIFE_EVERY_MS = 1000;
const life = { number: 0, opener: null, timer: 0, shown: "", controller: null };

const EVENT_TONES = {
  first_token: "good", ended: "good", admitted: "good", preempted: "warn", swapped: "warn", paused: "warn", lost: "bad", retry: "bad", quarantined: "bad",
};

function openLife(number, opener) {
  if (!number) return;
  const same = life.number === number;
  life.number = number;
  life.opener = opener ?? life.opener;
  if (!same) {
    life.shown = "";
    byId("life-body").replaceChildren(element("p", "muted", "Loading"));
    byId("life-title").textContent = `Request ${number}`;
  }
  byId("life").hidden = false;
  setAttribute(document.body, "data-life", "");
  byId("life-title").focus();
  select(number);
  refreshLife();
}

function select(number) {
  view.selected = number;
  for (const lane of lanes.all.values()) lane.dirty = true;
  schedule();
}

function closeLife() {
  if (byId("life").hidden) return;
  clearTimeout(life.timer);
  life.controller?.abort();
  life.number = 0;
  // Else the same link would do nothing.
  if (location.hash.startsWith("#request=")) window.history.replaceState(null, "", location.pathname + location.search);
  byId("life").hidden = true;
  setAttribute(document.body, "data-life", null);
  select(0);
  if (life.opener?.isConnected) life.opener.focus();
}

async function refreshLife() {
  clearTimeout(life.timer);
  life.controller?.abort();
  const { number } = life;
  const controller = new AbortController();
  life.controller = controller;
  let goesOn = true;
  if (!document.hidden && !(view.paused && life.shown)) {
    try {
      const answer = await fetch(`/ui/requests/${number}`, { headers: authorization(), signal: controller.signal, cache: "no-store" });
      if (life.number !== number) return;
      if (answer.ok) {
        const shown = await answer.json();
        if (life.number !== number) return;
        showLife(shown);
        goesOn = shown.request?.state !== "ended";
      } else {
        showLifeError(answer.status === 404 ? "The router no longer remembers this request: it keeps the last 1,000 that ended." : await reasonOf(answer));
        goesOn = answer.status !== 404;
      }
    } catch (error) {
      if (controller.signal.aborted) return;
      showLifeError(`The router does not answer: ${error.message}`);
    }
  }
  if (goesOn && life.number === number && !controller.signal.aborted) life.timer = setTimeout(refreshLife, LIFE_EVERY_MS);
}

function showLifeError(text) {
  // What was there stays: it is the last that is known.
  if (life.shown) return;
  byId("life-body").replaceChildren(element("p", "muted", text));
}

// Of an older router, times are whole milliseconds.
function inMilliseconds(us, ms = 0) {
  return us === undefined ? ms : us / 1000;
}

// The id of the trace, which a click selects; a link where the router knows a viewer of traces.
function writeTrace(node, id, url) {
  node.hidden = !id;
  if (!id || node.dataset.id === id) return;
  node.dataset.id = id;
  const link = element("a", "", "Open the trace");
  link.href = /^https?:\/\//.test(url) ? url : "";
  link.target = "_blank";
  link.rel = "noopener noreferrer";
  node.replaceChildren("Trace ", element("code", "", printable(id)), ...(link.getAttribute("href") ? [" ", link] : []));
}

function showLife({ request = {}, events: given = [], omittedEvents = 0, ageUs, traceId, traceUrl }) {
  const body = byId("life-body");
  const events = given.map((event) => ({ ...event, atMs: inMilliseconds(event.atUs, event.atMs) }));
  let facts = body.querySelector(".facts");
  if (!facts) {
    facts = element("dl", "facts");
    const phases = element("ol", "phases");
    setAttribute(phases, "aria-label", "Phases");
    const timeline = element("ol", "timeline");
    setAttribute(timeline, "aria-label", "Events");
    body.replaceChildren(element("h3", "", "Phases"), phases, element("p", "phases-sum"), element("h3", "", "Request"), facts, element("p", "trace"), element("h3", "", "Events"), timeline);
  }
  writeFacts(facts, request);
  writeTrace(body.querySelector(".trace"), traceId, traceUrl);
  const endMs = inMilliseconds(ageUs, request.ageMs);
  writePhases(body.querySelector(".phases"), phasesOf(events, endMs, request.choices), endMs);
  setText(body.querySelector(".phases-sum"), sumOf(request, endMs));
  const shown = JSON.stringify([events.length, omittedEvents, events[events.length - 1]]);
  if (shown === life.shown) return;
  life.shown = shown;
  const items = events.map((event) => {
    const item = element("li");
    const kind = printable(event.kind).replaceAll("_", " ");
    item.append(element("time", "", threeDigits(event.atMs ?? 0)), element("b", "", kind));
    if (event.worker) item.append(` ${printable(event.worker)}`);
    if (event.detail) item.append(element("p", "", printable(event.detail)));
    setAttribute(item, "data-tone", EVENT_TONES[event.kind] ?? null);
    return item;
  });
  if (omittedEvents) {
    const left = element("li", "muted", `${plural(omittedEvents, "event")} left out`);
    items.splice(Math.floor(items.length / 2), 0, left);
  }
  body.querySelector(".timeline").replaceChildren(...items);
}

function sumOf(request, endMs) {
  const parts = [`${request.state === "ended" ? "in all" : "so far"} ${threeDigits(endMs)}`];
  if (request.outputTokens) parts.push(plural(request.outputTokens, "token"));
  return parts.join(" · ");
}

function writeFacts(facts, request) {
  const prompt = request.promptTokens ?? 0;
  const most = (request.maxTokens ?? 0) * (request.choices ?? 1);
  const rows = [
    ["State", printable([request.state, request.outcome || request.waitingReason].filter(Boolean).join(": "))],
    ["Request id", printable(request.requestId)],
    ["Tenant", printable(request.tenant) || "anonymous"],
    ["Model", printable(request.model)],
    ["Worker", printable(request.worker) || "none"],
    ["Tries", (request.attempts ?? 0) > 1 ? `${count(request.attempts)}: it moved after a failure` : count(request.attempts)],
    ["Age", age(request.ageMs)],
    ["Prompt", `${plural(prompt, "token")}, ${count(request.cachedTokens)} cached${request.computedTokens ? `, ${count(request.computedTokens)} computed` : ""}`, prompt ? ((request.cachedTokens ?? 0) + (request.computedTokens ?? 0)) / prompt : 0],
    ["Output", `${count(request.outputTokens)} of at most ${plural(most, "token")}${(request.choices ?? 1) > 1 ? ` over ${request.choices} choices` : ""}`, most ? (request.outputTokens ?? 0) / most : 0],
    ["KV blocks", request.kvBlocks ? count(request.kvBlocks) : "–"],
    ["Priority", count(request.priority)],
  ];
  while (facts.children.length < rows.length * 2) {
    const meter = element("span", "meter");
    setAttribute(meter, "aria-hidden", "true");
    meter.append(element("i"));
    const value = element("dd");
    value.append(element("span"), meter);
    facts.append(element("dt"), value);
  }
  rows.forEach(([name, text, share], at) => {
    setText(facts.children[at * 2], name);
    const [written, meter] = facts.children[at * 2 + 1].children;
    setText(written, text);
    meter.hidden = share === undefined;
    if (share !== undefined) {
      setStyle(meter.firstChild, "width", `${Math.min(100, share * 100).toFixed(1)}%`);
      setStyle(meter.firstChild, "--tone", toneColour(toneOf(request.number, request.tenant ?? "")));
    }
  });
}
