// What a worker says of itself: device, memory, version, model. Older workers say nothing.

function sizeOf(bytes) {
  if (!bytes) return "";
  return bytes < 2 ** 30 ? `${rate(bytes / 2 ** 20)} MiB` : `${rate(bytes / 2 ** 30)} GiB`;
}

function memoryOf({ weightBytes, weightEncoding, kvCacheBytes, kvEncoding, memoryBytes }) {
  const part = (name, bytes, encoding) => bytes && `${name} ${[sizeOf(bytes), printable(encoding)].filter(Boolean).join(", ")}`;
  return [part("weights", weightBytes, weightEncoding), part("KV", kvCacheBytes, kvEncoding), memoryBytes && `of ${sizeOf(memoryBytes)}`].filter(Boolean).join(" · ");
}

function detailsOf(worker) {
  const { facts = {}, limits = {} } = worker;
  const ranks = facts.tensorParallel > 1 ? `, tensor parallel over ${facts.tensorParallel}` : "";
  const rows = [
    ["Device", facts.device && printable(facts.device) + ranks], ["Memory", memoryOf(facts)], ["Model", printable(worker.model)],
    ["Context", limits.contextTokens && plural(limits.contextTokens, "token")],
    ["KV cache", limits.kvBlocks && `${plural(limits.kvBlocks, "block")}, ${plural(limits.kvTokens ?? 0, "token")}`],
    ["Slots", limits.maxSequences && count(limits.maxSequences)], ["Version", printable(facts.version)], ["Address", printable(worker.address)],
  ];
  return rows.filter(([, text]) => text);
}

function showWorker(lane) {
  byId("worker-title").textContent = printable(lane.name);
  byId("worker-details").replaceChildren(...detailsOf(lane.worker).flatMap(([name, text]) => [element("dt", "", name), element("dd", "", text)]));
  byId("worker").showModal();
}
