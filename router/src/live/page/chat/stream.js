// Sending: a message, its answer as it streams, stopping, another answer to the same message.

const FLUSH_MS = 60;
const FLUSH_HIDDEN_MS = 500;
const SPOKEN_CHARACTERS_MAX = 1000;
const stream = { controller: null, turn: null, scheduled: false, editing: false };

// Without it, answers come whole.
const canStream = () => typeof ReadableStream === "function" && "body" in Response.prototype;

function sendMessage() {
  const text = byId("prompt").value.trim();
  if (stream.controller || !text) return;
  if (stream.editing) removeTurns(conversation.turns.findLastIndex(({ role }) => role === "user"));
  if (conversation.turns.length > TURNS_MAX - 2) {
    showNotice(`A chat has at most ${TURNS_MAX} turns: begin a new one.`);
    return;
  }
  endEdit();
  setPrompt("");
  const question = { role: "user", text };
  conversation.turns.push(question);
  showTurn(question);
  answerLast();
}

function regenerate() {
  if (stream.controller) return;
  const from = conversation.turns.findLastIndex(({ role }) => role === "user") + 1;
  if (from === 0) return;
  removeTurns(from);
  byId("prompt").focus();
  answerLast();
}

async function answerLast() {
  const controller = new AbortController();
  const random = crypto.getRandomValues(new Uint32Array(2));
  const answer = newAnswer(`chat-${random[0].toString(36)}${random[1].toString(36)}`, conversation.model);
  const streamed = canStream();
  const body = JSON.stringify(requestBody(conversation.turns, streamed));
  conversation.turns.push(answer);
  stream.controller = controller;
  const turn = showTurn(answer);
  Object.assign(turn, { meter: createMeter(), complete: !streamed });
  stream.turn = turn;
  Object.assign(watch, { turn, request: null, worker: null });
  for (const one of shown) if (one.trace) one.trace.life.open = false;
  setStreaming(true);
  document.documentElement.scrollTop = document.documentElement.scrollHeight;
  keepWatching();
  keepConversation();
  try {
    const headers = { "Content-Type": "application/json", "X-Request-Id": answer.id, ...authorization() };
    const response = await fetch("/v1/chat/completions", { method: "POST", headers, body, signal: controller.signal });
    if (!response.ok) {
      if (response.status === 401) askForKey();
      throw new Error(await reasonOf(response));
    }
    if (streamed) await readEvents(response.body, (_name, data) => takeChunk(turn, data));
    else takeWhole(turn, await response.json());
    if (!turn.complete) throw new Error("The stream ended before the answer was complete.");
    endAnswer(turn, "done", "");
  } catch (error) {
    if (controller.signal.aborted) endAnswer(turn, "stopped", "");
    else endAnswer(turn, "failed", error instanceof TypeError ? `The router does not answer: ${error.message}` : error.message);
  }
}

function addText(answer, name, text) {
  const room = ANSWER_CHARACTERS_MAX - answer[name].length;
  if (text && room > 0) answer[name] += text.slice(0, room);
}

function addCall(answer, { index = 0, function: called = {} }) {
  if (!Number.isInteger(index) || index < 0 || index >= CALLS_MAX) return;
  while (answer.calls.length <= index) answer.calls.push({ name: "", arguments: "" });
  addText(answer.calls[index], "name", called.name);
  addText(answer.calls[index], "arguments", called.arguments);
}

// A message, or what a chunk adds to it.
function addMessage(answer, message) {
  addText(answer, "text", message.content);
  addText(answer, "reasoning", message.reasoning_content ?? message.reasoning);
  for (const [at, call] of (message.tool_calls ?? []).entries()) addCall(answer, { index: at, ...call });
}

function takeChunk(turn, data) {
  if (data === "[DONE]") {
    turn.complete = true;
    return;
  }
  const chunk = JSON.parse(data);
  if (chunk.error) throw new Error(chunk.error.message ?? "The stream failed.");
  const { answer, meter } = turn;
  const choice = chunk.choices?.[0];
  const delta = choice?.delta ?? {};
  meterChunk(meter, chunk.usage, Boolean(delta.content || delta.reasoning_content || delta.reasoning || delta.tool_calls?.length));
  addMessage(answer, delta);
  answer.finish = choice?.finish_reason ?? answer.finish;
  if (stream.scheduled) return;
  stream.scheduled = true;
  setTimeout(flush, document.hidden ? FLUSH_HIDDEN_MS : FLUSH_MS);
}

function takeWhole(turn, body) {
  const { answer, meter } = turn;
  const choice = body.choices?.[0] ?? {};
  addMessage(answer, choice.message ?? {});
  answer.finish = choice.finish_reason ?? "";
  answer.figures = { wholeMs: performance.now() - meter.started, tokens: body.usage?.completion_tokens ?? 0, promptTokens: body.usage?.prompt_tokens ?? 0 };
}

// Several pieces at once: a layout for each token would be too many.
function flush() {
  stream.scheduled = false;
  const { turn } = stream;
  if (!turn) return;
  if (!turn.answer.figures?.wholeMs) turn.answer.figures = meterFigures(turn.meter);
  stayAtEnd(() => writeTurn(turn));
}

// Whoever reads the end of the page still does so after a change.
function stayAtEnd(change) {
  const root = document.documentElement;
  const atEnd = root.scrollHeight - root.scrollTop - root.clientHeight < 60;
  change();
  if (atEnd) root.scrollTop = root.scrollHeight;
}

function endAnswer(turn, state, error) {
  const { answer } = turn;
  Object.assign(answer, { state, error: printable(error) });
  stream.controller = null;
  flush();
  stream.turn = null;
  stayAtEnd(() => setStreaming(false));
  keepConversation();
  turn.trace.lane.hidden = true;
  endOfLife(turn);
  if (state === "failed") announce(`The request failed: ${answer.error}`);
  else announce(`${state === "stopped" ? "Stopped" : "Answer"}: ${answer.text.slice(0, SPOKEN_CHARACTERS_MAX)}`);
}

function setStreaming(streams) {
  const focused = document.activeElement === byId("stop") || document.activeElement === byId("send");
  byId("send").hidden = streams;
  byId("stop").hidden = !streams;
  if (focused) byId("prompt").focus();
  for (const turn of shown) writeTurn(turn);
  writeTitle();
}

function stopStream() {
  stream.controller?.abort();
}

function setPrompt(text) {
  byId("prompt").value = text;
  growPrompt();
}

// As high as its lines, to a limit of the style sheet.
function growPrompt() {
  const prompt = byId("prompt");
  setStyle(prompt, "height", "auto");
  setStyle(prompt, "height", `${prompt.scrollHeight + 2}px`);
}

function beginEdit() {
  const question = conversation.turns.findLast(({ role }) => role === "user");
  if (!question || stream.controller) return;
  stream.editing = true;
  byId("editing").hidden = false;
  setPrompt(question.text);
  byId("prompt").focus();
}

function endEdit() {
  stream.editing = false;
  byId("editing").hidden = true;
}

function newChat() {
  stopStream();
  watch.turn = null;
  stream.turn = null;
  removeTurns(0);
  endEdit();
  setPrompt("");
  keepConversation();
  announce("A new chat");
  byId("prompt").focus();
}
