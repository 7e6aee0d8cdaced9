// Colours of requests, tenants and states. Any two of a scheme are at least 0.08 apart in Oklab as people with protanopia,
// deuteranopia or tritanopia see them, the first six 0.11.

const HUES = {
  light: ["#3549a1", "#d06594", "#14b4e0", "#8f2d0f", "#b3ae2a", "#73840a", "#938ff3", "#875280", "#257dcb", "#bf9674"],
  dark: ["#61c4fd", "#f8d878", "#6b69bb", "#fa96ae", "#8bac52", "#a56301", "#ae8091", "#88f3c0", "#079ac8", "#d2d8fe"],
};
const INKS = {
  light: { surface: "#ffffff", empty: "#f1f3f6", line: "#d8dce3", ink: "#1a2027", muted: "#57616d", parked: "#a6adb6", bar: "#8b98a7", over: "#c2740a", accent: "#1d5fb8", free: "#e3e6eb", other: "#79838f" },
  dark: { surface: "#171c22", empty: "#10151a", line: "#2b333d", ink: "#e5e9ee", muted: "#9ba7b4", parked: "#656f7a", bar: "#5d6b7a", over: "#edb458", accent: "#82b4ff", free: "#262e37", other: "#8793a0" },
};
const TONES = HUES.light.length;
// Tone of requests of other routers and of the sum of small tenants.
const FOREIGN = TONES;
const TENANT_TONES_MAX = 4096;

const darkPreferred = matchMedia("(prefers-color-scheme: dark)");
const tenantTones = new Map();

function isDark() {
  return settings.theme === "dark" || (settings.theme === "auto" && darkPreferred.matches);
}

function inks() {
  return INKS[isDark() ? "dark" : "light"];
}

function toneColour(tone) {
  return tone === FOREIGN ? inks().other : HUES[isDark() ? "dark" : "light"][tone];
}

// Neighbouring numbers get tones three apart.
function requestTone(number) {
  return number ? (number * 3) % TONES : FOREIGN;
}

// A tenant keeps the tone of its first appearance; beyond the table, its name decides.
function tenantTone(tenant) {
  const known = tenantTones.get(tenant);
  if (known !== undefined) return known;
  if (tenant === "(other)") return FOREIGN;
  if (tenantTones.size < TENANT_TONES_MAX) {
    const tone = tenantTones.size % TONES;
    tenantTones.set(tenant, tone);
    return tone;
  }
  let hash = 0;
  for (let at = 0; at < tenant.length && at < 64; at++) hash = (hash * 31 + tenant.charCodeAt(at)) >>> 0;
  return hash % TONES;
}

function toneOf(number, tenant) {
  return settings.tone === "tenant" ? tenantTone(tenant) : requestTone(number);
}

function channels(colour) {
  return [1, 3, 5].map((at) => parseInt(colour.slice(at, at + 2), 16));
}

// `share` of the first colour, the rest of the second.
function mix(first, second, share) {
  const [from, to] = [channels(first), channels(second)];
  return `#${from.map((value, i) => Math.round(value * share + to[i] * (1 - share)).toString(16).padStart(2, "0")).join("")}`;
}

// A pixel of an ImageData seen as 32-bit words; every machine that browsers run on is little-endian.
function pixel(colour) {
  const [red, green, blue] = channels(colour);
  return ((255 << 24) | (blue << 16) | (green << 8) | red) >>> 0;
}
