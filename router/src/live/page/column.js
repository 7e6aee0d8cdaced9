// A column of a lane: one iteration, packed, because a lane keeps a thousand of them with up to hundreds of cells each.

const DECODE = 1;
const PREFILL = 2;
const DRAFT = 3;
const HELD = 4;
const PREEMPTED = 5;
const SWAPPED = 6;
// Added to a kind: the first cell of a request after it moved here.
const MOVED = 16;
const KIND_NAMES = ["", "decode", "prefill", "decode with drafts", "not in this step", "preempted", "swapped"];

function packColumn(type, size) {
  return {
    // "iteration"; or "gap" of iterations that were left out, "idle", "break" of the worker's session.
    type,
    number: 0,
    duration: 0,
    predicted: 0,
    target: 0,
    preempted: 0,
    swapped: 0,
    // Rows that its cells need.
    rowsUsed: 0,
    slots: new Uint16Array(size),
    rows: new Uint16Array(size),
    requests: new Float64Array(size),
    kinds: new Uint8Array(size),
    tenantTones: new Uint8Array(size),
    tokens: new Uint16Array(size),
  };
}

function emptyColumn(type, number) {
  const column = packColumn(type, 0);
  column.number = number;
  return column;
}

function setCell(column, at, slot, request, kind, tenant, tokens) {
  column.slots[at] = slot;
  column.requests[at] = request;
  column.kinds[at] = kind;
  column.tenantTones[at] = tenantTone(tenant);
  column.tokens[at] = Math.min(65535, tokens);
}

function tenantOf(request, named) {
  return (request && roster.views.get(request)?.tenant) || named || "";
}

// Packs an iteration with the sequences that held a slot without being computed, and those that have none. `slotRows` is the
// number of slots; parked sequences lie in the rows after them. `fresh` has requests that are new in this lane after a move.
function iterationColumn(iteration, held, parked, slotRows, parkedRows, fresh) {
  const work = iteration.work ?? [];
  const shown = Math.min(parked.length, parkedRows);
  const column = packColumn("iteration", work.length + held.length + shown);
  column.number = iteration.number ?? 0;
  column.duration = iteration.durationUs ?? 0;
  column.predicted = iteration.predictedUs ?? 0;
  column.target = iteration.targetUs ?? 0;
  column.preempted = iteration.preempted ?? 0;
  column.swapped = iteration.swapped ?? 0;
  let at = 0;
  for (const cell of work) {
    const request = cell.request ?? 0;
    let kind = cell.prefillTokens ? PREFILL : cell.draftedTokens ? DRAFT : DECODE;
    if (fresh.size && fresh.delete(request)) kind |= MOVED;
    setCell(column, at++, cell.slot ?? 0, request, kind, tenantOf(request, cell.tenant), cell.prefillTokens || cell.generatedTokens || 0);
  }
  for (const cell of held) {
    setCell(column, at++, cell.slot ?? 0, cell.request ?? 0, HELD, cell.tenant ?? "", cell.tokens ?? 0);
  }
  for (let i = 0; i < shown; i++) {
    const cell = parked[i];
    const kind = cell.state === "swapped" ? SWAPPED : PREEMPTED;
    setCell(column, at++, slotRows + i, cell.request ?? 0, kind, cell.tenant ?? "", cell.tokens ?? 0);
  }
  return column;
}

function describeCell(column, at, slotRows) {
  if (column.type === "gap") return `${plural(column.number, "iteration")} left out here`;
  if (column.type === "idle") return "Idle";
  if (column.type === "break") return "The session with the worker ended here";
  const step = `Iteration ${count(column.number)}: ${microseconds(column.duration)}, predicted ${microseconds(column.predicted)}`
    + (column.target ? `, target ${microseconds(column.target)}` : "");
  const evicted = [
    column.preempted ? plural(column.preempted, "sequence preempted", "sequences preempted") : "",
    column.swapped ? plural(column.swapped, "sequence swapped out", "sequences swapped out") : "",
  ].filter(Boolean).join(", ");
  const lines = [evicted ? `${step}; before it ${evicted}` : step];
  if (at < 0) return lines[0];
  const [request, kind] = [column.requests[at], column.kinds[at] & 15];
  const view = roster.views.get(request);
  const who = request ? `Request ${request}` : "Request of another router";
  const tokens = kind <= DRAFT ? `, ${plural(column.tokens[at], kind === PREFILL ? "prompt token" : "token")}` : "";
  const where = column.slots[at] < slotRows ? `slot ${column.slots[at]}, ` : "";
  lines.unshift(`${who}${view?.tenant ? `, tenant ${printable(view.tenant)}` : ""}: ${where}${KIND_NAMES[kind]}${tokens}`);
  if (column.kinds[at] & MOVED) lines.push("Moved here from another worker");
  return lines.join("\n");
}
