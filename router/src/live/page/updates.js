// How the live view parses an update and what it does with it, and where the router refuses it.

const RATE = Math.min(10, Math.max(1, Number(new URLSearchParams(location.search).get("rate")) || 4));
// Larger updates are parsed in parts, with room for the browser in between.
const WHOLE_CHARACTERS_MAX = 300000;
const PART_CHARACTERS = 100000;

// Where the list of requests ends. In JSON, a quote inside a string has a backslash before it: so neither the key nor `}],"x` can
// be part of a name that a client chose.
function requestsEnd(text, start) {
  const next = /\}\],"[A-Za-z]/g;
  next.lastIndex = start;
  const found = next.exec(text);
  if (found) return found.index + 1;
  return text.endsWith("}]}") ? text.length - 2 : -1;
}

async function parseUpdate(text) {
  const key = '"requests":[';
  const at = text.length > WHOLE_CHARACTERS_MAX ? text.indexOf(key) : -1;
  const start = at + key.length;
  const end = at < 0 ? -1 : requestsEnd(text, start);
  if (end < 0 || end - start < PART_CHARACTERS) return JSON.parse(text);
  const parts = [];
  const border = '},{"number":';
  for (let from = start; from < end;) {
    const cut = text.indexOf(border, from + PART_CHARACTERS);
    const to = cut < 0 || cut >= end ? end : cut + 1;
    parts.push(JSON.parse(`[${text.slice(from, to)}]`));
    from = to + 1;
    await breathe();
  }
  const update = JSON.parse(text.slice(0, start) + text.slice(end));
  update.parts = parts;
  return update;
}

async function takeUpdate(update, first) {
  const unixMs = update.unixMs ?? Date.now();
  if (first) {
    resetRoster();
    resetLanes();
    resetOverview();
    findings.diagnosis = null;
    byId("lanes-empty").textContent = "No worker yet.";
  }
  link.updates += 1;
  link.skipped += update.skippedUpdates ?? 0;
  setClock(unixMs);
  takeCluster(update.cluster ?? {});
  takeStart(update.cluster ?? {});
  takeDiagnosis(update.diagnosis);
  takeTenants(update.tenants ?? []);
  let moved = [];
  for (const views of [...(update.parts ?? []), update.requests ?? []]) {
    moved = moved.concat(takeRequests(views, unixMs));
    if (update.parts) await breathe();
  }
  takeWorkers(update.workers ?? [], moved, first);
  sayMoves(moved);
  findOwn();
  if (byId("model").dataset.models !== (update.cluster?.models ?? []).join("\n")) offerModels(update.cluster?.models ?? []);
}

function sayMoves(moved) {
  if (!moved.length) return;
  const byWorker = new Map();
  for (const number of moved) {
    const worker = roster.moves.get(number);
    byWorker.set(worker, (byWorker.get(worker) ?? 0) + 1);
  }
  announce(`${[...byWorker].slice(0, 4).map(([worker, number]) => `${plural(number, "request")} moved to ${printable(worker)}`).join(", ")}`);
}

function refuse(reason, status) {
  setConnection("key", status === 401 ? "An API key is needed" : reason);
  byId("key-text").textContent = link.key ? `${reason}. The key stays in the memory of this page.` : byId("key-text").textContent;
  if (!link.asked || link.key) askForKey();
  link.asked = true;
}
