// The conversation: turns and settings, kept in the session storage of this tab. Keys are not among them.

const CONVERSATION_NAME = "inflight-chat";
const TURNS_MAX = 200;
// Maximum characters of the stored conversation; the oldest turns are dropped first.
const KEPT_CHARACTERS_MAX = 1000000;
const ANSWER_CHARACTERS_MAX = 400000;
const CALLS_MAX = 64;

// A turn is `{ role: "user", text }` or an answer: `{ role: "assistant", text, reasoning, calls, state, error, figures, ... }`, see `newAnswer`.
const conversation = { turns: [], system: "", temperature: "", maxTokens: "", model: "" };
const KEPT_SETTINGS = ["system", "temperature", "maxTokens", "model"];

function newAnswer(id, model) {
  return {
    role: "assistant", id, model, text: "", reasoning: "", calls: [],
    // "streaming", "done", "stopped" or "failed" with an error.
    state: "streaming", error: "", finish: "", figures: null,
    // What the live view tells: the request's number, its phases until `endMs`, and the moves to other workers.
    number: 0, phases: [], endMs: 0, moves: [],
  };
}

// What a page that is loaded again shows of an answer that streamed.
function keptTurn(turn) {
  return turn.state === "streaming" ? { ...turn, state: "stopped" } : turn;
}

function keepConversation() {
  let turns = conversation.turns.map(keptTurn);
  try {
    let kept = "";
    for (;;) {
      kept = JSON.stringify({ ...conversation, turns });
      if (kept.length <= KEPT_CHARACTERS_MAX || turns.length === 0) break;
      turns = turns.slice(Math.max(1, turns.length >> 2));
    }
    sessionStorage.setItem(CONVERSATION_NAME, kept);
  } catch {
    // It holds until the page is closed.
  }
}

const isText = (value) => typeof value === "string";

function isTurn(turn) {
  if (turn?.role === "user") return isText(turn.text);
  return turn?.role === "assistant" && isText(turn.text) && isText(turn.reasoning) && Array.isArray(turn.calls) && Array.isArray(turn.phases) && Array.isArray(turn.moves);
}

function loadConversation() {
  try {
    const kept = JSON.parse(sessionStorage.getItem(CONVERSATION_NAME) ?? "{}");
    for (const name of KEPT_SETTINGS) if (isText(kept[name])) conversation[name] = kept[name];
    if (Array.isArray(kept.turns) && kept.turns.every(isTurn)) conversation.turns = kept.turns.slice(-TURNS_MAX);
  } catch {
    // Storage may be forbidden or hold something else: a new conversation begins.
  }
}

// The messages of a request: neighbours of one role are one message, as after an answer that failed.
function messagesOf(turns) {
  const messages = conversation.system.trim() ? [{ role: "system", content: conversation.system }] : [];
  for (const { role, text } of turns) {
    if (role === "assistant" && !text) continue;
    const last = messages[messages.length - 1];
    if (last?.role === role) last.content += `\n\n${text}`;
    else messages.push({ role, content: text });
  }
  return messages;
}

function requestBody(turns, stream) {
  const number = (text) => (text === "" || !Number.isFinite(Number(text)) ? undefined : Number(text));
  return {
    model: conversation.model || undefined, messages: messagesOf(turns), temperature: number(conversation.temperature), max_tokens: number(conversation.maxTokens),
    stream, ...(stream && { stream_options: { include_usage: true } }),
  };
}
