// The table of requests. However many there are, only the rows in sight exist.

const ROW_HEIGHT = 26;
// A long table is built anew twice a second at most; a short one would be empty by then.
const TABLE_EVERY_MS = 500;
const TABLE_LONG = 100;

const FIELDS = [
  { id: "number", title: "No.", value: (view) => view.number, kind: "number" },
  { id: "requestId", title: "Request id", text: (view) => printable(view.requestId), value: (view) => view.requestId ?? "", kind: "middle-only" },
  { id: "tenant", title: "Tenant", text: (view) => printable(view.tenant) || "anonymous", value: (view) => view.tenant ?? "" },
  { id: "model", title: "Model", text: (view) => printable(view.model), value: (view) => view.model ?? "", kind: "wide-only" },
  { id: "state", title: "State", text: (view) => printable(view.state), value: (view) => view.state ?? "" },
  { id: "worker", title: "Worker", text: (view) => printable(view.worker), value: (view) => view.worker ?? "", kind: "middle-only" },
  { id: "age", title: "Age", text: (view) => age(ageOf(view)), value: (view) => (view.state === "ended" ? view.ageMs ?? 0 : -view.arrived), right: true },
  { id: "prompt", title: "Prompt", text: (view) => count(view.promptTokens) + (view.cachedTokens ? ` (${count(view.cachedTokens)})` : ""), value: (view) => view.promptTokens ?? 0, right: true, kind: "middle-only" },
  { id: "output", title: "Output", text: (view) => `${count(view.outputTokens)} / ${count((view.maxTokens ?? 0) * (view.choices ?? 1))}`, value: (view) => view.outputTokens ?? 0, right: true, kind: "middle-only" },
  { id: "blocks", title: "Blocks", text: (view) => count(view.kvBlocks), value: (view) => view.kvBlocks ?? 0, right: true, kind: "wide-only" },
  { id: "attempts", title: "Tries", text: (view) => count(view.attempts), value: (view) => view.attempts ?? 0, right: true, kind: "wide-only" },
  { id: "reason", title: "Waits for, ended by", text: (view) => printable(view.outcome || view.waitingReason), value: (view) => view.outcome || view.waitingReason || "", kind: "wide-only" },
];
const STATE_SETS = {
  all: () => true,
  open: (view) => view.state !== "ended",
  queued: (view) => view.state === "queued" || view.state === "waiting",
  running: (view) => view.state === "prefill" || view.state === "decode",
  parked: (view) => view.state === "preempted" || view.state === "swapped" || view.state === "paused",
  retry: (view) => view.state === "retry" || view.state === "quarantined" || (view.attempts ?? 0) > 1,
  ended: (view) => view.state === "ended",
};

const table = { order: [], sort: "number", descending: true, filter: "", state: "open", version: -1, pruned: -1, builtAt: 0, rows: [], active: 0, activeIndex: 0, drawn: "" };

function buildTable() {
  for (const [at, field] of FIELDS.entries()) {
    const cell = element("div", kindClass(field));
    setAttribute(cell, "role", "columnheader");
    const button = element("button", "", field.title);
    button.type = "button";
    button.addEventListener("click", () => sortBy(field.id));
    setAttribute(cell, "aria-colindex", at + 1);
    cell.append(button);
    byId("grid-head").append(cell);
  }
  byId("grid").addEventListener("scroll", () => showRows(), { passive: true });
  byId("grid").addEventListener("keydown", onTableKey);
  byId("grid").addEventListener("focus", () => showRows());
  byId("filter").addEventListener("input", () => {
    table.filter = byId("filter").value.trim().toLowerCase();
    rebuildTable();
  });
  byId("filter-state").addEventListener("change", () => {
    table.state = byId("filter-state").value;
    rebuildTable();
  });
  byId("filters").addEventListener("submit", (event) => event.preventDefault());
  new ResizeObserver(() => showRows()).observe(byId("grid"));
  lanes.writers.push(writeTable);
  markSort();
}

function kindClass(field) {
  return `${field.kind === "middle-only" || field.kind === "wide-only" ? `${field.kind} ${field.kind === "wide-only" ? "middle-only" : ""}` : ""}${field.right ? " right" : ""}`.trim();
}

function sortBy(id) {
  if (table.sort === id) table.descending = !table.descending;
  else [table.sort, table.descending] = [id, ["number", "age", "output", "prompt", "blocks", "attempts"].includes(id)];
  markSort();
  rebuildTable();
}

function markSort() {
  [...byId("grid-head").children].forEach((cell, at) => {
    setAttribute(cell, "aria-sort", FIELDS[at].id === table.sort ? (table.descending ? "descending" : "ascending") : null);
  });
}

// Not while the viewer has paused. What no longer belongs here goes at once.
function writeTable() {
  const now = performance.now();
  if (table.version !== roster.version && (table.order.length < TABLE_LONG || now - table.builtAt >= TABLE_EVERY_MS)) {
    rebuildTable();
    return;
  }
  pruneTable();
  showRows();
}

function pruneTable() {
  if (table.pruned === roster.version) return;
  table.pruned = roster.version;
  const inSet = STATE_SETS[table.state] ?? STATE_SETS.all;
  const kept = table.order.filter((number) => roster.views.has(number) && inSet(roster.views.get(number)));
  if (kept.length === table.order.length) return;
  table.order = kept;
  writeTableSize();
}

function writeTableSize() {
  setStyle(byId("grid-body"), "height", `${table.order.length * ROW_HEIGHT}px`);
  setAttribute(byId("grid"), "aria-rowcount", table.order.length + 1);
  const open = (overview.cluster.openRequests ?? 0) - (roster.views.size - (roster.ended.length - roster.endedFrom));
  setText(byId("requests-count"), `${count(table.order.length)} shown${open > 50 ? `, ${count(open)} more are open and not sent` : ""}`);
  byId("grid-empty").hidden = table.order.length > 0;
}

// The open requests of a worker.
function showRequestsOf(name) {
  byId("filter").value = name;
  byId("filter-state").value = "open";
  Object.assign(table, { filter: name.toLowerCase(), state: "open" });
  rebuildTable();
  byId("requests").scrollIntoView({ block: "nearest" });
  byId("grid").focus();
}

function rebuildTable() {
  const inSet = STATE_SETS[table.state] ?? STATE_SETS.all;
  const words = table.filter;
  const chosen = [];
  for (const request of roster.views.values()) {
    if (inSet(request) && (!words || haystack(request).includes(words))) chosen.push(request);
  }
  // Keys first: comparisons are then cheap, and rows with equal keys keep the order of their numbers.
  const { value } = FIELDS.find(({ id }) => id === table.sort);
  for (const request of chosen) request.key = value(request);
  const sign = table.descending ? -1 : 1;
  chosen.sort((one, other) => (one.key < other.key ? -sign : one.key > other.key ? sign : other.number - one.number));
  table.order = chosen.map(({ number }) => number);
  table.version = table.pruned = roster.version;
  table.builtAt = performance.now();
  writeTableSize();
  showRows();
}

function tableRow() {
  const node = element("div", "grid-row");
  setAttribute(node, "role", "row");
  const cells = FIELDS.map((field, at) => {
    const cell = element("div", kindClass(field));
    setAttribute(cell, "role", "gridcell");
    setAttribute(cell, "aria-colindex", at + 1);
    node.append(cell);
    return cell;
  });
  const swatch = element("i", "swatch");
  const number = element("span", "number");
  cells[0].append(swatch, number);
  cells[4].className = `${cells[4].className} pill`.trim();
  const row = { node, cells, swatch, number, request: 0 };
  node.addEventListener("click", () => {
    table.active = row.request;
    openLife(row.request, byId("grid"));
    showRows();
  });
  byId("grid-body").append(node);
  return row;
}

// Fills the rows in sight. They are reused: what is out of sight costs nothing.
function showRows() {
  if (document.hidden) return;
  const grid = byId("grid");
  const first = Math.max(0, Math.floor(grid.scrollTop / ROW_HEIGHT) - 2);
  const number = Math.min(table.order.length - first, Math.ceil((grid.clientHeight || 392) / ROW_HEIGHT) + 4);
  while (table.rows.length < number) table.rows.push(tableRow());
  table.rows.forEach((row, at) => {
    row.node.hidden = at >= number;
    if (at < number) fillRow(row, first + at);
  });
  const active = table.order.indexOf(table.active);
  const shown = table.rows.find((row) => !row.node.hidden && row.request === table.active);
  if (active >= 0) table.activeIndex = active;
  setAttribute(byId("grid"), "aria-activedescendant", active >= 0 && shown ? shown.node.id : null);
}

function fillRow(row, index) {
  const number = table.order[index];
  const request = roster.views.get(number);
  row.request = number;
  row.node.id = `row-${number}`;
  row.node.style.transform = `translateY(${index * ROW_HEIGHT}px)`;
  setAttribute(row.node, "aria-rowindex", index + 2);
  setAttribute(row.node, "data-active", number === table.active ? "" : null);
  setAttribute(row.node, "aria-selected", number === table.active ? "true" : "false");
  setAttribute(row.node, "data-own", number === view.own ? "" : null);
  setAttribute(row.node, "data-ended", request?.state === "ended" ? "" : null);
  setText(row.number, String(number));
  setStyle(row.swatch, "--tone", request?.state === "ended" ? inks().free : toneColour(toneOf(number, request?.tenant ?? "")));
  FIELDS.forEach((field, at) => {
    if (at === 0) return;
    setText(row.cells[at], request ? field.text(request) : "");
  });
  setAttribute(row.cells[4], "data-tone", STATE_TONES[request?.state] ?? "");
}

function onTableKey(event) {
  if (event.ctrlKey || event.altKey || event.metaKey || event.target !== byId("grid")) return;
  const page = Math.max(1, Math.floor(rowsHeight() / ROW_HEIGHT) - 1);
  const steps = { ArrowUp: -1, ArrowDown: 1, PageUp: -page, PageDown: page, Home: -Infinity, End: Infinity };
  if (event.key in steps && table.order.length) {
    const at = table.order.indexOf(table.active);
    // A request that has left the table is replaced by the one in its place.
    const from = at < 0 ? table.activeIndex - (steps[event.key] > 0 ? 1 : 0) : at;
    const index = Math.max(0, Math.min(table.order.length - 1, from + steps[event.key]));
    table.active = table.order[index];
    scrollToRow(index);
  } else if (event.key === "Enter" && roster.views.has(table.active)) {
    openLife(table.active, byId("grid"));
  } else {
    return;
  }
  event.preventDefault();
  showRows();
}

// Of the part that the head leaves.
function rowsHeight() {
  return byId("grid").clientHeight - byId("grid-head").offsetHeight;
}

function scrollToRow(index) {
  const grid = byId("grid");
  const top = index * ROW_HEIGHT;
  if (top < grid.scrollTop) grid.scrollTop = top;
  else if (top + ROW_HEIGHT > grid.scrollTop + rowsHeight()) grid.scrollTop = top + ROW_HEIGHT - rowsHeight();
}
