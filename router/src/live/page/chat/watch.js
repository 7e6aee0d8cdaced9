// The live view of the own request. This page watches while it is used, as each viewer takes one of the router's places.

const RATE = 8;
const WATCH_MS = 60000;
const LIFE_DELAY_MS = 250;
const LIFE_TRIES = 8;

// `lanes` and `view` are what the shared parts of the live view ask for.
const view = { paused: false, canKill: false };
const lanes = { pointer: null };
const watch = { until: 0, turn: null, request: null, worker: null, refused: false };

// Extends the watch, and begins it where there is none.
function keepWatching() {
  watch.until = performance.now() + WATCH_MS;
  if (link.controller || link.state === "waiting" || link.state === "key" || watch.refused || document.hidden) return;
  connect();
}

function endWatchIfIdle() {
  if (stream.controller) watch.until = performance.now() + WATCH_MS;
  if (!link.state || (performance.now() < watch.until && !document.hidden) || stream.controller) return;
  clearTimeout(link.timer);
  link.controller?.abort();
  link.controller = null;
  if (link.state !== "key") setConnection("", "");
}

function writeTitle() {
  byId("connection").hidden = !link.state;
  const title = stream.controller ? "… Chat – Inflight" : "Chat – Inflight";
  if (document.title !== title) document.title = title;
}

// 403: the key may converse, and not look at the cluster.
function refuse(reason, status) {
  link.controller = null;
  watch.refused = status === 403;
  setConnection("key", status === 401 ? "An API key is needed" : "No lanes: the key is not an administrator’s");
  setAttribute(byId("connection"), "title", reason);
}

const parseUpdate = JSON.parse;

function takeUpdate(update) {
  const cluster = update.cluster ?? {};
  view.canKill = cluster.canKillWorkers === true;
  const { turn } = watch;
  if (!turn) return;
  const { answer } = turn;
  const isOwn = ({ number, requestId }) => (answer.number ? number === answer.number : requestId === answer.id);
  const found = (update.requests ?? []).find(isOwn);
  if (found) takeOwn(turn, found);
  const { request } = watch;
  watch.worker = request?.worker ? (update.workers ?? []).find(({ name }) => name === request.worker) ?? null : null;
  if (!request || request.state === "ended" || !stream.controller) return;
  stayAtEnd(() => (watch.worker ? writeLane(turn.trace, request, watch.worker) : writeWaiting(turn.trace, request)));
}

// Takes the view of the own request. Its life is read when it has moved, and at its end.
function takeOwn(turn, request) {
  const { answer } = turn;
  const before = watch.request;
  watch.request = { ...before, ...request };
  if (!answer.number) {
    answer.number = request.number;
    writeTurn(turn);
    // A short answer has ended before the first update that has it.
    if (answer.state !== "streaming") endOfLife(turn);
  }
  if ((request.attempts ?? 0) > 1 && (before?.attempts !== request.attempts || before?.worker !== request.worker || answer.moves.some(({ afterMs }) => afterMs < 0))) readLife(turn, false);
}

// Reads the events of a life. Its worker's come a little later than its end.
async function readLife(turn, atEnd) {
  const { answer } = turn;
  if (!answer.number || turn.reading) return;
  turn.reading = true;
  try {
    for (let tries = 0; tries < (atEnd ? LIFE_TRIES : 1); tries++) {
      if (atEnd) await new Promise((resolve) => setTimeout(resolve, LIFE_DELAY_MS));
      const response = await fetch(`/ui/requests/${answer.number}`, { headers: authorization(), cache: "no-store" });
      if (!response.ok) return;
      const { request = {}, events = [] } = await response.json();
      takeMoves(turn, movesOf(events));
      if (!atEnd || request.state !== "ended") continue;
      answer.endMs = request.ageMs ?? 0;
      answer.phases = fewPhases(phasesOf(events, answer.endMs, request.choices));
      stayAtEnd(() => {
        turn.trace.life.open = turn === shown[shown.length - 1];
        writeTrace(turn.trace, answer);
      });
      keepConversation();
      return;
    }
  } catch {
    // The router is gone: the answer is there without its life.
  } finally {
    turn.reading = false;
    if (turn.lifeWanted && !atEnd) endOfLife(turn);
  }
}

function endOfLife(turn) {
  turn.lifeWanted = turn.reading === true;
  if (!turn.lifeWanted) readLife(turn, true);
}

function takeMoves(turn, moves) {
  const { answer } = turn;
  const known = answer.moves.length;
  answer.moves = moves;
  writeTrace(turn.trace, answer);
  if (moves.length > known) announce(moveText(moves[moves.length - 1]));
}
