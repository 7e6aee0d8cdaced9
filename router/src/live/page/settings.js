// What the viewer chose. Keys are not among it: they stay in the memory of this page.

const SETTINGS_NAME = "inflight-view";
const ZOOMS = [2, 3, 4, 5, 6, 8, 11, 15];
const settings = { theme: "auto", tone: "request", zoom: 3, singleKeys: true };

function loadSettings() {
  try {
    const kept = JSON.parse(localStorage.getItem(SETTINGS_NAME) ?? "{}");
    if (["auto", "light", "dark"].includes(kept.theme)) settings.theme = kept.theme;
    if (["request", "tenant"].includes(kept.tone)) settings.tone = kept.tone;
    if (Number.isInteger(kept.zoom) && kept.zoom >= 0 && kept.zoom < ZOOMS.length) settings.zoom = kept.zoom;
    if (typeof kept.singleKeys === "boolean") settings.singleKeys = kept.singleKeys;
  } catch {
    // Storage may be forbidden or hold something else: the defaults serve.
  }
}

function keepSettings() {
  try {
    localStorage.setItem(SETTINGS_NAME, JSON.stringify(settings));
  } catch {
    // They hold until the page is closed.
  }
}

function applyTheme(theme) {
  settings.theme = theme;
  setAttribute(document.documentElement, "data-theme", theme === "auto" ? null : theme);
  byId("theme").value = theme;
  keepSettings();
}
