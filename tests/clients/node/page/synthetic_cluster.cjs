// A made-up cluster for working on the page and for measuring it: requests arrive, are prefilled, decode, are preempted, move
// when a worker is killed. The same seed gives the same load. What it shows has the form of `WatchResponse` in JSON.

function randomNumbers(seed) {
  let state = seed >>> 0;
  return () => {
    state = (state + 0x6d2b79f5) >>> 0;
    let mixed = Math.imul(state ^ (state >>> 15), 1 | state);
    mixed = (mixed + Math.imul(mixed ^ (mixed >>> 7), 61 | mixed)) ^ mixed;
    return ((mixed ^ (mixed >>> 14)) >>> 0) / 4294967296;
  };
}

const ENDED_KEPT = 1000;
const FACTS = {
  version: "0.2.0", device: "NVIDIA H200", tensorParallel: 2, memoryBytes: 282 * 2 ** 30, weightBytes: 15 * 2 ** 30, kvCacheBytes: 120.5 * 2 ** 30, weightEncoding: "bf16",
  kvEncoding: "fp8",
};

class SyntheticCluster {
  constructor({ workers = 2, slots = 16, arrivals = 4, roster = 0, seed = 1, tenants, stepMs = 25, outputTokens = 220, blocks = 640 } = {}) {
    Object.assign(this, { slots, arrivals, stepMs, outputTokens, blocks });
    this.random = randomNumbers(seed);
    this.tenants = tenants ?? [
      { name: "search", weight: 2, part: 0.45 }, { name: "support", weight: 1, part: 0.3 },
      { name: "batch", weight: 1, part: 0.15 }, { name: "<img src=x onerror=alert(1)>\u202e\u0007", weight: 0.5, part: 0.1 },
    ];
    this.next = 1;
    this.requests = new Map();
    this.queue = [];
    this.ended = [];
    this.workers = [];
    this.changed = new Set();
    // Requests that were lost with a worker, until their next token.
    this.lost = new Set();
    this.onToken = new Map();
    this.served = new Map();
    this.idle = false;
    this.ends = 0;
    this.diagnosis = {};
    for (let number = 1; number <= workers; number++) this.addWorker(number);
    for (let i = 0; i < roster; i++) this.arrive({ outputTokens: 1e6 });
    this.timer = setInterval(() => this.tick(), stepMs);
    this.timer.unref();
  }

  addWorker(number) {
    this.workers.push({ name: `worker-${number - 1}`, number, state: "connected", slots: new Array(this.slots).fill(0), parked: [], iteration: 1000 * number, iterations: [], downUntil: 0 });
  }

  removeWorker(name) {
    const worker = this.workers.find((one) => one.name === name);
    this.lose(worker);
    this.workers = this.workers.filter((one) => one !== worker);
  }

  tenantByChance() {
    let left = this.random() * this.tenants.reduce((sum, { part }) => sum + part, 0);
    return (this.tenants.find(({ part }) => (left -= part) <= 0) ?? this.tenants[0]).name;
  }

  arrive({ tenant, requestId, promptTokens, outputTokens, onToken } = {}) {
    const number = this.next++;
    const request = {
      number, requestId: requestId ?? `req-${number.toString(36)}-${Math.floor(this.random() * 1e9).toString(36)}`, tenant: tenant ?? this.tenantByChance(), model: "demo",
      state: "queued", arrivedAt: Date.now(), promptTokens: promptTokens ?? 16 + Math.floor(this.random() ** 3 * 1500), cachedTokens: 0, computedTokens: 0, outputTokens: 0,
      maxTokens: outputTokens ?? 20 + Math.floor(this.random() * 2 * this.outputTokens), choices: 1, worker: "", attempts: 0, waitingReason: "no worker has room",
      events: [{ atMs: 0, kind: "arrived" }, { atMs: 0, kind: "queued", detail: "fair queue" }], slot: -1,
    };
    if (onToken) this.onToken.set(number, onToken);
    this.requests.set(number, request);
    this.queue.push(number);
    this.changed.add(number);
    return request;
  }

  note(request, kind, worker, detail, iteration) {
    if (request.events.length < 256) request.events.push({ atMs: Date.now() - request.arrivedAt, kind, worker, detail, iteration });
    this.changed.add(request.number);
  }

  end(request, outcome) {
    request.state = "ended";
    request.outcome = outcome;
    request.endedAt = Date.now();
    request.worker = "";
    this.note(request, "ended", undefined, outcome);
    this.ends += 1;
    this.ended.push(request.number);
    if (this.ended.length > ENDED_KEPT) this.requests.delete(this.ended.shift());
    this.onToken.get(request.number)?.(null, outcome);
    this.onToken.delete(request.number);
  }

  cancel(number) {
    const request = this.requests.get(number);
    if (!request || request.state === "ended") return;
    this.queue = this.queue.filter((one) => one !== number);
    for (const worker of this.workers) {
      worker.slots = worker.slots.map((one) => (one === number ? 0 : one));
      worker.parked = worker.parked.filter((one) => one !== number);
    }
    this.end(request, "cancelled");
  }

  // A worker dies: its requests go on elsewhere.
  lose(worker) {
    const lost = [...worker.slots, ...worker.parked].filter(Boolean);
    worker.slots.fill(0);
    worker.parked = [];
    worker.state = "disconnected";
    for (const number of lost.reverse()) {
      const request = this.requests.get(number);
      this.note(request, "lost", worker.name, "its worker is gone");
      if (request.outputTokens) this.lost.add(number);
      Object.assign(request, { state: "retry", worker: "", computedTokens: 0, slot: -1, waitingReason: "retry budget" });
      this.queue.unshift(number);
    }
  }

  kill(number) {
    const worker = this.workers.find((one) => one.number === number);
    if (!worker || worker.state !== "connected") return false;
    this.lose(worker);
    worker.downUntil = Date.now() + 1500;
    return true;
  }

  tick() {
    if (!this.idle) for (let due = this.arrivals * this.stepMs / 1000 + this.random() - 0.5; due > 0.5; due--) this.arrive();
    for (const worker of this.workers) {
      if (worker.state !== "connected" && Date.now() > worker.downUntil) Object.assign(worker, { state: "connected", iteration: 1 });
      if (worker.state === "connected") this.step(worker);
    }
  }

  step(worker) {
    this.place(worker);
    const work = [];
    let [budget, preempted, swapped] = [256, 0, 0];
    if (this.random() < 0.01 && worker.slots.filter(Boolean).length > this.slots * 0.6) {
      const slot = worker.slots.findLastIndex(Boolean);
      const request = this.requests.get(worker.slots[slot]);
      const swaps = this.random() < 0.5;
      request.state = swaps ? "swapped" : "preempted";
      request.waitingReason = "blocks";
      this.note(request, request.state, worker.name, swaps ? "swapping costs 4 ms, recomputing 11 ms" : "recomputing costs 3 ms, swapping 7 ms");
      worker.slots[slot] = 0;
      worker.parked.push(request.number);
      if (swaps) swapped += 1;
      else preempted += 1;
    }
    for (const [slot, number] of worker.slots.entries()) {
      if (!number) continue;
      const request = this.requests.get(number);
      const left = request.promptTokens - request.cachedTokens - request.computedTokens;
      if (left > 0) {
        if (budget <= 0) continue;
        const chunk = Math.min(left, budget);
        budget -= chunk;
        request.computedTokens += chunk;
        request.state = "prefill";
        work.push({ slot, request: number, prefillTokens: chunk });
        this.note(request, "chunk", worker.name, `${chunk} tokens`, worker.iteration + 1);
        this.serve(request, chunk);
        continue;
      }
      const drafted = number % 5 === 0 ? 3 : 0;
      const generated = drafted ? 1 + Math.floor(this.random() * 4) : 1;
      if (request.outputTokens === 0) this.note(request, "first_token", worker.name);
      else if (this.lost.delete(number)) this.note(request, "resumed", worker.name);
      request.state = "decode";
      request.outputTokens += generated;
      this.changed.add(number);
      work.push(drafted ? { slot, request: number, draftedTokens: drafted, generatedTokens: generated } : { slot, request: number, generatedTokens: generated });
      this.serve(request, 2 * generated);
      for (let i = 0; i < generated; i++) this.onToken.get(number)?.(` word${request.outputTokens}`);
      if (request.outputTokens >= request.maxTokens) {
        worker.slots[slot] = 0;
        this.end(request, "length");
      }
    }
    if (!work.length) return;
    const durationUs = Math.round(4000 + 90 * work.length + 45 * (256 - budget) * (0.9 + this.random() * 0.3) + (this.random() < 0.01 ? 16000 : 0));
    worker.iterations.push({ number: ++worker.iteration, durationUs, predictedUs: Math.round(durationUs * 0.96), targetUs: 18000, work, ...(preempted && { preempted }), ...(swapped && { swapped }) });
    if (worker.iterations.length > 256) worker.iterations.shift();
  }

  serve(request, service) {
    this.served.set(request.tenant, (this.served.get(request.tenant) ?? 0) + service);
  }

  place(worker) {
    for (const [slot, number] of worker.slots.entries()) {
      if (number) continue;
      const back = worker.parked.length && this.random() < 0.05 ? worker.parked.shift() : 0;
      const chosen = back || this.queue.shift();
      if (!chosen) return;
      const request = this.requests.get(chosen);
      if (request.state === "preempted") request.computedTokens = 0;
      if (!back) {
        request.attempts += 1;
        request.cachedTokens = Math.floor(request.promptTokens * (this.random() < 0.3 ? 0.6 : 0) / 16) * 16;
        this.note(request, "dispatched", worker.name, `prefix cache: ${request.cachedTokens} of ${request.promptTokens} tokens; least predicted time to first token`);
        this.note(request, "admitted", worker.name, `in slot ${slot}`, worker.iteration + 1);
      } else {
        this.note(request, "resumed", worker.name, `in slot ${slot}`, worker.iteration + 1);
      }
      Object.assign(request, { worker: worker.name, slot, state: "prefill", waitingReason: "" });
      worker.slots[slot] = chosen;
    }
  }

  view(request) {
    const { events, slot, arrivedAt, endedAt, trace, ...fields } = request;
    const view = { ...fields, ageMs: (endedAt ?? Date.now()) - arrivedAt, kvBlocks: this.blocksOf(request) };
    for (const key of Object.keys(view)) if (!view[key]) delete view[key];
    return view;
  }

  blocksOf(request) {
    return request.state === "ended" || request.state === "queued" || request.state === "retry" ? 0 : Math.ceil((request.cachedTokens + request.computedTokens + request.outputTokens) % 2048 / 16);
  }

  life(number) {
    const request = this.requests.get(number);
    return request && { request: this.view(request), events: request.events, ...request.trace };
  }

  workerView(worker, iterations) {
    const slots = [];
    const byTenant = new Map();
    const add = (number, slot) => {
      const request = this.requests.get(number);
      const kvBlocks = this.blocksOf(request);
      byTenant.set(request.tenant, (byTenant.get(request.tenant) ?? 0) + kvBlocks);
      slots.push({ ...(slot !== undefined && { slot }), request: number, tenant: request.tenant, state: request.state, kvBlocks, tokens: request.computedTokens + request.outputTokens });
    };
    worker.slots.forEach((number, slot) => number && add(number, slot));
    const used = slots.reduce((sum, { kvBlocks }) => sum + kvBlocks, 0);
    for (const number of worker.parked) add(number);
    const total = Math.max(this.blocks, this.slots * 60);
    return {
      name: worker.name, address: `127.0.0.1:${9000 + worker.number}`, model: "demo", state: worker.state, upNumber: worker.number,
      limits: { contextTokens: 4096, blockTokens: 16, kvBlocks: total, kvTokens: 16 * total, maxSequences: this.slots },
      load: { runningSequences: worker.slots.filter(Boolean).length, waitingSequences: 0, kvBlocksUsed: Math.min(total, used), swappedSequences: worker.parked.length, meanIterationUs: 9000 },
      kvBlocksCached: Math.round(Math.max(0, total - used) * 0.4), stepTargetUs: 18000, requests: slots.length, slots, iterations,
      facts: worker.facts ?? FACTS,
      kvByTenant: [...byTenant].map(([tenant, blocks]) => ({ tenant, blocks })).sort((one, other) => other.blocks - one.blocks),
    };
  }

  // A viewer's cursor: what it has seen.
  watch() {
    const seen = new Map();
    const changed = new Set(this.requests.keys());
    const served = new Map();
    let [number, sentAt, tokens] = [0, Date.now(), 0];
    let diagnosed;
    const watcher = {
      changed,
      next: () => {
        const now = Date.now();
        const seconds = Math.max(0.05, (now - sentAt) / 1000);
        sentAt = now;
        const workers = this.workers.map((worker) => {
          const last = seen.get(worker.name) ?? 0;
          const fresh = worker.iterations.filter(({ number }) => number > last || last > worker.iteration);
          seen.set(worker.name, worker.iteration);
          return this.workerView(worker, fresh);
        });
        tokens = workers.reduce((sum, { iterations }) => sum + iterations.reduce((all, { work }) => all + work.reduce((part, cell) => part + (cell.generatedTokens ?? 0), 0), 0), 0);
        const requests = [...changed].map((one) => this.requests.get(one)).filter(Boolean).map((request) => this.view(request));
        changed.clear();
        const rates = this.tenants.map(({ name }) => ((this.served.get(name) ?? 0) - (served.get(name) ?? 0)) / seconds);
        for (const { name } of this.tenants) served.set(name, this.served.get(name) ?? 0);
        const all = rates.reduce((sum, one) => sum + one, 0) || 1;
        const weights = this.tenants.reduce((sum, { weight }) => sum + weight, 0);
        const open = [...this.requests.values()].filter(({ state }) => state !== "ended");
        const fresh = diagnosed !== this.diagnosis && { diagnosis: this.diagnosis };
        diagnosed = this.diagnosis;
        return {
          number: ++number, unixMs: now, workers, requests, ...fresh,
          tenants: this.tenants.map(({ name, weight }, at) => ({
            tenant: name, weight, servicePerSecond: rates[at], share: rates[at] / all, fairShare: weight / weights,
            queuedRequests: open.filter((one) => one.tenant === name && one.state === "queued").length,
            inFlightRequests: open.filter((one) => one.tenant === name && one.worker).length,
          })),
          cluster: {
            router: "router-0", version: "0.2.0", routers: 1, openRequests: open.length, queuedRequests: this.queue.length, inFlightRequests: open.filter((one) => one.worker).length,
            retryingRequests: open.filter((one) => one.state === "retry").length, outputTokensPerSecond: tokens / seconds, promptTokensPerSecond: 900 + 200 * this.random(), endedPerSecond: 3.2,
            firstTokenMs: { p50: 81.2, p90: 240.4, p99: 810.1 }, gapMs: { p50: 12.1, p90: 19.7, p99: 44.2 }, queueMs: { p50: 0.4, p90: 12.6, p99: 88.3 }, viewers: 1, models: ["demo"], canKillWorkers: true,
          },
        };
      },
    };
    return watcher;
  }

  close() {
    clearInterval(this.timer);
  }
}

module.exports = { SyntheticCluster };
