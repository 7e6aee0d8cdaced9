// Small helpers for the document. Text reaches it through `textContent` and `nodeValue` only.

const byId = (id) => document.getElementById(id);

function element(name, className, text) {
  const made = document.createElement(name);
  if (className) made.className = className;
  if (text !== undefined) made.textContent = text;
  return made;
}

// Writing the same text again would cost a layout.
function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

function setAttribute(node, name, value) {
  if (value === null || value === undefined) {
    if (node.hasAttribute(name)) node.removeAttribute(name);
  } else if (node.getAttribute(name) !== String(value)) {
    node.setAttribute(name, value);
  }
}

function setStyle(node, name, value) {
  if (node.style.getPropertyValue(name) !== value) node.style.setProperty(name, value);
}

const STATE_TONES = {
  queued: "warn", waiting: "warn", prefill: "good", decode: "good", preempted: "bad", swapped: "bad", retry: "bad", quarantined: "bad",
  paused: "warn", ended: "", connected: "good", draining: "warn", disconnected: "bad", ejected: "bad", gone: "bad",
};

function setPill(node, state) {
  setText(node, state);
  setAttribute(node, "data-tone", STATE_TONES[state] ?? "");
}

// Sets a canvas to a size in CSS pixels; returns the pixels per CSS pixel.
function fitCanvas(canvas, width, height) {
  const scale = Math.min(3, Math.max(1, window.devicePixelRatio || 1));
  const [wide, high] = [Math.max(1, Math.round(width * scale)), Math.max(1, Math.round(height * scale))];
  if (canvas.width !== wide || canvas.height !== high) {
    canvas.width = wide;
    canvas.height = high;
    canvas.style.height = `${height}px`;
  }
  return scale;
}

// Lets the browser draw and take input between two parts of a long job.
function breathe() {
  return new Promise((resolve) => {
    const channel = new MessageChannel();
    channel.port1.onmessage = () => resolve();
    channel.port2.postMessage(0);
  });
}
