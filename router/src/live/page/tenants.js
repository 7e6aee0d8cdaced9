// Tenants: service against fair share.

const tenants = { list: [], rows: [] };

function takeTenants(list) {
  tenants.list = list.slice(0, 101);
  for (const { tenant } of tenants.list) tenantTone(tenant ?? "");
}

function tenantRow() {
  const row = element("tr");
  const cell = element("td");
  const name = element("div", "name");
  const parts = { row, swatch: element("i", "swatch"), text: element("b"), figures: element("span", "figures"), bar: element("i"), mark: element("u"), said: element("span", "hidden") };
  name.append(parts.swatch, parts.text, parts.figures);
  const share = element("div", "share");
  setAttribute(share, "aria-hidden", "true");
  share.append(parts.bar, parts.mark);
  cell.append(name, share, parts.said);
  row.append(cell);
  return parts;
}

function writeTenants() {
  const body = byId("tenants").tBodies[0];
  while (tenants.rows.length < tenants.list.length) {
    tenants.rows.push(tenantRow());
    body.append(tenants.rows[tenants.rows.length - 1].row);
  }
  while (tenants.rows.length > tenants.list.length) tenants.rows.pop().row.remove();
  tenants.list.forEach((tenant, at) => {
    const parts = tenants.rows[at];
    const name = printable(tenant.tenant) || "anonymous";
    const colour = toneColour(tenantTone(tenant.tenant ?? ""));
    setText(parts.text, name);
    setAttribute(parts.text, "title", name);
    const waiting = tenant.queuedRequests ? ` + ${count(tenant.queuedRequests)} queued` : "";
    setText(parts.figures, `${percent(tenant.share)} of ${percent(tenant.fairShare)} · ${count(tenant.inFlightRequests)}${waiting}`);
    setText(parts.said, `Weight ${rate(tenant.weight)}, ${rate(tenant.servicePerSecond)} of service a second, ${plural(tenant.kvBlocks ?? 0, "KV block")}`);
    setAttribute(parts.row, "title", parts.said.textContent);
    setStyle(parts.swatch, "--tone", colour);
    setStyle(parts.bar, "--tone", colour);
    setStyle(parts.bar, "width", `${Math.min(100, (tenant.share ?? 0) * 100).toFixed(1)}%`);
    setStyle(parts.mark, "left", `${Math.min(100, (tenant.fairShare ?? 0) * 100).toFixed(1)}%`);
  });
  byId("tenants-empty").hidden = tenants.list.length > 0;
}
