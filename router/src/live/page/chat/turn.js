// Turns of the conversation as articles.

// Turns that are shown, in order: `{ answer, node, ... }`, `answer` being the turn of the conversation, also one of the user.
const shown = [];

function button(className, text, act, label) {
  const made = element("button", className, text);
  made.type = "button";
  if (label) setAttribute(made, "aria-label", label);
  made.addEventListener("click", act);
  return made;
}

function showTurn(answer) {
  const turn = answer.role === "user" ? buildQuestion(answer) : buildAnswer(answer);
  shown.push(turn);
  byId("turns").append(turn.node);
  byId("empty").hidden = true;
  writeTurn(turn);
  return turn;
}

function article(role, name) {
  const node = element("article", "turn");
  node.dataset.role = role;
  const title = element("h2", "hidden", name);
  title.id = `turn-${++turnNumbers}`;
  setAttribute(node, "aria-labelledby", title.id);
  node.append(title);
  return node;
}

let turnNumbers = 0;

function buildQuestion(answer) {
  const node = article("user", "You");
  const edit = button("quiet", "Edit", () => beginEdit(), "Edit the last message");
  const foot = element("div", "turn-foot");
  foot.append(edit);
  node.append(element("div", "body", answer.text), foot);
  return { answer, node, edit };
}

function buildAnswer(answer) {
  const turn = { answer, node: article("assistant", answer.model ? `Answer of ${printable(answer.model)}` : "Answer"), trace: createTrace(), meter: null, reading: false, lifeWanted: false };
  turn.reasoning = element("details", "reasoning");
  turn.reasoningText = element("div", "reasoning-text");
  turn.reasoning.append(element("summary", "", "Reasoning"), turn.reasoningText);
  turn.body = element("div", "body");
  turn.calls = element("div", "calls");
  turn.error = element("div", "error");
  turn.errorText = element("p");
  turn.retry = button("", "Retry", regenerate, "Retry: send the last message again");
  turn.error.append(turn.errorText, turn.retry);
  turn.foot = element("div", "turn-foot");
  turn.figures = element("p", "figures");
  turn.copy = button("quiet", "Copy", () => copyText(turn.copy, turn.body, "The answer", answer.text), "Copy the answer");
  turn.again = button("quiet", "Regenerate", regenerate, "Regenerate the answer");
  turn.link = element("a", "", "");
  turn.link.target = "_blank";
  turn.link.rel = "noopener";
  turn.more = button("more", "⋯", () => {}, "More for this answer");
  bindMenu(turn.more, () => answerActions(turn));
  const place = element("div", "menu-place");
  place.append(turn.more);
  turn.buttons = element("div", "turn-buttons");
  turn.buttons.append(turn.copy, turn.again, turn.link, place);
  turn.foot.append(turn.figures, turn.buttons);
  turn.node.append(turn.reasoning, turn.body, turn.calls, turn.error, turn.trace.node, turn.foot);
  return turn;
}

// The worker can be killed where the live view offers it.
function answerActions(turn) {
  const { worker } = watch;
  const runs = turn.answer.state === "streaming" && watch.turn === turn;
  const can = runs && view.canKill && Boolean(worker?.upNumber) && worker.state !== "disconnected";
  return [{ text: can ? `Kill its worker, ${printable(worker.name)}…` : "Kill its worker", disabled: !can, act: () => askToKill(worker.name, worker) }];
}

function pretty(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    // It still streams, or is no JSON.
    return text;
  }
}

function writeCalls(turn) {
  const { calls } = turn.answer;
  calls.forEach((call, at) => {
    if (!turn.calls.children[at]) {
      const node = element("div", "call");
      const written = element("pre");
      written.tabIndex = 0;
      setAttribute(written, "role", "group");
      setAttribute(written, "aria-label", `Arguments of call ${at + 1}`);
      node.append(element("p", "call-name"), written);
      turn.calls.append(node);
    }
    const [name, written] = turn.calls.children[at].children;
    setText(name, `Calls ${printable(call.name)}`);
    setText(written, pretty(call.arguments));
  });
}

function figuresOf({ figures, finish, state }) {
  const parts = figures?.wholeMs ? [`answered in ${milliseconds(figures.wholeMs)}`, plural(figures.tokens, "token")] : figures ? figuresText(figures) : [];
  if (state === "streaming" && parts.length === 0) parts.push("Waiting for the first token");
  if (state === "stopped") parts.unshift("Stopped");
  if (finish === "length") parts.unshift("Cut at the limit of tokens");
  return parts.join(" · ");
}

function writeTurn(turn) {
  const { answer } = turn;
  const last = conversation.turns.length - 1;
  const at = conversation.turns.indexOf(answer);
  if (answer.role === "user") {
    turn.edit.hidden = at < last - 1 || stream.controller !== null;
    return;
  }
  const streams = answer.state === "streaming";
  setAttribute(turn.node, "data-state", answer.state);
  setAttribute(turn.node, "aria-busy", streams ? "true" : null);
  turn.reasoning.hidden = !answer.reasoning;
  setText(turn.reasoningText, answer.reasoning);
  writeMarkdown(turn.body, answer.text);
  writeCalls(turn);
  turn.error.hidden = answer.state !== "failed";
  setText(turn.errorText, answer.error);
  turn.retry.hidden = at !== last;
  setText(turn.figures, figuresOf(answer));
  turn.copy.hidden = streams || !answer.text;
  turn.again.hidden = streams || answer.state === "failed" || at !== last;
  turn.more.hidden = at !== last || !streams;
  turn.link.hidden = !answer.number;
  if (answer.number) {
    setText(turn.link, `Request ${answer.number}`);
    setAttribute(turn.link, "href", `/ui#request=${answer.number}`);
    setAttribute(turn.link, "aria-label", `Request ${answer.number} in the live view, in a new tab`);
  }
  writeTrace(turn.trace, answer);
}

// Takes turns from one on out of the conversation and the page.
function removeTurns(from) {
  conversation.turns.length = Math.min(conversation.turns.length, from);
  for (const { node } of shown.splice(from)) node.remove();
  byId("empty").hidden = shown.length > 0;
}
