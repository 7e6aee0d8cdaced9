// KV blocks of a worker: by tenant, in use by others, cached and free. A square stands for one block or for several.

const MAP_COLUMNS = 16;
const MAP_SQUARES_MAX = 320;

function kvParts(worker) {
  const total = worker.limits?.kvBlocks ?? 0;
  const used = Math.min(total, worker.load?.kvBlocksUsed ?? 0);
  const cached = Math.min(total, worker.kvBlocksCached ?? 0);
  const tenants = (worker.kvByTenant ?? []).map(({ tenant, blocks }) => ({ tenant: tenant ?? "", blocks: blocks ?? 0 }));
  const known = tenants.reduce((sum, { blocks }) => sum + blocks, 0);
  return { total, used, cached, tenants, other: Math.max(0, used - known), free: Math.max(0, total - used - cached) };
}

function describeKv(parts) {
  if (!parts.total) return "KV blocks unknown";
  const shares = parts.tenants.slice(0, 4).map(({ tenant, blocks }) => `${printable(tenant) || "anonymous"} ${percent(blocks / parts.total)}`);
  return `${count(parts.used)} of ${plural(parts.total, "KV block")} in use, ${count(parts.cached)} cached, ${count(parts.free)} free`
    + (shares.length ? `; ${shares.join(", ")}` : "");
}

// Squares in order: tenants, others, cached, free. What is there at all has one square at least.
function mapSquares(parts) {
  const each = Math.max(1, Math.ceil(parts.total / MAP_SQUARES_MAX));
  const squares = Math.ceil(parts.total / each);
  const owners = [];
  const add = (blocks, owner) => {
    const number = blocks > 0 ? Math.max(1, Math.round(blocks / each)) : 0;
    for (let i = 0; i < number && owners.length < squares; i++) owners.push(owner);
  };
  for (const { tenant, blocks } of parts.tenants) add(blocks, tenantTone(tenant));
  add(parts.other, FOREIGN);
  add(parts.cached, -1);
  while (owners.length < squares) owners.push(-2);
  return owners;
}

function drawKvMap(canvas, parts, height) {
  const owners = mapSquares(parts);
  const lines = Math.max(1, Math.ceil(owners.length / MAP_COLUMNS));
  const step = Math.max(4, Math.min(8, Math.floor(height / lines)));
  const scale = fitCanvas(canvas, MAP_COLUMNS * 8, lines * step);
  const context = canvas.getContext("2d");
  const colours = inks();
  context.setTransform(scale, 0, 0, scale, 0, 0);
  context.clearRect(0, 0, MAP_COLUMNS * 8, lines * step);
  owners.forEach((owner, at) => {
    const [x, y] = [(at % MAP_COLUMNS) * 8, Math.floor(at / MAP_COLUMNS) * step];
    context.fillStyle = owner >= 0 ? toneColour(owner) : colours.free;
    context.fillRect(x, y, 7, step - 1);
    if (owner === -1) {
      context.fillStyle = mix(colours.muted, colours.free, 0.55);
      for (let i = 0; i < step - 1; i++) context.fillRect(x + ((i * 7) / Math.max(1, step - 1) | 0), y + step - 2 - i, 1.6, 1);
    }
  });
}
