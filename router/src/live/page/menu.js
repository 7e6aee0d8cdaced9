// A menu of a button: opened by a click, Enter, Space or an arrow key; one at a time.

const menu = { node: null, button: null };

// `items` returns what the menu has when it opens: `text`, `act`, `disabled`.
function bindMenu(button, items) {
  setAttribute(button, "aria-haspopup", "menu");
  setAttribute(button, "aria-expanded", "false");
  button.addEventListener("click", () => (menu.button === button ? closeMenu(true) : openMenu(button, items())));
  button.addEventListener("keydown", (event) => {
    if (event.key !== "ArrowDown" && event.key !== "ArrowUp") return;
    event.preventDefault();
    openMenu(button, items(), event.key === "ArrowUp" ? -1 : 0);
  });
}

function openMenu(button, items, first = 0) {
  closeMenu(false);
  const node = element("div", "menu");
  setAttribute(node, "role", "menu");
  setAttribute(node, "aria-label", button.getAttribute("aria-label"));
  for (const { text, act, disabled } of items) {
    const item = element("button", "", text);
    item.type = "button";
    item.tabIndex = -1;
    setAttribute(item, "role", "menuitem");
    setAttribute(item, "aria-disabled", disabled ? "true" : null);
    item.addEventListener("click", () => {
      if (disabled) return;
      closeMenu(true);
      act();
    });
    node.append(item);
  }
  node.addEventListener("keydown", onMenuKey);
  node.addEventListener("focusout", (event) => { if (!node.contains(event.relatedTarget) && event.relatedTarget !== button) closeMenu(false); });
  button.after(node);
  Object.assign(menu, { node, button });
  setAttribute(button, "aria-expanded", "true");
  node.children[first < 0 ? node.children.length - 1 : first]?.focus();
}

function closeMenu(focus) {
  const { node, button } = menu;
  if (!node) return;
  Object.assign(menu, { node: null, button: null });
  setAttribute(button, "aria-expanded", "false");
  if (focus) button.focus();
  node.remove();
}

function onMenuKey(event) {
  const items = [...menu.node.children];
  const at = items.indexOf(document.activeElement);
  const next = { ArrowDown: at + 1, ArrowUp: at - 1, Home: 0, End: items.length - 1 }[event.key];
  if (next !== undefined) items[(next + items.length) % items.length].focus();
  else if (event.key === "Escape") closeMenu(true);
  else if (event.key === "Tab") {
    closeMenu(true);
    return;
  } else return;
  event.preventDefault();
  event.stopPropagation();
}
