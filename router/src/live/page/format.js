// Numbers, durations and counts as text.

const wholeNumber = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const oneDigit = new Intl.NumberFormat("en", { minimumFractionDigits: 1, maximumFractionDigits: 1 });

function count(value) {
  return wholeNumber.format(value ?? 0);
}

// Three significant digits or so: 0.4, 8.2, 120, 12.3 k.
function rate(value) {
  const number = value ?? 0;
  if (number >= 100000) return `${wholeNumber.format(number / 1000)} k`;
  if (number >= 10000) return `${oneDigit.format(number / 1000)} k`;
  return number >= 100 || number === 0 ? wholeNumber.format(number) : oneDigit.format(number);
}

function milliseconds(value) {
  if (value === undefined || value === null) return "–";
  if (value < 1) return `${wholeNumber.format(value * 1000)} µs`;
  if (value < 100) return `${oneDigit.format(value)} ms`;
  if (value < 10000) return `${wholeNumber.format(value)} ms`;
  return age(value);
}

function microseconds(value) {
  return milliseconds((value ?? 0) / 1000);
}

// Ages change all the time: no more digits than one can read.
function age(value) {
  const seconds = Math.max(0, value ?? 0) / 1000;
  if (seconds < 10) return `${oneDigit.format(seconds)} s`;
  if (seconds < 120) return `${wholeNumber.format(Math.floor(seconds))} s`;
  const minutes = Math.floor(seconds / 60);
  if (minutes < 120) return `${minutes} min ${String(Math.floor(seconds % 60)).padStart(2, "0")} s`;
  return `${Math.floor(minutes / 60)} h ${String(minutes % 60).padStart(2, "0")} min`;
}

// A time with at most three significant digits: 420 µs, 7.3 ms, 174 ms, 5.01 s, 73.2 s.
function threeDigits(ms) {
  if (ms > 0 && ms < 0.9995) return `${Math.round(ms * 1000)} µs`;
  if (ms < 99.95) return `${Number(ms.toPrecision(3))} ms`;
  if (ms < 999.5) return `${Math.round(ms)} ms`;
  return ms < 999500 ? `${(ms / 1000).toFixed(ms < 9995 ? 2 : ms < 99950 ? 1 : 0)} s` : age(ms);
}

function percent(share) {
  const value = (share ?? 0) * 100;
  return value > 0 && value < 0.5 ? "<1 %" : `${Math.round(value)} %`;
}

function plural(number, one, many) {
  return `${count(number)} ${number === 1 ? one : (many ?? `${one}s`)}`;
}

// Clients choose names: control characters, and those that turn the direction of text, are shown as a sign of their own.
const unprintable = /[\u0000-\u001f\u007f-\u009f\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff]/g;

function printable(name) {
  const text = String(name ?? "");
  return (text.length > 300 ? `${text.slice(0, 300)}…` : text).replace(unprintable, "\u00b7");
}
