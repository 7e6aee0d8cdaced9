// The cells of a lane as pixels. A ring of columns: a new column costs its own pixels only, whatever is to its left.

const OPENED_HEIGHT_MAX = 1024;

function createRaster() {
  return { image: null, words: null, columns: 0, drawnFrom: 0, drawnTo: 0, geometry: null, shades: null };
}

// Solid, tint (behind hatching) and faint (not in this step) of every tone.
function shadesOf() {
  const colours = inks();
  const shade = (colour) => ({ solid: pixel(colour), tint: pixel(mix(colour, colours.empty, 0.32)), faint: pixel(mix(colour, colours.empty, 0.24)), edge: pixel(mix(colour, colours.empty, 0.8)) });
  return {
    tones: Array.from({ length: TONES + 1 }, (_, tone) => shade(toneColour(tone))),
    empty: pixel(colours.empty),
    surface: pixel(colours.surface),
    line: pixel(colours.line),
    ink: pixel(colours.ink),
    parked: shade(colours.parked),
    muted: pixel(colours.muted),
  };
}

// Geometry in device pixels: `column` wide, `row` high, `rows` of slots, `parkedRows` of `parkedRow` below a distance. Of `slots` slots,
// the ones in use share the rows, unless the viewer has `opened` all of them.
function laneGeometry(width, scale, zoom, { rows, slots, opened, parkedRows }) {
  const column = Math.max(1, Math.round(ZOOMS[zoom] * scale));
  const most = opened ? Math.min(OPENED_HEIGHT_MAX, Math.max(236, slots * 3)) : zoom >= 6 ? 420 : 236;
  const row = Math.max(1, Math.min(Math.round(14 * scale), Math.floor((most * scale) / Math.max(1, rows))));
  const parkedRow = Math.max(Math.round(2 * scale), Math.min(row, Math.round(8 * scale)));
  const columns = Math.max(1, Math.floor(width / column));
  const parkedTop = rows * row + Math.round(3 * scale);
  const height = parkedRows ? parkedTop + parkedRows * parkedRow : rows * row;
  return { column, row, parkedRow, columns, rows, slots, opened, parkedRows, parkedTop, height, scale, period: Math.max(4, Math.round(4 * scale)) };
}

function sameGeometry(one, other) {
  return one && Object.keys(one).every((key) => one[key] === other[key]);
}

function resetRaster(raster, geometry) {
  if (!sameGeometry(raster.geometry, geometry)) {
    raster.geometry = geometry;
    raster.image = new ImageData(geometry.columns * geometry.column, geometry.height);
    raster.words = new Uint32Array(raster.image.data.buffer);
  }
  raster.shades = shadesOf();
  raster.drawnFrom = raster.drawnTo = 0;
}

// Draws what is missing of columns `from` to `to` of `columns`, whose first has index `base`.
function updateRaster(raster, columns, base, from, to) {
  const keeps = raster.drawnTo > raster.drawnFrom && from >= raster.drawnFrom && to >= raster.drawnTo && from <= raster.drawnTo;
  for (let index = keeps ? raster.drawnTo : from; index < to; index++) {
    drawColumn(raster, index, index >= base ? columns[index - base] : undefined);
  }
  raster.drawnFrom = from;
  raster.drawnTo = to;
}

function fillBlock(words, stride, x, y, width, height, word) {
  for (let line = y; line < y + height; line++) words.fill(word, line * stride + x, line * stride + x + width);
}

function drawColumn(raster, index, column) {
  const { words, geometry, shades } = raster;
  const stride = geometry.columns * geometry.column;
  const x = (((index % geometry.columns) + geometry.columns) % geometry.columns) * geometry.column;
  fillBlock(words, stride, x, 0, geometry.column, geometry.rows * geometry.row, shades.empty);
  if (geometry.parkedRows) {
    fillBlock(words, stride, x, geometry.rows * geometry.row, geometry.column, geometry.parkedTop - geometry.rows * geometry.row, shades.surface);
    fillBlock(words, stride, x, geometry.parkedTop, geometry.column, geometry.height - geometry.parkedTop, shades.empty);
  }
  if (!column) return;
  if (column.type !== "iteration") {
    drawMark(raster, x, stride, column.type);
    return;
  }
  const byTenant = settings.tone === "tenant";
  const { slots, requests, kinds, tenantTones: tones } = column;
  for (let at = 0; at < slots.length; at++) {
    const row = rowOf(geometry, column, at);
    if (row < 0) continue;
    const shade = row >= geometry.rows ? shades.parked : shades.tones[byTenant ? tones[at] : requestTone(requests[at])];
    drawCell(raster, stride, x, rowTop(geometry, row), rowHeight(geometry, row), kinds[at], shade);
  }
}

function drawMark(raster, x, stride, type) {
  const { words, geometry, shades } = raster;
  if (type === "idle") return;
  const middle = x + (geometry.column >> 1);
  for (let y = 0; y < geometry.rows * geometry.row; y++) {
    if (type === "break") words.fill(((x + y) / 2) & 1 ? shades.muted : shades.line, y * stride + x, y * stride + x + geometry.column);
    else if ((y >> 1) & 1) words[y * stride + middle] = shades.muted;
  }
}

// Prefill is hatched, a draft has a dot, a sequence that is not in this step is faint, a moved one begins with a bright edge.
function drawCell(raster, stride, x, y, height, flags, shade) {
  const { words, geometry, shades } = raster;
  const kind = flags & 15;
  const width = geometry.column;
  const high = height >= 5 ? height - 1 : height;
  const plain = kind === HELD ? shade.faint : shade.solid;
  const half = geometry.period >> 1;
  const hatched = kind === PREFILL || kind === PREEMPTED;
  for (let line = 0; line < high; line++) {
    const start = (y + line) * stride + x;
    if (!hatched) {
      words.fill(plain, start, start + width);
      // A softer edge between two iterations of the same request.
      if (width >= 5 && kind !== HELD) words[start + width - 1] = shade.edge;
      continue;
    }
    for (let i = 0; i < width; i++) words[start + i] = (x + i + y + line) % geometry.period < half ? shade.solid : shade.tint;
  }
  if (kind === DRAFT) {
    const size = Math.max(1, Math.min(high, width) >> 1);
    const [left, top] = [x + ((width - size) >> 1), y + ((high - size) >> 1)];
    if (high > 2 || (y & 1) === 0) fillBlock(words, stride, left, top, size, size, shades.surface);
  }
  if (flags & MOVED) fillBlock(words, stride, x, y, Math.max(1, Math.min(width, geometry.scale * 2) | 0), high, shades.ink);
}

// Copies columns `from` to `to` to the canvas, the last one at its right edge.
function blitRaster(raster, context, left) {
  const { geometry, image, drawnFrom } = raster;
  const split = ((drawnFrom % geometry.columns) + geometry.columns) % geometry.columns;
  const cut = split * geometry.column;
  const width = geometry.columns * geometry.column;
  context.putImageData(image, left - cut, 0, cut, 0, width - cut, geometry.height);
  if (cut) context.putImageData(image, left + width - cut, 0, 0, 0, cut, geometry.height);
}
