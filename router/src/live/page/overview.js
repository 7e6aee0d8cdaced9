// Figures of the whole cluster: counts and rates with their last hour, percentiles; the title of the document.

const SPARK_HEIGHT = 26;

const TILES = [
  ["in flight", "inFlightRequests", count, ""],
  ["queued", "queuedRequests", count, ""],
  ["ended", "endedPerSecond", rate, "/s"],
  ["output tokens", "outputTokensPerSecond", rate, "/s"],
  ["prompt tokens", "promptTokensPerSecond", rate, "/s"],
  // Only while there are some.
  ["retrying", "retryingRequests", count, ""],
];
const PERCENTILES = [["First token", "firstTokenMs"], ["Gap", "gapMs"], ["Queue", "queueMs"]];
const overview = { tiles: new Map(), rows: new Map(), cluster: {}, title: "", history: createHistory(TILES.map(([, field]) => field)) };

function buildOverview() {
  for (const [name, field, , unit] of TILES) {
    const tile = element("div");
    tile.hidden = field === "retryingRequests";
    const figure = element("dd");
    const number = document.createTextNode("–");
    figure.append(number, " ", element("small", "", unit));
    const canvas = element("canvas");
    setAttribute(canvas, "aria-hidden", "true");
    tile.append(element("dt", "", name), figure, canvas);
    byId("counts").append(tile);
    overview.tiles.set(field, { tile, number, canvas });
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
  sampleHistory(overview.history, cluster, performance.now());
}

function resetOverview() {
  overview.cluster = {};
  clearHistory(overview.history);
}

function writeOverview() {
  const { cluster, history } = overview;
  const routers = (cluster.routers ?? 1) > 1 ? ` · ${cluster.routers} routers` : "";
  setText(byId("router"), [cluster.router, cluster.version].filter(Boolean).map(printable).join(" ") + routers);
  for (const [, field, write] of TILES) {
    const { tile, number, canvas } = overview.tiles.get(field);
    const text = write(cluster[field]);
    if (number.nodeValue !== text) number.nodeValue = text;
    const points = history.points.get(field);
    setAttribute(tile, "title", points.length ? `Last ${age(points.length * history.step)}: at most ${write(Math.max(...points))}` : null);
    if (field === "retryingRequests") {
      tile.hidden = !cluster[field];
      setAttribute(tile, "class", "strong");
    }
    drawHistory(canvas, points, SPARK_HEIGHT);
  }
  for (const [, field] of PERCENTILES) {
    for (const { key, cell } of overview.rows.get(field)) setText(cell, milliseconds(cluster[field]?.[key]));
  }
  writeTitle();
}

// What a tab that is not in front shows.
function writeTitle() {
  const inFlight = overview.cluster.inFlightRequests ?? 0;
  const state = { waiting: "Disconnected", key: "Key needed" }[link.state] ?? (view.paused ? "Paused" : inFlight ? `${count(inFlight)} in flight` : "");
  const title = state ? `${state} – Inflight` : "Inflight";
  if (overview.title !== title) document.title = overview.title = title;
}
