// All lanes: which there are, when they are drawn, pointer and keys in them.

const FRAME_MS = 1000 / 62;
const FRAME_BUDGET_MS = 6;
// Drawing takes a third of the main thread at most, and there are four frames a second at least.
const FRAME_SHARE = 3;
const FRAME_MS_MAX = 250;
const WRITE_EVERY_MS = 250;
const GONE_MS = 30000;
const LANES_MAX = 256;

// What the viewer looks at.
const view = { paused: false, selected: 0, own: 0, hovered: 0, canKill: false };
const lanes = { all: new Map(), dark: false, frame: 0, lastFrame: 0, cost: 0, lastWrite: 0, unwritten: false, pace: 250, lastUpdate: 0, pointer: null, writers: [], parts: [] };
const reducedMotion = matchMedia("(prefers-reduced-motion: reduce)");

const resized = new ResizeObserver((entries) => {
  for (const { target } of entries) {
    const lane = laneOf(target);
    if (lane && Math.abs(target.clientWidth - lane.width) >= 1) lane.stale = true;
  }
  schedule();
});
const seen = new IntersectionObserver((entries) => {
  for (const { target, isIntersecting } of entries) {
    const lane = laneOf(target);
    if (lane) lane.visible = isIntersecting;
    if (lane && isIntersecting) lane.dirty = true;
  }
  schedule();
}, { rootMargin: "300px" });

function laneOf(node) {
  for (const lane of lanes.all.values()) if (lane.view === node) return lane;
  return null;
}

function addLane(name) {
  const lane = createLane(name);
  lanes.all.set(name, lane);
  const names = [...lanes.all.keys()].sort(byNumbersInNames);
  const next = names[names.indexOf(name) + 1];
  byId("lane-list").insertBefore(lane.node, next === undefined ? null : lanes.all.get(next).node);
  resized.observe(lane.view);
  seen.observe(lane.view);
  listenTo(lane);
  return lane;
}

const collator = new Intl.Collator("en", { numeric: true });

function byNumbersInNames(one, other) {
  return collator.compare(one, other) || (one < other ? -1 : one > other ? 1 : 0);
}

function removeLane(lane) {
  resized.unobserve(lane.view);
  seen.unobserve(lane.view);
  lane.node.remove();
  lanes.all.delete(lane.name);
}

function resetLanes() {
  for (const lane of [...lanes.all.values()]) removeLane(lane);
  hideTip();
}

// Takes the workers of an update. `moved` has the requests that moved in it, by the worker they moved to.
function takeWorkers(workers, movedTo, first) {
  const now = performance.now();
  if (lanes.lastUpdate) lanes.pace = Math.min(1000, Math.max(60, 0.7 * lanes.pace + 0.3 * (now - lanes.lastUpdate)));
  lanes.lastUpdate = now;
  const names = new Set();
  for (const worker of workers.slice(0, LANES_MAX)) {
    const name = worker.name ?? worker.address ?? "";
    names.add(name);
    let lane = lanes.all.get(name);
    if (!lane) {
      lane = addLane(name);
      if (!first) announce(`${printable(name)} joined`);
    }
    takeWorker(lane, worker, movedTo);
    lane.speed = (lane.end - lane.shown) / lanes.pace;
  }
  for (const lane of [...lanes.all.values()]) {
    if (names.has(lane.name)) continue;
    if (!lane.goneAt) {
      lane.goneAt = now;
      lane.before = new Map();
      pushColumn(lane, emptyColumn("break", 0));
      announce(`${printable(lane.name)} left`);
    } else if (now - lane.goneAt > GONE_MS) {
      removeLane(lane);
    }
  }
  byId("lanes-empty").hidden = lanes.all.size > 0;
  writeSoon();
}

function writeSoon() {
  lanes.unwritten = true;
  schedule();
}

function schedule() {
  if (!lanes.frame && !document.hidden) lanes.frame = requestAnimationFrame(drawFrame);
}

function redrawAll(stale) {
  for (const lane of lanes.all.values()) {
    lane.dirty = true;
    lane.stale ||= stale;
  }
  writeSoon();
}

function drawFrame(now) {
  lanes.frame = 0;
  const passed = now - lanes.lastFrame;
  if (passed < Math.max(FRAME_MS - 2, Math.min(FRAME_MS_MAX, lanes.cost * FRAME_SHARE))) {
    schedule();
    return;
  }
  lanes.lastFrame = now;
  // What a frame costs is known when the browser has drawn it.
  const begun = performance.now();
  breathe().then(() => { lanes.cost = 0.8 * lanes.cost + 0.2 * (performance.now() - begun); });
  // Browsers leave the event of a changed scheme out where a script has read the new scheme before it.
  if (lanes.dark !== isDark()) {
    lanes.dark = isDark();
    for (const lane of lanes.all.values()) lane.stale = true;
  }
  let more = writeSome(now);
  if (lanes.pointer) pointAt();
  for (const lane of lanes.all.values()) {
    more = advance(lane, passed) || more;
    if (!lane.visible || !(lane.dirty || lane.stale)) continue;
    // A change of the scheme or the size redraws all lanes: a frame does what fits into it, the next one goes on.
    if (performance.now() - begun > FRAME_BUDGET_MS) more = true;
    else drawLane(lane);
  }
  if (more) schedule();
}

// Writes what is text, a part a frame. Returns whether there is more.
function writeSome(now) {
  if (view.paused) return false;
  if (lanes.unwritten && lanes.parts.length === 0 && now - lanes.lastWrite >= WRITE_EVERY_MS) {
    lanes.lastWrite = now;
    lanes.unwritten = false;
    lanes.parts = [writeLanes, ...lanes.writers];
  }
  lanes.parts.shift()?.();
  return lanes.unwritten || lanes.parts.length > 0;
}

function writeLanes() {
  for (const lane of lanes.all.values()) {
    writeLane(lane);
    if (lane.visible) drawKvMap(lane.kvCanvas, lane.kv, kvHeight(lane));
  }
}

// New columns appear one after another until the next update is due, and not all at once.
function advance(lane, passed) {
  if (view.paused || lane.shown >= lane.end) return false;
  const before = viewEnd(lane);
  const waiting = lane.end - lane.shown;
  const shownColumns = lane.raster.geometry?.columns ?? 0;
  if (reducedMotion.matches || waiting > shownColumns || waiting < 0.01) lane.shown = lane.end;
  else lane.shown = Math.min(lane.end, lane.shown + Math.max(lane.speed ?? 0, 0.004) * Math.min(passed, 500));
  if (viewEnd(lane) !== before) lane.dirty = true;
  return lane.shown < lane.end;
}

function listenTo(lane) {
  lane.view.addEventListener("pointermove", (event) => {
    lanes.pointer = { lane, x: event.clientX, y: event.clientY };
    schedule();
  });
  lane.view.addEventListener("pointerleave", () => {
    lanes.pointer = null;
    hideTip();
    setHovered(0);
  });
  lane.view.addEventListener("click", (event) => {
    const hit = hitLane(lane, event.clientX, event.clientY);
    if (hit?.at >= 0 && hit.column.requests[hit.at]) openLife(hit.column.requests[hit.at], lane.view);
  });
  lane.view.addEventListener("wheel", (event) => {
    if (!view.paused || Math.abs(event.deltaX) <= Math.abs(event.deltaY)) return;
    event.preventDefault();
    scrollLane(lane, viewEnd(lane) + Math.sign(event.deltaX) * Math.ceil(Math.abs(event.deltaX) / 8));
  }, { passive: false });
  lane.view.addEventListener("keydown", (event) => onLaneKey(lane, event));
  for (const type of ["focus", "blur"]) {
    lane.view.addEventListener(type, () => {
      lane.dirty = true;
      schedule();
    });
  }
}

function hitLane(lane, clientX, clientY) {
  const { geometry, drawnFrom } = lane.raster;
  if (!geometry) return null;
  const box = lane.canvas.getBoundingClientRect();
  const index = drawnFrom + Math.floor(((clientX - box.left) * geometry.scale - lane.left) / geometry.column);
  const column = lane.columns[index - lane.base];
  if (!column || index < drawnFrom) return null;
  const y = (clientY - box.top) * geometry.scale;
  const parked = y >= geometry.parkedTop && geometry.parkedRows > 0 && y < geometry.height;
  const row = parked ? geometry.rows + Math.floor((y - geometry.parkedTop) / geometry.parkedRow) : Math.floor(y / geometry.row);
  return { index, row, column, at: y < geometry.height ? cellAt(geometry, column, row) : -1 };
}

function pointAt() {
  const { lane, x, y } = lanes.pointer;
  const hit = lanes.all.has(lane.name) ? hitLane(lane, x, y) : null;
  if (!hit) {
    hideTip();
    setHovered(0);
    return;
  }
  showTip(describeCell(hit.column, hit.at, lane.slotRows), x, y);
  setHovered(hit.at >= 0 ? hit.column.requests[hit.at] : 0);
}

function setHovered(number) {
  if (view.hovered === number) return;
  view.hovered = number;
  for (const lane of lanes.all.values()) lane.dirty = true;
  schedule();
}

function showTip(text, x, y) {
  const tip = byId("tip");
  setText(tip, text);
  tip.hidden = false;
  const [wide, high] = [tip.offsetWidth, tip.offsetHeight];
  const left = x + 16 + wide > innerWidth ? x - wide - 12 : x + 16;
  const top = y + 18 + high > innerHeight ? y - high - 12 : y + 18;
  tip.style.transform = `translate(${Math.max(4, left)}px, ${Math.max(4, top)}px)`;
}

function hideTip() {
  byId("tip").hidden = true;
}

function scrollLane(lane, end) {
  const columns = lane.raster.geometry?.columns ?? 1;
  lane.shown = Math.max(Math.min(lane.base + columns, lane.end), Math.min(lane.end, end));
  lane.dirty = true;
  schedule();
}

function onLaneKey(lane, event) {
  if (event.ctrlKey || event.altKey || event.metaKey || !lane.raster.geometry || !lane.columns.length) return;
  const moves = { ArrowLeft: -1, ArrowRight: 1, PageUp: -10, PageDown: 10, Home: -Infinity, End: Infinity };
  const cursor = lane.cursor ?? { index: viewEnd(lane) - 1, row: -1 };
  if (event.key === "Enter" || event.key === " " && lane.cursor) {
    const column = lane.columns[cursor.index - lane.base];
    const at = column ? cellAt(lane.raster.geometry, column, cursor.row) : -1;
    if (at >= 0 && column.requests[at]) openLife(column.requests[at], lane.view);
  } else if (event.key in moves) {
    moveCursor(lane, cursor, moves[event.key] * (event.shiftKey ? 10 : 1));
  } else if (event.key === "ArrowUp" || event.key === "ArrowDown") {
    moveRow(lane, cursor, event.key === "ArrowUp" ? -1 : 1);
  } else if (event.key === "Escape" && lane.cursor) {
    lane.cursor = null;
  } else {
    return;
  }
  event.preventDefault();
  event.stopPropagation();
  lane.dirty = true;
  schedule();
}

function moveCursor(lane, cursor, by) {
  const oldest = view.paused ? lane.base : Math.max(lane.base, lane.raster.drawnFrom);
  const newest = view.paused ? lane.end - 1 : viewEnd(lane) - 1;
  const index = Math.max(oldest, Math.min(newest, cursor.index + by));
  let row = cursor.row;
  if (row < 0) row = usedRows(lane, lane.columns[index - lane.base])[0] ?? 0;
  lane.cursor = { index, row };
  const columns = lane.raster.geometry.columns;
  if (index < viewEnd(lane) - columns) scrollLane(lane, index + columns);
  else if (index >= viewEnd(lane)) scrollLane(lane, index + 1);
  sayCursor(lane);
}

// Rows with a cell, from the top.
function usedRows(lane, column) {
  const rows = Array.from(column.slots, (_, at) => rowOf(lane.raster.geometry, column, at));
  return rows.filter((row) => row >= 0).sort((one, other) => one - other);
}

// Up and down go to the next slot in use.
function moveRow(lane, cursor, by) {
  const column = lane.columns[Math.max(lane.base, Math.min(lane.end - 1, cursor.index)) - lane.base];
  const used = usedRows(lane, column);
  const next = by > 0 ? used.find((row) => row > cursor.row) : used.reverse().find((row) => row < cursor.row);
  lane.cursor = { index: cursor.index, row: next ?? Math.max(0, Math.min(lane.raster.geometry.rows - 1, cursor.row)) };
  moveCursor(lane, lane.cursor, 0);
}

function sayCursor(lane) {
  const { index, row } = lane.cursor;
  const column = lane.columns[index - lane.base];
  const { geometry, drawnFrom } = lane.raster;
  const at = cellAt(geometry, column, row);
  const text = describeCell(column, at, lane.slotRows);
  sayCell(at < 0 ? `Row ${row} is free. ${text}` : text);
  const box = lane.canvas.getBoundingClientRect();
  showTip(text, box.left + (lane.left + (index - drawnFrom) * geometry.column) / geometry.scale, box.top + rowTop(geometry, row) / geometry.scale);
}
