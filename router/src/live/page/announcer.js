// Says to screen readers what matters: connections, workers that come and go, streams that move. At most one message every two
// seconds; what happens in between is said together.

const ANNOUNCE_EVERY_MS = 2000;
const ANNOUNCE_MAX = 5;
const announcements = { waiting: [], omitted: 0, timer: 0 };

function announce(text) {
  if (announcements.waiting.includes(text)) return;
  if (announcements.waiting.length < ANNOUNCE_MAX) announcements.waiting.push(text);
  else announcements.omitted += 1;
  if (!announcements.timer) announcements.timer = setTimeout(sayNow, 100);
}

function sayNow() {
  const { waiting, omitted } = announcements;
  if (waiting.length === 0) {
    announcements.timer = 0;
    return;
  }
  const more = omitted ? ` And ${plural(omitted, "more event")}.` : "";
  byId("announce").textContent = `${waiting.join(". ")}.${more}`;
  announcements.waiting = [];
  announcements.omitted = 0;
  announcements.timer = setTimeout(sayNow, ANNOUNCE_EVERY_MS);
}

// What the viewer asked for by an arrow key is said at once.
function sayCell(text) {
  byId("cell").textContent = text;
}
