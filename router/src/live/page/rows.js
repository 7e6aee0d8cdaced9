// Which row of its lane a slot is drawn in. A slot keeps its row while it is in use.

// Numbers of rows: a lane changes its height seldom.
const ROWS = [8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256];
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
