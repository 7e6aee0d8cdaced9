// One worker's lane: columns of iterations, the chart of its steps, its KV map and a summary in words.

const COLUMNS_MAX = 1024;
const COLUMNS_MAX_CROWDED = 384;
const PARKED_ROWS_MAX = 8;
const CHART_HEIGHT = 46;
const CHART_GAP = 7;
const GUTTER = 38;

function createLane(name) {
  const lane = {
    name, worker: { name }, node: element("article", "lane"), columns: [], base: 0, end: 0, shown: 0, dropped: 0,
    slotRows: 0, parkedRows: 0, raster: createRaster(), width: 0, stale: true, dirty: true, cursor: null, hover: null,
    before: new Map(), fresh: new Set(), here: new Set(), visible: true, goneAt: 0, chartMax: 1000, last: 0,
  };
  buildLane(lane);
  return lane;
}

function buildLane(lane) {
  const { node } = lane;
  const head = element("div", "lane-head");
  lane.title = element("h3", "", printable(lane.name));
  lane.title.id = `lane-${++laneNumbers}`;
  lane.pill = element("span", "pill");
  lane.model = element("span", "model");
  lane.kill = element("button", "", "Kill");
  lane.kill.type = "button";
  lane.kill.hidden = true;
  lane.kill.addEventListener("click", () => askToKill(lane));
  head.append(lane.title, lane.pill, lane.model, lane.kill);
  lane.summary = element("p", "lane-summary");
  lane.summary.id = `${lane.title.id}-summary`;
  lane.view = element("div", "lane-view");
  lane.view.tabIndex = 0;
  setAttribute(lane.view, "role", "application");
  setAttribute(lane.view, "aria-roledescription", "lane");
  setAttribute(lane.view, "aria-label", `${printable(lane.name)}: arrow keys move over iterations and slots, Enter opens the request`);
  setAttribute(lane.view, "aria-describedby", lane.summary.id);
  lane.canvas = element("canvas");
  setAttribute(lane.canvas, "aria-hidden", "true");
  lane.view.append(lane.canvas);
  const kv = element("figure", "kv");
  lane.kvCanvas = element("canvas");
  setAttribute(lane.kvCanvas, "role", "img");
  lane.kvText = element("figcaption");
  kv.append(lane.kvCanvas, lane.kvText);
  const body = element("div", "lane-body");
  body.append(lane.view, kv);
  setAttribute(node, "aria-labelledby", lane.title.id);
  node.append(head, lane.summary, body);
}

let laneNumbers = 0;

function columnsMax() {
  return lanes.all.size > 16 ? COLUMNS_MAX_CROWDED : COLUMNS_MAX;
}

function pushColumn(lane, column) {
  if (lane.columns.length >= columnsMax()) {
    // A viewer who paused looks at these columns: newer ones are left out until then.
    if (view.paused) {
      lane.dropped += 1;
      return;
    }
    const excess = lane.columns.length - columnsMax() + 1;
    const spare = excess + 64;
    lane.columns.splice(0, spare);
    lane.base += spare;
  }
  lane.columns.push(column);
  lane.end += 1;
}

// Takes a worker of an update: its state, slots and iterations.
function takeWorker(lane, worker, failedOver) {
  const stateBefore = lane.worker.state;
  // Default values are left out.
  worker.state ??= "disconnected";
  lane.worker = worker;
  lane.goneAt = 0;
  const slotRows = Math.max(1, Math.min(4096, worker.limits?.maxSequences ?? 1));
  const slots = worker.slots ?? [];
  const parked = slots.filter((cell) => cell.state === "preempted" || cell.state === "swapped" || cell.slot === undefined && cell.state !== "prefill" && cell.state !== "decode");
  const parkedRows = Math.max(lane.parkedRows, Math.min(PARKED_ROWS_MAX, parked.length));
  if (slotRows !== lane.slotRows || parkedRows !== lane.parkedRows) {
    lane.slotRows = slotRows;
    lane.parkedRows = parkedRows;
    lane.stale = true;
  }
  noteArrivals(lane, worker, failedOver);
  takeIterations(lane, worker, slots, parked);
  if (stateBefore && stateBefore !== worker.state) {
    announce(`${printable(lane.name)} is ${printable(worker.state)}`);
    if (worker.state === "disconnected") pushColumn(lane, emptyColumn("break", 0));
  }
  lane.dirty = true;
}

// Requests that moved here are marked in their first cell.
function noteArrivals(lane, worker, failedOver) {
  for (const number of failedOver) if (roster.moves.get(number) === lane.name) lane.fresh.add(number);
  if (lane.fresh.size > 1000) lane.fresh.clear();
}

function takeIterations(lane, worker, slots, parked) {
  const iterations = worker.iterations ?? [];
  if (lane.dropped && !view.paused) {
    pushColumn(lane, emptyColumn("gap", lane.dropped));
    lane.dropped = 0;
  }
  if (iterations.length && lane.last && iterations[0].number < lane.last) pushColumn(lane, emptyColumn("break", 0));
  if (worker.skippedIterations && lane.columns.length) pushColumn(lane, emptyColumn("gap", worker.skippedIterations));
  const now = new Map();
  for (const cell of slots) if (cell.slot !== undefined) now.set(cell.slot, cell);
  const newest = columnsMax();
  for (const iteration of iterations.slice(-newest)) {
    const computed = new Set();
    for (const cell of iteration.work ?? []) computed.add(cell.slot ?? 0);
    const held = [];
    for (const [slot, cell] of lane.before) {
      if (!computed.has(slot) && now.get(slot)?.request === cell.request && slot < lane.slotRows) held.push(cell);
    }
    pushColumn(lane, iterationColumn(iteration, held, parked, lane.slotRows, lane.parkedRows, lane.fresh));
    lane.last = iteration.number ?? 0;
  }
  const latest = lane.columns[lane.columns.length - 1];
  // Without this the last step would look as if it went on.
  if (!iterations.length && !slots.length && latest?.type === "iteration" && latest.slots.length) pushColumn(lane, emptyColumn("idle", 0));
  lane.before = now;
}

function summarise(lane) {
  const { worker } = lane;
  const slots = worker.slots ?? [];
  const inState = (state) => slots.reduce((sum, cell) => sum + (cell.state === state ? 1 : 0), 0);
  const [prefill, decode, preempted, swapped] = ["prefill", "decode", "preempted", "swapped"].map(inState);
  const latest = lane.columns[lane.columns.length - 1];
  const used = slots.length ? prefill + decode : (worker.load?.runningSequences ?? 0);
  const parts = [`${count(used)} of ${plural(worker.limits?.maxSequences ?? 0, "slot")} in use${used ? ` (${decode} decode, ${prefill} prefill)` : ""}`];
  if (worker.load?.waitingSequences) parts.push(`${count(worker.load.waitingSequences)} waiting`);
  if (preempted) parts.push(`${preempted} preempted`);
  if (swapped || worker.load?.swappedSequences) parts.push(`${count(Math.max(swapped, worker.load?.swappedSequences ?? 0))} swapped`);
  parts.push(`${plural(worker.requests ?? 0, "request")} of this router`);
  const step = latest?.duration ?? 0;
  if (step) parts.push(`step ${microseconds(step)}${worker.stepTargetUs ? `, target ${microseconds(worker.stepTargetUs)}` : ""}`);
  return parts.join(" · ");
}

// Writes what is text; the pixels follow in `drawLane`.
function writeLane(lane) {
  const { worker } = lane;
  const state = lane.goneAt ? "gone" : worker.state;
  setPill(lane.pill, printable(state));
  setAttribute(lane.node, "data-state", lane.goneAt ? "gone" : null);
  setText(lane.model, [worker.model, worker.upNumber ? `process ${worker.upNumber}` : worker.address].filter(Boolean).map(printable).join(" · "));
  lane.kill.hidden = !(view.canKill && worker.upNumber && !lane.goneAt);
  lane.kill.disabled = worker.state === "disconnected";
  setAttribute(lane.kill, "aria-label", `Kill ${printable(lane.name)}`);
  setText(lane.summary, lane.goneAt ? "It left the cluster." : summarise(lane));
  const parts = kvParts(worker);
  lane.kv = parts;
  setAttribute(lane.kvCanvas, "aria-label", describeKv(parts));
  const used = parts.total ? `${percent(parts.used / parts.total)} used, ${percent(parts.cached / parts.total)} cached` : "unknown";
  setText(lane.kvText, `KV ${used}\n${count(parts.total)} blocks`);
}

function layLane(lane) {
  const width = lane.view.clientWidth;
  const scale = Math.min(3, Math.max(1, window.devicePixelRatio || 1));
  const gutter = Math.round(GUTTER * scale);
  const geometry = laneGeometry(Math.max(20, width * scale - gutter), scale, settings.zoom, lane.slotRows, lane.parkedRows);
  const height = geometry.height / scale + CHART_GAP + CHART_HEIGHT;
  fitCanvas(lane.canvas, width, height);
  resetRaster(lane.raster, geometry);
  lane.width = width;
  lane.left = lane.canvas.width - geometry.columns * geometry.column;
  lane.height = height;
  lane.stale = false;
  lane.dirty = true;
}

function viewEnd(lane) {
  return Math.floor(lane.shown);
}

function drawLane(lane) {
  if (lane.stale) layLane(lane);
  const { raster, canvas } = lane;
  const { geometry } = raster;
  const context = canvas.getContext("2d");
  const to = viewEnd(lane);
  updateRaster(raster, lane.columns, lane.base, to - geometry.columns, to);
  context.setTransform(1, 0, 0, 1, 0, 0);
  context.clearRect(0, 0, canvas.width, canvas.height);
  blitRaster(raster, context, lane.left);
  drawHighlights(lane, context);
  drawChart(lane, context);
  drawGutter(lane, context);
  drawCursor(lane, context);
  lane.dirty = false;
}

// Cells of the chosen request, of the playground's, and of the one under the pointer.
function drawHighlights(lane, context) {
  const wanted = [view.selected, view.own, view.hovered].filter(Boolean);
  if (!wanted.length) return;
  const { geometry, drawnFrom, drawnTo } = lane.raster;
  const colours = inks();
  const found = [];
  for (let index = Math.max(drawnFrom, lane.base); index < drawnTo; index++) {
    const { requests, slots } = lane.columns[index - lane.base];
    for (let at = 0; at < requests.length; at++) {
      if (requests[at] && wanted.includes(requests[at])) found.push([index - drawnFrom, slots[at], requests[at], lane.columns[index - lane.base], at]);
    }
  }
  const rowTop = (slot) => slot < geometry.slotRows ? slot * geometry.row : geometry.parkedTop + (slot - geometry.slotRows) * geometry.parkedRow;
  const rowHeight = (slot) => slot < geometry.slotRows ? geometry.row : geometry.parkedRow;
  if (view.selected) {
    context.globalAlpha = 0.62;
    context.fillStyle = colours.surface;
    context.fillRect(lane.left, 0, geometry.columns * geometry.column, geometry.height);
    context.globalAlpha = 1;
    for (const [column, slot, number, packed, at] of found) {
      context.fillStyle = (packed.kinds[at] & 15) >= PREEMPTED ? colours.parked : toneColour(settings.tone === "tenant" ? packed.tenantTones[at] : requestTone(number));
      context.globalAlpha = (packed.kinds[at] & 15) === PREFILL || (packed.kinds[at] & 15) === HELD ? 0.55 : 1;
      context.fillRect(lane.left + column * geometry.column, rowTop(slot), geometry.column, Math.max(rowHeight(slot) - 1, 1));
    }
    context.globalAlpha = 1;
  }
  context.fillStyle = colours.ink;
  const edge = Math.max(1, Math.round(geometry.scale * 1.5));
  for (const [column, slot] of found) {
    const x = lane.left + column * geometry.column;
    context.fillRect(x, Math.max(0, rowTop(slot) - edge), geometry.column, edge);
    context.fillRect(x, rowTop(slot) + rowHeight(slot) - (rowHeight(slot) > 2 ? edge : 0), geometry.column, edge);
  }
}

// Durations as bars, in another colour where they pass the target; the target as a line.
function drawChart(lane, context) {
  const { geometry, drawnFrom, drawnTo } = lane.raster;
  const { scale } = geometry;
  const colours = inks();
  const top = geometry.height + Math.round(CHART_GAP * scale);
  const height = Math.round(CHART_HEIGHT * scale);
  const first = Math.max(drawnFrom, lane.base);
  let most = 1;
  for (let index = first; index < drawnTo; index++) {
    const column = lane.columns[index - lane.base];
    most = Math.max(most, column.duration, column.target);
  }
  // The scale follows at once upwards and in steps downwards, so that bars do not dance.
  if (most > lane.chartMax || most < lane.chartMax * 0.45) lane.chartMax = most * 1.15;
  const y = (value) => top + height - Math.round((Math.min(value, lane.chartMax) / lane.chartMax) * height);
  const width = geometry.column >= 4 ? geometry.column - 1 : geometry.column;
  context.fillStyle = colours.empty;
  context.fillRect(lane.left, top, geometry.columns * geometry.column, height);
  const bars = (colour, chosen) => {
    context.fillStyle = colour;
    for (let index = first; index < drawnTo; index++) {
      const column = lane.columns[index - lane.base];
      if (!column.duration || (column.target > 0 && column.duration > column.target) !== chosen) continue;
      const bar = y(column.duration);
      context.fillRect(lane.left + (index - drawnFrom) * geometry.column, bar, width, top + height - bar);
    }
  };
  bars(colours.bar, false);
  bars(colours.over, true);
  context.fillStyle = colours.accent;
  for (let index = first; index < drawnTo; index++) {
    const { target } = lane.columns[index - lane.base];
    if (target) context.fillRect(lane.left + (index - drawnFrom) * geometry.column, y(target), geometry.column, Math.max(1, Math.round(scale * 1.5)));
  }
}

function drawGutter(lane, context) {
  const { geometry } = lane.raster;
  const { scale } = geometry;
  const colours = inks();
  context.fillStyle = colours.muted;
  context.font = `${Math.round(10 * scale)}px system-ui, sans-serif`;
  context.textAlign = "right";
  context.textBaseline = "top";
  const right = lane.left - Math.round(6 * scale);
  context.fillText("0", right, 0);
  context.textBaseline = "bottom";
  if (lane.slotRows > 2) context.fillText(String(lane.slotRows - 1), right, geometry.slotRows * geometry.row);
  const top = geometry.height + Math.round(CHART_GAP * scale);
  context.textBaseline = "top";
  context.fillText(shortTime(lane.chartMax), right, top);
  context.textBaseline = "bottom";
  context.fillText("step", right, top + Math.round(CHART_HEIGHT * scale));
}

function shortTime(us) {
  if (us < 1000) return `${Math.round(us)} µs`;
  return us < 10000 ? `${(us / 1000).toFixed(1)} ms` : us < 1e6 ? `${Math.round(us / 1000)} ms` : `${(us / 1e6).toFixed(1)} s`;
}

function drawCursor(lane, context) {
  if (!lane.cursor || document.activeElement !== lane.view) return;
  const { geometry, drawnFrom } = lane.raster;
  const { index, row } = lane.cursor;
  const parked = row >= geometry.slotRows;
  const y = parked ? geometry.parkedTop + (row - geometry.slotRows) * geometry.parkedRow : row * geometry.row;
  const x = lane.left + (index - drawnFrom) * geometry.column;
  const edge = Math.max(1, Math.round(geometry.scale));
  context.strokeStyle = inks().ink;
  context.lineWidth = edge * 2;
  context.strokeRect(x - edge, y - edge, geometry.column + 2 * edge, (parked ? geometry.parkedRow : geometry.row) + 2 * edge);
  context.globalAlpha = 0.35;
  context.fillStyle = inks().ink;
  context.fillRect(x + (geometry.column >> 1), 0, edge, lane.canvas.height);
  context.globalAlpha = 1;
}
