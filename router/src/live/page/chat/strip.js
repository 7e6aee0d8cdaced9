// The slots of one worker over its last iterations, with the cells of the own request in its colour: the lane of the live view, small.

const STRIP_COLUMN = 6;
const STRIP_ROW = 9;
const STRIP_ROWS_MIN = 4;
const STRIP_ROWS_MAX = 16;
const STRIP_COLUMNS_MAX = 400;
const STRIP_KINDS = { decode: 0, prefill: 1, held: 2 };

function createStrip(worker) {
  const canvas = element("canvas", "strip");
  setAttribute(canvas, "role", "img");
  return { worker, canvas, columns: [], base: 0, rows: createRows(), slotRows: 0, last: 0, own: 0, shownRows: STRIP_ROWS_MIN };
}

// A column has the slots of an iteration, their rows, requests and kinds. A sequence that kept its slot without being computed is held.
function stripColumn(iteration, slots) {
  const cells = (iteration.work ?? []).map((cell) => [cell.slot ?? 0, cell.request ?? 0, cell.prefillTokens ? STRIP_KINDS.prefill : STRIP_KINDS.decode]);
  const computed = new Set(cells.map(([slot]) => slot));
  for (const [slot, cell] of slots) if (!computed.has(slot)) cells.push([slot, cell.request ?? 0, STRIP_KINDS.held]);
  return {
    slots: Uint16Array.from(cells, ([slot]) => slot), rows: new Uint16Array(cells.length), rowsUsed: 0,
    requests: cells.map(([, request]) => request), kinds: Uint8Array.from(cells, ([, , kind]) => kind),
  };
}

// Takes the worker of an update. As in the live view, a slot keeps its row while it is in use.
function takeStrip(strip, worker) {
  strip.slotRows = Math.max(1, Math.min(SLOTS_MAX, worker.limits?.maxSequences ?? 1));
  const slots = new Map((worker.slots ?? []).filter(({ slot }) => slot !== undefined && slot < strip.slotRows).map((cell) => [cell.slot, cell]));
  for (const iteration of (worker.iterations ?? []).slice(-STRIP_COLUMNS_MAX)) {
    // A worker that was started again counts anew.
    if (iteration.number <= strip.last) strip.columns.push({ ...stripColumn({}, new Map()), isBreak: true });
    strip.last = iteration.number ?? 0;
    const column = stripColumn(iteration, slots);
    assignRows(strip.rows, column, strip.slotRows, slots);
    strip.columns.push(column);
  }
  strip.columns.splice(0, strip.columns.length - STRIP_COLUMNS_MAX);
  drawStrip(strip);
}

function drawStrip(strip) {
  const width = strip.canvas.clientWidth;
  if (!width) return;
  const columns = Math.max(1, Math.floor(width / STRIP_COLUMN));
  const shown = strip.columns.slice(-columns);
  // Rows that were needed stay, so that nothing jumps while an answer streams.
  strip.shownRows = Math.min(STRIP_ROWS_MAX, strip.slotRows, Math.max(strip.shownRows, ...shown.map(({ rowsUsed }) => rowsUsed)));
  const rows = strip.shownRows;
  const height = rows * STRIP_ROW - 1;
  const scale = fitCanvas(strip.canvas, width, height);
  const context = strip.canvas.getContext("2d");
  const colours = inks();
  const own = toneColour(requestTone(strip.own));
  context.setTransform(scale, 0, 0, scale, 0, 0);
  context.clearRect(0, 0, width, height);
  context.fillStyle = colours.empty;
  for (let row = 0; row < rows; row++) context.fillRect(0, row * STRIP_ROW, width, STRIP_ROW - 1);
  shown.forEach((column, at) => {
    const x = width - (shown.length - at) * STRIP_COLUMN;
    if (column.isBreak) {
      context.fillStyle = colours.line;
      context.fillRect(x + STRIP_COLUMN / 2, 0, 1, height);
      return;
    }
    for (let cell = 0; cell < column.slots.length; cell++) {
      if (column.slots[cell] >= strip.slotRows) continue;
      const isOwn = strip.own !== 0 && column.requests[cell] === strip.own;
      // The own request is shown in the last row where its row has no room.
      const row = isOwn ? Math.min(rows - 1, column.rows[cell]) : column.rows[cell];
      if (row >= rows) continue;
      context.fillStyle = isOwn ? own : colours.parked;
      context.globalAlpha = isOwn && column.kinds[cell] !== STRIP_KINDS.decode ? 0.5 : 1;
      context.fillRect(x, row * STRIP_ROW, STRIP_COLUMN - 1, STRIP_ROW - 1);
      context.globalAlpha = 1;
    }
  });
}
