// Puts the page together: controls, shortcuts, colour scheme; then connects.

const SHORTCUTS = [
  [["P"], "Pause or resume", togglePause],
  [["C"], "Colour by request or by tenant", () => setTone(settings.tone === "request" ? "tenant" : "request")],
  [["T"], "Colour scheme: auto, light, dark", nextTheme],
  [["+"], "Wider columns", () => setZoom(1)],
  [["-"], "Narrower columns", () => setZoom(-1)],
  [["L"], "Go to the lanes", () => focusLane(0)],
  [["]"], "Next lane", () => focusLane(1)],
  [["["], "Previous lane", () => focusLane(-1)],
  [["R"], "Go to the requests", () => byId("grid").focus()],
  [["/"], "Filter requests", () => byId("filter").focus()],
  [["G"], "Go to the playground", () => byId("prompt").focus()],
  [["?"], "This list", openHelp],
];
const MORE_SHORTCUTS = [
  [["←", "→"], "In a lane: iteration by iteration; with Shift ten"],
  [["↑", "↓"], "In a lane: slots in use; in the table: requests"],
  [["Home", "End"], "Oldest and newest, first and last"],
  [["Enter"], "Life of the request"],
  [["Ctrl", "Enter"], "In the prompt: send"],
  [["Esc"], "Close; stop the playground"],
];

function togglePause() {
  view.paused = !view.paused;
  setAttribute(byId("pause"), "aria-pressed", view.paused);
  byId("pause").textContent = view.paused ? "Resume" : "Pause";
  announce(view.paused ? "Paused" : "Resumed");
  if (view.paused) for (const lane of lanes.all.values()) lane.shown = viewEnd(lane);
  else for (const lane of lanes.all.values()) lane.shown = lane.end;
  if (link.state === "open") writeConnection("Live");
  redrawAll(false);
}

function setTone(tone) {
  settings.tone = tone;
  for (const name of ["request", "tenant"]) {
    const button = byId(`tone-${name}`);
    setAttribute(button, "aria-checked", name === tone);
    button.tabIndex = name === tone ? 0 : -1;
  }
  keepSettings();
  redrawAll(true);
}

function setTheme(theme) {
  applyTheme(theme);
  redrawAll(true);
}

function nextTheme() {
  const themes = ["auto", "light", "dark"];
  setTheme(themes[(themes.indexOf(settings.theme) + 1) % themes.length]);
  announce(`Colour scheme ${settings.theme}`);
}

function setZoom(by) {
  settings.zoom = Math.max(0, Math.min(ZOOMS.length - 1, settings.zoom + by));
  byId("zoom-out").disabled = settings.zoom === 0;
  byId("zoom-in").disabled = settings.zoom === ZOOMS.length - 1;
  keepSettings();
  redrawAll(true);
}

function focusLane(by) {
  const all = [...document.querySelectorAll(".lane-view")];
  if (!all.length) return;
  const at = all.indexOf(document.activeElement);
  all[at < 0 ? 0 : (at + by + all.length) % all.length].focus();
}

function openHelp() {
  if (!byId("help").open) byId("help").showModal();
}

function buildHelp() {
  for (const [keys, text] of [...SHORTCUTS, ...MORE_SHORTCUTS]) {
    const term = element("dt");
    for (const key of keys) term.append(element("kbd", "", key));
    byId("shortcuts").append(term, element("dd", "", text));
  }
  byId("single-keys").checked = settings.singleKeys;
  byId("single-keys").addEventListener("change", () => {
    settings.singleKeys = byId("single-keys").checked;
    keepSettings();
  });
}

function onKey(event) {
  if (event.defaultPrevented || document.querySelector("dialog[open]")) return;
  const typing = event.target.closest?.("input:not([type=checkbox]), textarea, select");
  if (event.key === "Escape") {
    if (!byId("life").hidden) closeLife();
    else if (play.controller) play.controller.abort();
    return;
  }
  if (typing) {
    if (event.key === "Enter" && event.ctrlKey && event.target.id === "prompt") byId("playground").requestSubmit();
    return;
  }
  if (!settings.singleKeys || event.ctrlKey || event.altKey || event.metaKey) return;
  const found = SHORTCUTS.find(([[key]]) => key.toLowerCase() === event.key.toLowerCase());
  if (!found) return;
  event.preventDefault();
  found[2]();
}

function bindControls() {
  byId("pause").addEventListener("click", togglePause);
  for (const name of ["request", "tenant"]) {
    byId(`tone-${name}`).addEventListener("click", () => setTone(name));
    byId(`tone-${name}`).addEventListener("keydown", (event) => {
      if (!event.key.startsWith("Arrow")) return;
      event.preventDefault();
      setTone(name === "request" ? "tenant" : "request");
      byId(`tone-${settings.tone}`).focus();
    });
  }
  byId("zoom-out").addEventListener("click", () => setZoom(-1));
  byId("zoom-in").addEventListener("click", () => setZoom(1));
  byId("theme").addEventListener("change", () => setTheme(byId("theme").value));
  byId("help-open").addEventListener("click", openHelp);
  byId("life-close").addEventListener("click", closeLife);
  byId("playground").addEventListener("submit", sendPrompt);
  byId("stop").addEventListener("click", () => play.controller?.abort());
  byId("follow").addEventListener("click", () => openLife(play.number, byId("follow")));
  bindStart();
  bindKill();
  bindKey(connect);
  document.addEventListener("keydown", onKey);
}

// `#request=NUMBER` opens the life of a request.
function openLinked() {
  const number = /^#request=(\d{1,15})$/.exec(location.hash)?.[1];
  if (number) openLife(Number(number), byId("grid"));
}

function watchBrowser() {
  addEventListener("hashchange", openLinked);
  darkPreferred.addEventListener("change", () => redrawAll(true));
  document.addEventListener("visibilitychange", () => {
    if (document.hidden) return;
    for (const lane of lanes.all.values()) if (!view.paused) lane.shown = lane.end;
    redrawAll(false);
  });
  // A change of zoom, or a window moved to another screen.
  addEventListener("resize", () => redrawAll(true));
  addEventListener("online", () => { if (link.state === "waiting") connect(); });
  setInterval(watchSilence, 5000);
  // Ages go on while no update comes.
  setInterval(() => { if (!view.paused) writeSoon(); }, 1000);
}

loadSettings();
buildOverview();
buildTable();
lanes.writers.push(writeTenants, writeFindings);
buildHelp();
bindControls();
setTheme(settings.theme);
setTone(settings.tone);
setZoom(0);
watchBrowser();
connect();
openLinked();
