// Figures of a stream as its reader sees them: time to the first token, tokens a second, the longest pause between two pieces.

function createMeter() {
  return { started: performance.now(), first: 0, last: 0, longest: 0, tokens: 0, promptTokens: 0, counted: false };
}

// Takes a chunk's usage, and the time of a chunk with output.
function meterChunk(meter, usage, hasOutput) {
  if (usage) {
    meter.tokens = usage.completion_tokens ?? meter.tokens;
    meter.promptTokens = usage.prompt_tokens ?? meter.promptTokens;
    meter.counted = true;
  }
  if (!hasOutput) return;
  const now = performance.now();
  if (meter.first) meter.longest = Math.max(meter.longest, now - meter.last);
  else meter.first = now;
  meter.last = now;
  // Until the router has counted them: a piece is a token or a few.
  if (!meter.counted) meter.tokens += 1;
}

function meterFigures(meter) {
  const seconds = (meter.last - meter.first) / 1000;
  return {
    firstMs: meter.first ? meter.first - meter.started : undefined, tokens: meter.tokens, promptTokens: meter.promptTokens,
    perSecond: seconds > 0.2 ? (meter.tokens - 1) / seconds : undefined, longestMs: meter.longest,
  };
}

function figuresText({ firstMs, tokens, promptTokens, perSecond, longestMs }) {
  const parts = [];
  if (firstMs === undefined) return parts;
  parts.push(`first token ${milliseconds(firstMs)}`, `${promptTokens ? `${plural(promptTokens, "prompt token")}, ` : ""}${plural(tokens, "token")}`);
  if (perSecond !== undefined) parts.push(`${rate(perSecond)} tokens/s`);
  if (longestMs > 100) parts.push(`longest pause ${milliseconds(longestMs)}`);
  return parts;
}
