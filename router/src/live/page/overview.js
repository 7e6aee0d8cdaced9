// Figures of the whole cluster: counts and rates with a short history, percentiles.

const HISTORY_MAX = 180;
const HISTORY_EVERY_MS = 500;
const HISTORY_HEIGHT = 24;
const overview = { tiles: new Map(), rows: new Map(), cluster: {}, history: new Map(), lastSample: 0 };

const TILES = [
  ["in flight", "inFlightRequests", count, "at workers"],
  ["queued", "queuedRequests", count, ""],
  ["retrying", "retryingRequests", count, ""],
  ["open", "openRequests", count, ""],
  ["output tokens", "outputTokensPerSecond", rate, "/s"],
  ["prompt tokens", "promptTokensPerSecond", rate, "/s"],
  ["ended", "endedPerSecond", rate, "/s"],
];
const PERCENTILES = [["First token", "firstTokenMs"], ["Gap", "gapMs"], ["Queue", "queueMs"]];

function buildOverview() {
  for (const [name, field, , unit] of TILES) {
    const tile = element("div");
    const figure = element("dd");
    const number = document.createTextNode("–");
    figure.append(number, " ", element("small", "", unit === "at workers" ? "" : unit));
    const canvas = element("canvas");
    setAttribute(canvas, "aria-hidden", "true");
    tile.append(element("dt", "", name), figure, canvas);
    byId("counts").append(tile);
    overview.tiles.set(field, { tile, number, canvas });
    overview.history.set(field, []);
  }
  for (const [name, field] of PERCENTILES) {
    const row = element("tr");
    const head = element("th", "", name);
    head.scope = "row";
    const cells = ["p50", "p90", "p99"].map((key) => ({ key, cell: element("td", "", "–") }));
    row.append(head, ...cells.map(({ cell }) => cell));
    byId("percentiles").tBodies[0].append(row);
    overview.rows.set(field, cells);
  }
  lanes.writers.push(writeOverview);
}

function takeCluster(cluster) {
  overview.cluster = cluster;
  view.canKill = cluster.canKillWorkers === true;
  const now = performance.now();
  if (now - overview.lastSample < HISTORY_EVERY_MS) return;
  overview.lastSample = now;
  for (const [field, values] of overview.history) {
    values.push(cluster[field] ?? 0);
    if (values.length > HISTORY_MAX) values.shift();
  }
}

function resetOverview() {
  overview.cluster = {};
  for (const values of overview.history.values()) values.length = 0;
}

function writeOverview() {
  const { cluster } = overview;
  const routers = (cluster.routers ?? 1) > 1 ? ` · ${cluster.routers} routers` : "";
  setText(byId("router"), [cluster.router, cluster.version].filter(Boolean).map(printable).join(" ") + routers);
  for (const [, field, write] of TILES) {
    const { tile, number, canvas } = overview.tiles.get(field);
    const text = write(cluster[field]);
    if (number.nodeValue !== text) number.nodeValue = text;
    if (field === "retryingRequests") tile.className = cluster[field] ? "strong" : "";
    drawHistory(canvas, overview.history.get(field));
  }
  for (const [, field] of PERCENTILES) {
    for (const { key, cell } of overview.rows.get(field)) setText(cell, milliseconds(cluster[field]?.[key]));
  }
}

function drawHistory(canvas, values) {
  const width = canvas.clientWidth;
  if (!width) return;
  const scale = fitCanvas(canvas, width, HISTORY_HEIGHT);
  const context = canvas.getContext("2d");
  context.setTransform(scale, 0, 0, scale, 0, 0);
  context.clearRect(0, 0, width, HISTORY_HEIGHT);
  const most = Math.max(...values, 1e-9);
  const step = width / (HISTORY_MAX - 1);
  const start = width - (values.length - 1) * step;
  const y = (value) => HISTORY_HEIGHT - 1.5 - (value / most) * (HISTORY_HEIGHT - 3);
  context.beginPath();
  values.forEach((value, at) => (at ? context.lineTo(start + at * step, y(value)) : context.moveTo(start, y(value))));
  context.strokeStyle = inks().accent;
  context.lineWidth = 1.25;
  context.stroke();
  context.lineTo(width, HISTORY_HEIGHT);
  context.lineTo(start, HISTORY_HEIGHT);
  context.globalAlpha = 0.12;
  context.fillStyle = inks().accent;
  context.fill();
  context.globalAlpha = 1;
}
