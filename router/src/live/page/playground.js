// The playground: one request at a time, streamed, and shown in the lanes.

const ANSWER_CHARACTERS_MAX = 400000;
const play = {
  controller: null, id: "", number: 0, text: null, waiting: "", scheduled: false, started: 0, first: 0, last: 0, longest: 0, tokens: 0,
  worker: "", moves: 0, state: "",
};

function offerModels(models) {
  const select = byId("model");
  const chosen = select.value;
  select.dataset.models = models.join("\n");
  select.replaceChildren(...models.slice(0, 200).map((model) => {
    const option = element("option", "", printable(model));
    option.value = model;
    return option;
  }));
  if (models.includes(chosen)) select.value = chosen;
}

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
    controller, id: `page-${random[0].toString(36)}${random[1].toString(36)}`, number: 0, waiting: "", started: performance.now(), first: 0, last: 0,
    longest: 0, tokens: 0, worker: "", moves: 0, text: document.createTextNode(""),
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
  if (chunk.usage) play.tokens = chunk.usage.completion_tokens ?? play.tokens;
  const choice = chunk.choices?.[0];
  const text = choice?.delta?.content ?? choice?.delta?.reasoning_content ?? choice?.text ?? "";
  if (!text) return;
  const now = performance.now();
  if (play.first) play.longest = Math.max(play.longest, now - play.last);
  else play.first = now;
  play.last = now;
  if (!chunk.usage) play.tokens += 1;
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
  const parts = [play.state];
  if (play.first) {
    const seconds = (play.last - play.first) / 1000;
    parts.push(`first token ${milliseconds(play.first - play.started)}`, plural(play.tokens, "token"));
    if (seconds > 0.2) parts.push(`${rate((play.tokens - 1) / seconds)} tokens/s`);
    if (play.longest > 100) parts.push(`longest pause ${milliseconds(play.longest)}`);
  }
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
  announce(failed ? `The playground's request failed: ${state}` : `The playground's answer is ${state === "Done" ? "complete" : "stopped"}, ${plural(play.tokens, "token")}`);
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
  if (play.controller && !play.first && play.state !== request.state) {
    play.state = printable(request.state) || play.state;
    writePlay();
  } else if (play.controller && play.first) {
    play.state = request.state === "ended" ? "" : printable(request.state);
  }
}
