// One worker's lane: columns of iterations, its KV map and a summary in words.

const COLUMNS_MAX = 1024;
const COLUMNS_MAX_CROWDED = 384;
const PARKED_ROWS_MAX = 8;
const KV_HEIGHT_MAX = 160;
const KV_HEIGHT_MIN = 112;
// Lines of text below the map.
const KV_TEXT_HEIGHT = 56;

function createLane(name) {
  const lane = {
    name, worker: { name }, node: element("article", "lane"), columns: [], base: 0, end: 0, shown: 0, dropped: 0,
    slotRows: 0, parkedRows: 0, rows: createRows(), raster: createRaster(), width: 0, stale: true, dirty: true, cursor: null, hover: null,
    before: new Map(), fresh: new Set(), here: new Set(), visible: true, goneAt: 0, chartMax: 0, gap: CHART_GAP, last: 0,
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
  lane.facts = element("span", "facts-line");
  lane.menu = element("button", "more", "⋯");
  lane.menu.type = "button";
  setAttribute(lane.menu, "aria-label", `Actions for ${printable(lane.name)}`);
  const actions = element("div", "menu-place");
  actions.append(lane.menu);
  bindMenu(lane.menu, () => laneActions(lane));
  head.append(lane.title, lane.pill, lane.model, lane.facts, actions);
  lane.summary = element("p", "lane-summary");
  lane.summary.id = `${lane.title.id}-summary`;
  const kv = element("figure", "kv");
  lane.kvCanvas = element("canvas");
  setAttribute(lane.kvCanvas, "role", "img");
  fitCanvas(lane.kvCanvas, MAP_COLUMNS * 8, KV_HEIGHT_MIN);
  lane.kvText = element("figcaption");
  kv.append(lane.kvCanvas, lane.kvText);
  const body = element("div", "lane-body");
  body.append(buildPlot(lane), kv);
  setAttribute(node, "aria-labelledby", lane.title.id);
  node.append(head, lane.summary, body);
}

// The slots and the chart, with their axes at the left.
function buildPlot(lane) {
  lane.view = element("div", "lane-view");
  lane.view.tabIndex = 0;
  setAttribute(lane.view, "role", "application");
  setAttribute(lane.view, "aria-roledescription", "lane");
  setAttribute(lane.view, "aria-label", `${printable(lane.name)}: arrow keys move over iterations and slots, Enter opens the request`);
  setAttribute(lane.view, "aria-describedby", lane.summary.id);
  lane.canvas = element("canvas");
  setAttribute(lane.canvas, "aria-hidden", "true");
  lane.view.append(lane.canvas);
  lane.fold = element("button", "fold");
  lane.fold.type = "button";
  lane.fold.hidden = true;
  lane.foldText = element("span");
  lane.fold.append(lane.foldText);
  lane.fold.addEventListener("click", () => unfold(lane));
  const main = element("div", "lane-main");
  main.append(lane.view, lane.fold);
  const plot = element("div", "lane-plot");
  plot.append(buildAxes(lane), main);
  return plot;
}

function unfold(lane) {
  lane.rows.opened = !lane.rows.opened;
  lane.cursor = null;
  lane.stale = true;
  writeSoon();
}

function laneActions(lane) {
  const { worker } = lane;
  const actions = [{ text: "Show its requests", act: () => showRequestsOf(lane.name) }];
  if (lane.slotRows > ROWS_WHOLE) actions.push({ text: lane.rows.opened ? "Fold free slots" : `Show all ${count(lane.slotRows)} slots`, act: () => unfold(lane) });
  actions.push({ text: "Details", act: () => showWorker(lane) });
  if (view.canKill && worker.upNumber && !lane.goneAt) {
    actions.push({ text: `Kill process ${worker.upNumber}…`, act: () => askToKill(lane.name, worker), disabled: worker.state === "disconnected" });
  }
  return actions;
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
  const slotRows = Math.max(1, Math.min(SLOTS_MAX, worker.limits?.maxSequences ?? 1));
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
    const column = iterationColumn(iteration, held, parked, lane.slotRows, lane.parkedRows, lane.fresh);
    assignRows(lane.rows, column, lane.slotRows, now);
    pushColumn(lane, column);
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

// What is known of a worker besides its load, in a line; the rest is in its details.
function factsOf(worker) {
  const { contextTokens, kvTokens } = worker.limits ?? {};
  const parts = worker.facts?.device ? [printable(worker.facts.device)] : [];
  if (contextTokens) parts.push(`context ${count(contextTokens)}`);
  if (kvTokens) parts.push(`KV for ${count(kvTokens)} tokens`);
  return parts.join(" · ");
}

// Writes what is text; the pixels follow in `drawLane`.
function writeLane(lane) {
  const { worker } = lane;
  const state = lane.goneAt ? "gone" : worker.state;
  setPill(lane.pill, printable(state));
  setAttribute(lane.node, "data-state", lane.goneAt ? "gone" : null);
  setText(lane.model, [worker.model, worker.upNumber ? `process ${worker.upNumber}` : worker.address].filter(Boolean).map(printable).join(" · "));
  setText(lane.facts, factsOf(worker));
  setAttribute(lane.facts, "title", detailsOf(worker).map((row) => row.join(": ")).join("\n"));
  setText(lane.summary, lane.goneAt ? "It left the cluster." : summarise(lane));
  writeFold(lane);
  const parts = kvParts(worker);
  lane.kv = parts;
  setAttribute(lane.kvCanvas, "aria-label", describeKv(parts));
  const used = parts.total ? `${percent(parts.used / parts.total)} used, ${percent(parts.cached / parts.total)} cached` : "unknown";
  setText(lane.kvText, `KV ${used}\n${count(parts.total)} blocks`);
}

function writeFold(lane) {
  lane.fold.hidden = lane.slotRows <= ROWS_WHOLE || (showsAllSlots(lane) && !lane.rows.opened);
  setText(lane.foldText, foldedText(lane));
  setAttribute(lane.fold, "aria-expanded", lane.rows.opened);
  setAttribute(lane.fold, "aria-label", `${printable(lane.name)}: ${foldedText(lane)}`);
}

function layLane(lane) {
  const width = lane.view.clientWidth;
  const scale = Math.min(3, Math.max(1, window.devicePixelRatio || 1));
  const geometry = laneGeometry(Math.max(20, width * scale), scale, settings.zoom, {
    rows: shownRows(lane), slots: lane.slotRows, opened: lane.rows.opened, parkedRows: lane.parkedRows,
  });
  writeFold(lane);
  lane.gap = lane.fold.hidden ? CHART_GAP : FOLD_HEIGHT;
  const height = geometry.height / scale + lane.gap + CHART_HEIGHT;
  fitCanvas(lane.canvas, width, height);
  setStyle(lane.view, "height", `${height}px`);
  setStyle(lane.fold, "top", `${geometry.height / scale}px`);
  resetRaster(lane.raster, geometry);
  lane.width = width;
  lane.left = lane.canvas.width - geometry.columns * geometry.column;
  lane.height = height;
  lane.stale = false;
  lane.dirty = true;
  layAxes(lane);
}

function kvHeight(lane) {
  return Math.max(KV_HEIGHT_MIN, Math.min(KV_HEIGHT_MAX, (lane.height ?? 0) - KV_TEXT_HEIGHT));
}

function viewEnd(lane) {
  return Math.floor(lane.shown);
}

function drawLane(lane) {
  const end = viewEnd(lane);
  if (fitRows(lane, end - (lane.raster.geometry?.columns ?? 0), end, performance.now()) || lane.stale) layLane(lane);
  const { raster, canvas } = lane;
  const { geometry } = raster;
  const context = canvas.getContext("2d");
  updateRaster(raster, lane.columns, lane.base, end - geometry.columns, end);
  context.setTransform(1, 0, 0, 1, 0, 0);
  context.clearRect(0, 0, canvas.width, canvas.height);
  blitRaster(raster, context, lane.left);
  drawHighlights(lane, context);
  drawChart(lane, context);
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
    const column = lane.columns[index - lane.base];
    const { requests } = column;
    for (let at = 0; at < requests.length; at++) {
      if (!requests[at] || !wanted.includes(requests[at])) continue;
      const row = rowOf(geometry, column, at);
      if (row >= 0) found.push([index - drawnFrom, row, requests[at], column, at]);
    }
  }
  if (view.selected) {
    context.globalAlpha = 0.62;
    context.fillStyle = colours.surface;
    context.fillRect(lane.left, 0, geometry.columns * geometry.column, geometry.height);
    context.globalAlpha = 1;
    for (const [column, row, number, packed, at] of found) {
      context.fillStyle = (packed.kinds[at] & 15) >= PREEMPTED ? colours.parked : toneColour(settings.tone === "tenant" ? packed.tenantTones[at] : requestTone(number));
      context.globalAlpha = (packed.kinds[at] & 15) === PREFILL || (packed.kinds[at] & 15) === HELD ? 0.55 : 1;
      context.fillRect(lane.left + column * geometry.column, rowTop(geometry, row), geometry.column, Math.max(rowHeight(geometry, row) - 1, 1));
    }
    context.globalAlpha = 1;
  }
  context.fillStyle = colours.ink;
  const edge = Math.max(1, Math.round(geometry.scale * 1.5));
  for (const [column, row] of found) {
    const x = lane.left + column * geometry.column;
    const [top, high] = [rowTop(geometry, row), rowHeight(geometry, row)];
    context.fillRect(x, Math.max(0, top - edge), geometry.column, edge);
    context.fillRect(x, top + high - (high > 2 ? edge : 0), geometry.column, edge);
  }
}

function drawCursor(lane, context) {
  if (!lane.cursor || document.activeElement !== lane.view) return;
  const { geometry, drawnFrom } = lane.raster;
  const { index, row } = lane.cursor;
  const y = rowTop(geometry, row);
  const x = lane.left + (index - drawnFrom) * geometry.column;
  const edge = Math.max(1, Math.round(geometry.scale));
  context.strokeStyle = inks().ink;
  context.lineWidth = edge * 2;
  context.strokeRect(x - edge, y - edge, geometry.column + 2 * edge, rowHeight(geometry, row) + 2 * edge);
  context.globalAlpha = 0.35;
  context.fillStyle = inks().ink;
  context.fillRect(x + (geometry.column >> 1), 0, edge, lane.canvas.height);
  context.globalAlpha = 1;
}
