// The phases of a request's life, from its events: each millisecond of it is in one of them.

const PHASE_NAMES = { queue: "queue", wait: "at worker", prefill: "prefill", decode: "decode", gap: "gap" };
// What a phase waits for.
const GAP_NAMES = { preempted: "preempted", swapped: "swapped out", paused: "client does not read", lost: "worker lost", retry: "retry budget", quarantined: "quarantine" };

// The phase that begins with an event; undefined if it goes on. `phase` is the one before it, `started` whether there was output.
function phaseAfter(event, next, phase, started, choices) {
  // Other choices go on.
  const stops = choices === 1;
  switch (event.kind) {
    case "arrived": return { kind: "queue" };
    case "dispatched": return phase.kind === "queue" ? { kind: "wait" } : undefined;
    case "admitted": return { kind: "prefill" };
    case "chunk":
      if (started && stops && next?.kind !== "chunk") return { kind: "decode" };
      return phase.kind === "wait" ? { kind: "prefill" } : undefined;
    case "first_token": return { kind: "decode" };
    case "resumed": return event.iteration && next?.kind === "chunk" ? { kind: "prefill" } : { kind: "decode" };
    case "preempted":
    case "swapped": return stops ? { kind: "gap", detail: event.kind } : undefined;
    case "paused":
    case "lost":
    case "retry":
    case "quarantined": return { kind: "gap", detail: event.kind };
    default: return undefined;
  }
}

// Phases in their order, with their begin and end in milliseconds since the arrival, which meet; the last one ends at `endMs`.
function phasesOf(events, endMs, choices = 1) {
  const phases = [];
  let phase = { kind: "queue", from: 0 };
  let started = false;
  let last = 0;
  const close = (to) => {
    const before = phases[phases.length - 1];
    if (before?.kind === phase.kind && before.detail === phase.detail) before.to = to;
    else if (to > phase.from) phases.push({ ...phase, to });
  };
  events.forEach((event, at) => {
    const atMs = Math.max(last, Math.min(event.atMs ?? 0, endMs));
    last = atMs;
    const next = phaseAfter(event, events[at + 1], phase, started, choices);
    if (event.kind === "first_token") started = true;
    if (!next) return;
    close(atMs);
    phase = { ...next, from: atMs };
  });
  close(endMs);
  return phases;
}

const PHASES_MAX = 14;

// The first and the last ones where there are many, with what lies between as one.
function fewPhases(phases) {
  if (phases.length <= PHASES_MAX) return phases;
  const half = PHASES_MAX / 2;
  const [head, middle, tail] = [phases.slice(0, half), phases.slice(half, -half), phases.slice(-half)];
  return [...head, { kind: "more", number: middle.length, from: middle[0].from, to: middle[middle.length - 1].to }, ...tail];
}

function phaseName(phase) {
  if (phase.kind === "more") return `${phase.number} more`;
  return GAP_NAMES[phase.detail] ?? PHASE_NAMES[phase.kind];
}

// Bars in order, each at its time, on a scale from the arrival to the end.
function writePhases(node, phases, endMs) {
  const rows = fewPhases(phases);
  while (node.children.length > rows.length) node.lastChild.remove();
  while (node.children.length < rows.length) {
    const row = element("li");
    const track = element("span", "track");
    setAttribute(track, "aria-hidden", "true");
    track.append(element("i"));
    row.append(element("span", "name"), track, element("span", "time"));
    node.append(row);
  }
  const share = (ms) => `${((100 * ms) / Math.max(0.001, endMs)).toFixed(3)}%`;
  rows.forEach((phase, at) => {
    const [name, track, time] = node.children[at].children;
    setAttribute(node.children[at], "data-kind", phase.kind);
    setText(name, phaseName(phase));
    setText(time, threeDigits(phase.to - phase.from));
    setStyle(track.firstChild, "left", share(phase.from));
    setStyle(track.firstChild, "width", share(phase.to - phase.from));
  });
}
