// Puts the page together: settings, keys, models; shows the conversation that was kept.

const EXAMPLES = ["What is continuous batching?", "What happens to a stream when its worker is killed?", "Tell me a story about a lighthouse."];
const SETTING_FIELDS = [["system", "system"], ["temperature", "temperature"], ["max-tokens", "maxTokens"], ["model", "model"]];

async function loadModels() {
  try {
    const answer = await fetch("/v1/models", { headers: authorization(), cache: "no-store" });
    if (answer.status === 401) askForKey();
    if (!answer.ok) throw new Error(await reasonOf(answer));
    const models = ((await answer.json()).data ?? []).map(({ id }) => id).filter(isText);
    offerModels(models);
    if (models.includes(conversation.model)) byId("model").value = conversation.model;
    conversation.model = byId("model").value;
    byId("model").closest("label").hidden = models.length < 2;
    writeServing();
  } catch (error) {
    showNotice(`The models are not known: ${error.message}`);
  }
}

function writeServing() {
  setText(byId("serving"), printable(conversation.model));
}

function toggleSettings(open) {
  byId("settings").hidden = !open;
  setAttribute(byId("settings-open"), "aria-expanded", open);
  if (open) byId("system").focus();
}

function bindSettings() {
  for (const [id, name] of SETTING_FIELDS) {
    byId(id).value = conversation[name];
    byId(id).addEventListener("input", () => {
      conversation[name] = byId(id).value;
      keepConversation();
      writeServing();
    });
  }
  byId("theme").addEventListener("change", () => {
    applyTheme(byId("theme").value);
    redrawStrip();
  });
  byId("settings-open").addEventListener("click", () => toggleSettings(byId("settings").hidden));
  byId("settings-form").addEventListener("submit", (event) => event.preventDefault());
  byId("key-open").addEventListener("click", askForKey);
  bindKey(() => {
    watch.refused = false;
    loadModels();
    connect();
  });
}

function redrawStrip() {
  const strip = watch.turn?.trace.strip;
  if (strip) drawStrip(strip);
}

function bindComposer() {
  const prompt = byId("prompt");
  prompt.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    sendMessage();
  });
  prompt.addEventListener("input", () => {
    growPrompt();
    keepWatching();
  });
  prompt.addEventListener("focus", keepWatching);
  byId("composer").addEventListener("submit", (event) => {
    event.preventDefault();
    sendMessage();
  });
  byId("stop").addEventListener("click", stopStream);
  byId("edit-cancel").addEventListener("click", () => {
    endEdit();
    setPrompt("");
    prompt.focus();
  });
  byId("new").addEventListener("click", newChat);
  for (const text of EXAMPLES) {
    const item = element("li");
    item.append(button("", text, () => {
      setPrompt(text);
      sendMessage();
    }));
    byId("examples").append(item);
  }
}

function onKey(event) {
  if (event.defaultPrevented || event.key !== "Escape" || document.querySelector("dialog[open]")) return;
  if (stream.controller) stopStream();
  else if (!byId("settings").hidden && byId("settings").contains(document.activeElement)) {
    toggleSettings(false);
    byId("settings-open").focus();
  }
}

function watchBrowser() {
  document.addEventListener("keydown", onKey);
  darkPreferred.addEventListener("change", redrawStrip);
  addEventListener("resize", redrawStrip);
  addEventListener("online", () => { if (link.state === "waiting") connect(); });
  // A page that is left keeps what has arrived.
  addEventListener("pagehide", keepConversation);
  setInterval(watchSilence, 5000);
  setInterval(endWatchIfIdle, 1000);
}

loadSettings();
loadConversation();
applyTheme(settings.theme);
bindSettings();
bindComposer();
bindKill();
watchBrowser();
for (const turn of conversation.turns) showTurn(turn);
loadModels();
byId("prompt").focus();
