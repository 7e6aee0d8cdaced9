// The question before a worker is killed, and the kill.

const kill = { name: "", number: 0 };

// `worker` is one of an update, with the number of its process under `inflight up`.
function askToKill(name, worker) {
  Object.assign(kill, { name, number: worker.upNumber });
  byId("kill-title").textContent = `Kill ${printable(name)}?`;
  byId("kill-text").textContent = `Process ${worker.upNumber} is ended at once (SIGKILL), with ${plural(worker.requests ?? 0, "request")} in flight. `
    + "Their streams go on at other workers, with the same tokens. The worker is started again.";
  byId("kill").returnValue = "cancel";
  byId("kill").showModal();
}

async function killWorker() {
  const { name, number } = kill;
  try {
    // Paths count as names do: worker-0 is process 1.
    const answer = await fetch(`/ui/workers/${number - 1}/kill`, { method: "POST", headers: { ...authorization(), "X-Inflight-UI": "1" } });
    if (answer.ok) announce(`${printable(name)} was killed`);
    else showNotice(`${printable(name)} was not killed: ${await reasonOf(answer)}`);
  } catch (error) {
    showNotice(`${printable(name)} was not killed: ${error.message}`);
  }
}

function bindKill() {
  byId("kill").addEventListener("close", () => { if (byId("kill").returnValue === "kill") killWorker(); });
}
