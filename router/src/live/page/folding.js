// How many rows a lane has, and where they are: rows of free slots beyond a few are folded.

// A worker of so few slots has a row for each.
const ROWS_WHOLE = 16;
// Rows are taken away so long after they were needed last.
const ROWS_KEPT_MS = 10000;

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
