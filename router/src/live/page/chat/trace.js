// What is shown below an answer: the lane of its request while it streams, its moves to other workers, its life after the end.

// Events of a life after which a stream goes on, the best first: its next token, else what comes before it.
const GOES_ON = ["resumed", "first_token", "chunk", "admitted", "dispatched"];
const MOVES_MAX = 8;

// Moves to another worker: which worker ended, which one went on, and after how many milliseconds the stream did.
function movesOf(events) {
  const moves = [];
  events.forEach((event, at) => {
    if (event.kind !== "lost" || moves.length >= MOVES_MAX) return;
    const end = events.findIndex((later, place) => place > at && later.kind === "lost");
    const attempt = events.slice(at + 1, end < 0 ? events.length : end);
    const dispatched = attempt.find(({ kind }) => kind === "dispatched");
    const kind = GOES_ON.find((name) => attempt.some((one) => one.kind === name));
    const next = attempt.find((one) => one.kind === kind);
    moves.push({
      from: event.worker ?? "", to: dispatched?.worker ?? "",
      // Without a token yet, it is not known.
      afterMs: next && (kind === "resumed" || kind === "first_token") ? (next.atMs ?? 0) - (event.atMs ?? 0) : -1,
    });
  });
  return moves;
}

function moveText({ from, to, afterMs }) {
  const ended = `${printable(from) || "Its worker"} ended`;
  if (!to) return `${ended}; the stream waits for another worker`;
  return afterMs < 0 ? `${ended}; the stream goes on at ${printable(to)}` : `${ended}; the stream went on with ${printable(to)} after ${threeDigits(afterMs)}`;
}

function createTrace() {
  const node = element("div", "trace");
  const moves = element("ul", "moves");
  const lane = element("div", "trace-lane");
  lane.hidden = true;
  const where = element("p", "where");
  lane.append(where);
  const life = element("details", "trace-life");
  life.hidden = true;
  const summary = element("summary");
  const phases = element("ol", "phases");
  setAttribute(phases, "aria-label", "Phases");
  life.append(summary, phases);
  node.append(lane, moves, life);
  return { node, moves, lane, where, life, summary, phases, strip: null };
}

// Writes what an answer keeps: moves and, after the end, phases.
function writeTrace(trace, answer) {
  while (trace.moves.children.length > answer.moves.length) trace.moves.lastChild.remove();
  answer.moves.forEach((move, at) => {
    if (!trace.moves.children[at]) trace.moves.append(element("li"));
    setText(trace.moves.children[at], moveText(move));
  });
  const ended = answer.phases.length > 0 && answer.state !== "streaming";
  trace.life.hidden = !ended;
  if (!ended) return;
  trace.lane.hidden = true;
  const parts = new Map();
  for (const { kind, from, to } of answer.phases) parts.set(kind, (parts.get(kind) ?? 0) + to - from);
  const sums = [...parts].filter(([kind]) => kind !== "more").map(([kind, ms]) => `${PHASE_NAMES[kind]} ${threeDigits(ms)}`);
  setText(trace.summary, `${threeDigits(answer.endMs)} at the router: ${sums.join(", ")}`);
  writePhases(trace.phases, answer.phases, answer.endMs);
}

// Shows the request in the lane of its worker.
function writeLane(trace, request, worker) {
  trace.lane.hidden = false;
  if (trace.strip?.worker !== worker.name) {
    trace.strip?.canvas.remove();
    trace.strip = createStrip(worker.name);
    trace.lane.append(trace.strip.canvas);
  }
  trace.strip.own = request.number;
  const slots = worker.slots ?? [];
  const own = slots.find((cell) => cell.request === request.number);
  const used = slots.filter(({ slot, state }) => slot !== undefined || state === "decode" || state === "prefill").length;
  const step = worker.iterations?.[worker.iterations.length - 1]?.durationUs;
  const parts = [printable(worker.name), own ? `slot ${own.slot ?? 0}` : "", printable(request.state), `${count(used)} of ${plural(worker.limits?.maxSequences ?? 0, "slot")} in use`, step ? `step ${microseconds(step)}` : ""];
  setText(trace.where, parts.filter(Boolean).join(" · "));
  setAttribute(trace.strip.canvas, "aria-label", `Slots of ${printable(worker.name)}`);
  takeStrip(trace.strip, worker);
}

// While no worker has it.
function writeWaiting(trace, request) {
  trace.lane.hidden = false;
  setText(trace.where, [printable(request.state), printable(request.waitingReason)].filter(Boolean).join(": "));
}
