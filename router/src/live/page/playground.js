// The playground: one request at a time, streamed, and shown in the lanes.

const ANSWER_CHARACTERS_MAX = 400000;
const play = {
  controller: null, id: "", number: 0, text: null, waiting: "", scheduled: false, meter: createMeter(),
  worker: "", moves: 0, state: "",
};

// The key typed into the playground, else that of the page.
function playgroundKey() {
  const key = byId("tenant-key").value || link.key;
  return key ? { Authorization: `Bearer ${key}` } : {};
}

function playBody() {
  const prompt = byId("prompt").value;
  const chat = byId("endpoint").value === "chat";
  const number = (id) => (byId(id).value === "" ? undefined : Number(byId(id).value));
  return {
    url: chat ? "/v1/chat/completions" : "/v1/completions",
    body: {
      model: byId("model").value || undefined,
      ...(chat ? { messages: [{ role: "user", content: prompt }] } : { prompt }),
      max_tokens: number("max-tokens"), temperature: number("temperature"), seed: number("seed"),
      stream: true, stream_options: { include_usage: true },
    },
  };
}

async function sendPrompt(event) {
  event.preventDefault();
  if (play.controller) return;
  const controller = new AbortController();
  const random = crypto.getRandomValues(new Uint32Array(2));
  Object.assign(play, {
    controller, id: `page-${random[0].toString(36)}${random[1].toString(36)}`, number: 0, waiting: "", meter: createMeter(), worker: "", moves: 0, text: document.createTextNode(""),
  });
  byId("answer-text").replaceChildren(play.text);
  setOwn(0);
  setPlaying(true, "Waiting for the first token");
  const { url, body } = playBody();
  const headers = { "Content-Type": "application/json", "X-Request-Id": play.id, ...playgroundKey() };
  try {
    const answer = await fetch(url, { method: "POST", headers, body: JSON.stringify(body), signal: controller.signal });
    if (!answer.ok) throw new Error(await reasonOf(answer));
    await readEvents(answer.body, takeChunk);
    endPlay("Done", "");
  } catch (error) {
    if (controller.signal.aborted) endPlay("Stopped", "");
    else endPlay(printable(error.message), "failed");
  }
}

function takeChunk(_name, data) {
  if (data === "[DONE]") return;
  const chunk = JSON.parse(data);
  if (chunk.error) throw new Error(chunk.error.message ?? "the stream failed");
  const choice = chunk.choices?.[0];
  const text = choice?.delta?.content ?? choice?.delta?.reasoning_content ?? choice?.text ?? "";
  meterChunk(play.meter, chunk.usage, text !== "");
  if (!text) return;
  play.waiting += text;
  if (!play.scheduled) {
    play.scheduled = true;
    setTimeout(flushAnswer, document.hidden ? 500 : 33);
  }
}

// Several pieces at once: a layout for each token would be too many.
function flushAnswer() {
  play.scheduled = false;
  const answer = byId("answer");
  const atEnd = answer.scrollHeight - answer.scrollTop - answer.clientHeight < 30;
  if (play.text.length < ANSWER_CHARACTERS_MAX) play.text.appendData(play.waiting);
  play.waiting = "";
  if (atEnd) answer.scrollTop = answer.scrollHeight;
  writePlay();
}

function writePlay() {
  const parts = [play.state, ...figuresText({ ...meterFigures(play.meter), promptTokens: 0 })];
  if (play.worker) parts.push(play.moves ? `moved ${play.moves === 1 ? "once" : `${play.moves} times`}, now at ${printable(play.worker)}` : `at ${printable(play.worker)}`);
  setText(byId("answer-state"), parts.filter(Boolean).join(" · "));
}

function setPlaying(playing, state) {
  play.state = state;
  byId("send").disabled = playing;
  byId("stop").disabled = !playing;
  setAttribute(byId("answer"), "data-state", null);
  setAttribute(byId("answer"), "aria-busy", playing ? "true" : "false");
  byId("follow").hidden = !play.number;
  writePlay();
}

function endPlay(state, failed) {
  const focused = document.activeElement === byId("stop");
  play.controller = null;
  flushAnswer();
  setPlaying(false, state);
  setAttribute(byId("answer"), "data-state", failed || null);
  announce(failed ? `The playground's request failed: ${state}` : `The playground's answer is ${state === "Done" ? "complete" : "stopped"}, ${plural(play.meter.tokens, "token")}`);
  if (focused) byId("send").focus();
}

function setOwn(number) {
  view.own = number;
  for (const lane of lanes.all.values()) lane.dirty = true;
}

// Finds the playground's request in the roster by its id, and sees where it runs.
function findOwn() {
  if (!play.id) return;
  if (!play.number || !roster.views.has(play.number)) {
    play.number = 0;
    for (const request of roster.views.values()) {
      if (request.requestId === play.id || request.requestId?.startsWith(`${play.id}-`)) play.number = request.number;
    }
    setOwn(play.number);
    byId("follow").hidden = !play.number;
  }
  const request = roster.views.get(play.number);
  if (!request) return;
  if (request.worker && request.worker !== play.worker) {
    if (play.worker) play.moves += 1;
    play.worker = request.worker;
    writePlay();
  }
  if (play.controller && !play.meter.first && play.state !== request.state) {
    play.state = printable(request.state) || play.state;
    writePlay();
  } else if (play.controller && play.meter.first) {
    play.state = request.state === "ended" ? "" : printable(request.state);
  }
}
