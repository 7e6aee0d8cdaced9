// Figures over the last hour, in the memory of this page: a bounded number of points, each for twice the time once there are too many.

const POINTS_MAX = 240;
const POINT_MS = 500;
const HOUR_MS = 3600000;

function createHistory(fields) {
  return { step: POINT_MS, points: new Map(fields.map((field) => [field, []])), sums: new Map(), samples: 0, begun: 0 };
}

function clearHistory(history) {
  Object.assign(history, { step: POINT_MS, samples: 0, begun: 0 });
  for (const points of history.points.values()) points.length = 0;
  history.sums.clear();
}

// Takes a sample of every field; a point is the mean of the samples of its time.
function sampleHistory(history, values, now) {
  history.begun ||= now;
  for (const field of history.points.keys()) history.sums.set(field, (history.sums.get(field) ?? 0) + (values[field] ?? 0));
  history.samples += 1;
  if (now - history.begun < history.step) return;
  for (const [field, points] of history.points) points.push(history.sums.get(field) / history.samples);
  // A page that slept has no points of that time, and does not make them up.
  Object.assign(history, { samples: 0, begun: now - history.begun > 2 * history.step ? now : history.begun + history.step });
  history.sums.clear();
  thinHistory(history);
}

function thinHistory(history) {
  const full = history.points.values().next().value.length >= POINTS_MAX;
  if (full && history.step * POINTS_MAX < HOUR_MS) {
    history.step *= 2;
    for (const [field, points] of history.points) {
      const halved = [];
      for (let at = 0; at + 1 < points.length; at += 2) halved.push((points[at] + points[at + 1]) / 2);
      history.points.set(field, halved);
    }
  }
  for (const points of history.points.values()) while (points.length * history.step > HOUR_MS) points.shift();
}

// The points fill the width once there are some of them: an hour that is nearly empty would show nothing.
function drawHistory(canvas, points, height) {
  const width = canvas.clientWidth;
  if (!width) return;
  const scale = fitCanvas(canvas, width, height);
  const context = canvas.getContext("2d");
  context.setTransform(scale, 0, 0, scale, 0, 0);
  context.clearRect(0, 0, width, height);
  const most = Math.max(...points, 1e-9);
  const step = width / Math.max(points.length - 1, 30);
  const start = width - (points.length - 1) * step;
  const y = (value) => height - 1 - (value / most) * (height - 3);
  context.beginPath();
  points.forEach((value, at) => (at ? context.lineTo(start + at * step, y(value)) : context.moveTo(start, y(value))));
  const { accent } = inks();
  context.strokeStyle = accent;
  context.lineWidth = 1.25;
  context.stroke();
  context.lineTo(width, height);
  context.lineTo(start, height);
  context.globalAlpha = 0.12;
  context.fillStyle = accent;
  context.fill();
  context.globalAlpha = 1;
}
