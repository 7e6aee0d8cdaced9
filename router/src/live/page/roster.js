// Requests by number: the open ones, and those that ended last. Bounded however long the page is open.

const ENDED_MAX = 1000;
const REQUESTS_MAX = 20000;
const MOVES_MAX = 4096;

const roster = {
  views: new Map(),
  // Numbers of ended requests, oldest first, from `endedFrom`.
  ended: [],
  endedFrom: 0,
  // Numbers of requests that were seen to move to another worker, with that worker.
  moves: new Map(),
  version: 0,
  clockSkew: 0,
};

function resetRoster() {
  roster.views.clear();
  roster.ended = [];
  roster.endedFrom = 0;
  roster.moves.clear();
  roster.version += 1;
}

function setClock(unixMs) {
  if (unixMs) roster.clockSkew = Date.now() - unixMs;
}

function routerNow() {
  return Date.now() - roster.clockSkew;
}

function forget(number) {
  roster.views.delete(number);
  roster.moves.delete(number);
}

// Of a request that ended long ago, the router tells no more than that.
function endedView(given, before, unixMs) {
  return before && { ...before, ...given, ageMs: before.state === "ended" ? before.ageMs : unixMs - before.arrived, waitingReason: "", haystack: undefined };
}

// Takes views of one update. Returns the numbers of requests that moved to another worker.
function takeRequests(views, unixMs) {
  const moved = [];
  for (const given of views) {
    const number = given.number;
    if (!number) continue;
    const before = roster.views.get(number);
    const view = given.requestId === undefined && given.state === "ended" ? endedView(given, before, unixMs) : given;
    if (!view) continue;
    // Ages of open requests go on without an update.
    view.arrived = unixMs - (view.ageMs ?? 0);
    view.lastWorker = view.worker || before?.lastWorker || "";
    if (before?.lastWorker && view.worker && before.lastWorker !== view.worker) {
      moved.push(number);
      if (roster.moves.size >= MOVES_MAX) roster.moves.delete(roster.moves.keys().next().value);
      roster.moves.set(number, view.worker);
    }
    if (view.state === "ended" && before?.state !== "ended") roster.ended.push(number);
    roster.views.set(number, view);
  }
  while (roster.ended.length - roster.endedFrom > ENDED_MAX) forget(roster.ended[roster.endedFrom++]);
  if (roster.endedFrom > ENDED_MAX) {
    roster.ended = roster.ended.slice(roster.endedFrom);
    roster.endedFrom = 0;
  }
  // The router bounds what it sends; should it ever send more, the oldest go.
  for (const number of roster.views.keys()) {
    if (roster.views.size <= REQUESTS_MAX) break;
    forget(number);
  }
  if (views.length) roster.version += 1;
  return moved;
}

function ageOf(view) {
  return view.state === "ended" ? (view.ageMs ?? 0) : routerNow() - view.arrived;
}

// Text that the filter looks into; made once for each view.
function haystack(view) {
  view.haystack ??= [view.number, view.requestId, view.tenant, view.model, view.worker, view.state, view.outcome, view.waitingReason]
    .map((part) => String(part ?? "").slice(0, 200).toLowerCase())
    .join("\n");
  return view.haystack;
}
