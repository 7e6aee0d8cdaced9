// Copying by a button.

const COPIED_MS = 2000;

// Copies `text` (default: the text of `node`) to the clipboard; `what` names it for screen readers.
async function copyText(button, node, what, text = node.textContent) {
  try {
    await navigator.clipboard.writeText(text);
    const label = button.dataset.label ??= button.textContent;
    button.textContent = "Copied";
    announce(`${what} is copied`);
    setTimeout(() => { button.textContent = label; }, COPIED_MS);
  } catch {
    // Without TLS, browsers have no clipboard for pages: the viewer's own keys do it.
    getSelection().selectAllChildren(node);
    announce(`${what} is selected`);
  }
}
