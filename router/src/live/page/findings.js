// Findings of the diagnosis: what limits the cluster, the figures that say so, and a remedy. One line where there is none.

const findings = { diagnosis: null, shown: "", known: new Set() };

function takeDiagnosis(diagnosis) {
  if (diagnosis) findings.diagnosis = diagnosis;
}

function causeOf({ bottleneck }) {
  return printable(bottleneck).replaceAll("_", " ");
}

function placeOf({ worker, otherWorkers }) {
  if (!worker) return "router";
  return printable(worker) + (otherWorkers ? ` and ${plural(otherWorkers, "other")}` : "");
}

function findingItem(finding) {
  const item = element("li");
  const head = element("p", "", causeOf(finding));
  head.append(element("span", "muted", `${placeOf(finding)} · ${percent(finding.windowShare)}`));
  item.append(head, element("p", "muted", printable(finding.evidence)), element("p", "", printable(finding.advice)));
  return item;
}

// New ones are said once, not at each change of their figures.
function sayFindings(list) {
  const before = findings.known;
  findings.known = new Set(list.map(({ bottleneck }) => bottleneck));
  for (const finding of list) if (!before.has(finding.bottleneck)) announce(`Finding: ${causeOf(finding)}, ${placeOf(finding)}`);
}

function writeFindings() {
  const { diagnosis } = findings;
  const shown = JSON.stringify(diagnosis);
  if (shown === findings.shown) return;
  findings.shown = shown;
  const { findings: list = [], undiagnosedWorkers, omittedFindings } = diagnosis ?? {};
  const parts = [diagnosis ? "Nothing stands out in the last minute" : "No diagnosis yet"];
  if (list.length) parts[0] = `${count(list.length + (omittedFindings ?? 0))} in the last minute`;
  if (undiagnosedWorkers) parts.push(`${plural(undiagnosedWorkers, "worker")} without a diagnosis`);
  setText(byId("findings-state"), parts.join(" · "));
  byId("findings").replaceChildren(...list.map(findingItem));
  sayFindings(list);
}
