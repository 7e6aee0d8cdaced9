// Which row of its lane a slot is drawn in. A slot keeps its row while it is in use; rows of free slots beyond a few are folded.

// Numbers of rows: a lane changes its height seldom.
const ROWS = [8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256];
// A worker of so few slots has a row for each.
const ROWS_WHOLE = 16;
// Rows are taken away so long after they were needed last.
const ROWS_KEPT_MS = 10000;
const SLOTS_MAX = 4096;

function createRows() {
  return { bySlot: new Map(), taken: new Uint8Array(SLOTS_MAX), shown: ROWS[0], neededAt: 0, opened: false };
}

// A slot gets the row of its own number, if that is shown and free, else the first free one.
function takeRow(rows, slot) {
  const row = slot < rows.shown && !rows.taken[slot] ? slot : rows.taken.indexOf(0);
  rows.taken[row] = 1;
  rows.bySlot.set(slot, row);
}

// Gives each cell of a new column its row. `inUse` has the slots that are in use now, whether they are in this column or not.
function assignRows(rows, column, slotRows, inUse) {
  const here = new Set(column.slots);
  for (const [slot, row] of rows.bySlot) {
    if (here.has(slot) || inUse.has(slot)) continue;
    rows.bySlot.delete(slot);
    rows.taken[row] = 0;
  }
  const fresh = [...here].filter((slot) => slot < slotRows && !rows.bySlot.has(slot));
  for (const slot of fresh.sort((one, other) => one - other)) takeRow(rows, slot);
  for (let at = 0; at < column.slots.length; at++) {
    const row = rows.bySlot.get(column.slots[at]);
    if (row === undefined) continue;
    column.rows[at] = row;
    column.rowsUsed = Math.max(column.rowsUsed, row + 1);
  }
}

// Whether all slots have their rows, or the viewer has unfolded them.
function showsAllSlots(lane) {
  return lane.rows.opened || lane.rows.shown >= lane.slotRows;
}

function shownRows(lane) {
  return lane.rows.opened ? lane.slotRows : Math.min(lane.rows.shown, lane.slotRows);
}

// Adapts the number of rows to the columns in sight. Returns whether it has changed.
function fitRows(lane, from, to, now) {
  const { rows, slotRows } = lane;
  let most = slotRows <= ROWS_WHOLE ? slotRows : 0;
  for (let index = Math.max(from, lane.base); index < to; index++) most = Math.max(most, lane.columns[index - lane.base].rowsUsed);
  const wanted = Math.min(slotRows, ROWS.find((number) => number >= most) ?? ROWS[ROWS.length - 1]);
  if (wanted >= rows.shown) rows.neededAt = now;
  const shrinks = wanted < rows.shown && !view.paused && lanes.pointer?.lane !== lane && now - rows.neededAt > ROWS_KEPT_MS;
  if (wanted === rows.shown || (wanted < rows.shown && !shrinks)) return false;
  rows.shown = wanted;
  return true;
}

// The row in which a cell is drawn: slots first, then sequences without one; -1 for what finds no room.
function rowOf(geometry, column, at) {
  const slot = column.slots[at];
  if (slot >= geometry.slots) return slot - geometry.slots < geometry.parkedRows ? geometry.rows + slot - geometry.slots : -1;
  if (geometry.opened) return slot;
  return column.rows[at] < geometry.rows ? column.rows[at] : -1;
}

function rowTop(geometry, row) {
  return row < geometry.rows ? row * geometry.row : geometry.parkedTop + (row - geometry.rows) * geometry.parkedRow;
}

function rowHeight(geometry, row) {
  return row < geometry.rows ? geometry.row : geometry.parkedRow;
}

function cellAt(geometry, column, row) {
  for (let at = 0; at < column.slots.length; at++) if (rowOf(geometry, column, at) === row) return at;
  return -1;
}

// What the line below the slots says: how many of them have no row.
function foldedText(lane) {
  const hidden = lane.slotRows - lane.rows.shown;
  if (lane.rows.opened) return `fold ${count(hidden)} slots`;
  const used = [...lane.rows.bySlot.values()].filter((row) => row >= lane.rows.shown).length;
  return used ? `${count(used)} more in use, ${count(hidden - used)} free` : `${count(hidden)} free`;
}
