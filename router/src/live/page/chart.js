// The chart of a lane's steps below its slots, and the axes of both. Labels are elements, so that no font is too wide for them.

const CHART_HEIGHT = 46;
const CHART_GAP = 7;
const FOLD_HEIGHT = 26;
const STEPS_OF_SCALE = [1, 1.5, 2, 3, 4, 5, 6, 8, 10];

function buildAxes(lane) {
  const axis = (names) => {
    const node = element("div", "axis");
    const labels = names.map((name) => element("span", "", name));
    node.append(...labels);
    return { node, labels };
  };
  lane.slotAxis = axis(["0", "slots", ""]);
  lane.stepAxis = axis(["", "step", ""]);
  const axes = element("div", "axes");
  setAttribute(axes, "aria-hidden", "true");
  axes.append(lane.slotAxis.node, lane.stepAxis.node);
  return axes;
}

// Puts the axes beside what they belong to. Where rows are no longer in the order of their slots, they have no numbers.
function layAxes(lane) {
  const { geometry } = lane.raster;
  const high = geometry.height / geometry.scale;
  setStyle(lane.slotAxis.node, "height", `${high}px`);
  setStyle(lane.stepAxis.node, "height", `${CHART_HEIGHT}px`);
  setStyle(lane.stepAxis.node, "margin-top", `${lane.gap}px`);
  setStyle(lane.slotAxis.node, "padding-bottom", `${(geometry.height - geometry.rows * geometry.row) / geometry.scale}px`);
  const [first, name, last] = lane.slotAxis.labels;
  const inOrder = geometry.opened || [...lane.rows.bySlot].every(([slot, row]) => slot === row);
  setText(first, inOrder ? "0" : "");
  setText(last, inOrder && geometry.rows > 1 ? String(geometry.rows - 1) : "");
  // The figures need the room more than their name does.
  const line = parseFloat(getComputedStyle(lane.slotAxis.node).fontSize);
  name.hidden = high < 3.5 * line;
  lane.stepAxis.labels[1].hidden = CHART_HEIGHT < 3 * line;
}

// The next number that is easy to read.
function scaleAbove(most) {
  const power = 10 ** Math.floor(Math.log10(Math.max(most, 1)));
  return (STEPS_OF_SCALE.find((step) => step * power >= most) ?? 10) * power;
}

function shortTime(us) {
  if (us < 1000) return `${Math.round(us)} µs`;
  return us < 1e6 ? `${Number((us / 1000).toPrecision(3))} ms` : `${Number((us / 1e6).toPrecision(3))} s`;
}

// Durations as bars, in another colour where they pass the target; the target as a line.
function drawChart(lane, context) {
  const { geometry, drawnFrom, drawnTo } = lane.raster;
  const { scale } = geometry;
  const colours = inks();
  const top = geometry.height + Math.round(lane.gap * scale);
  const height = Math.round(CHART_HEIGHT * scale);
  const first = Math.max(drawnFrom, lane.base);
  let most = 0;
  for (let index = first; index < drawnTo; index++) {
    const column = lane.columns[index - lane.base];
    most = Math.max(most, column.duration, column.target);
  }
  // The scale follows at once upwards and in steps downwards, so that bars do not dance.
  if (most > lane.chartMax || most < lane.chartMax * 0.4) {
    lane.chartMax = most ? scaleAbove(most * 1.05) : 0;
    const [high, , low] = lane.stepAxis.labels;
    setText(high, lane.chartMax ? shortTime(lane.chartMax) : "");
    setText(low, lane.chartMax ? "0" : "");
  }
  const y = (value) => top + height - Math.round((Math.min(value, lane.chartMax) / Math.max(1, lane.chartMax)) * height);
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
