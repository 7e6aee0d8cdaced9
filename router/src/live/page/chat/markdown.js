// Markdown of an answer as nodes: paragraphs, headings, lists, quotes, code; bold, italics, code and links within a line. All text is
// set as text, and addresses of links are http or https.

// Level of the headings of turns.
const TURN_LEVEL = 2;
const LIST_DEPTH_MAX = 6;
const INLINE_DEPTH_MAX = 8;
// A longer line is shown as it is.
const INLINE_CHARACTERS_MAX = 20000;
const FENCE = /^ {0,3}(\x60{3,}|~{3,})\s*([^\s\x60]*)[^\x60]*$/;
const HEADING = /^ {0,3}(#{1,6}) +(.*?)(?: +#+)? *$/;
const RULE = /^ {0,3}([-*_])(?: *\1){2,} *$/;
const ITEM = /^(\s*)([-*+]|\d{1,9}[.)])(?: +(.*)|)$/;
const QUOTE = /^ {0,3}> ?(.*)$/;

function kindOf(line) {
  if (!line.trim()) return "blank";
  if (FENCE.test(line)) return "code";
  if (HEADING.test(line)) return "heading";
  if (RULE.test(line)) return "rule";
  if (ITEM.test(line)) return "list";
  return QUOTE.test(line) ? "quote" : "paragraph";
}

// Blocks of a text: their kind and lines.
function blocksOf(text) {
  const blocks = [];
  let block = null;
  let fence = "";
  for (const line of text.split("\n")) {
    if (fence) {
      const end = line.trim();
      if (end.length >= fence.length && end === fence[0].repeat(end.length)) fence = "";
      else block.lines.push(line);
      continue;
    }
    const kind = kindOf(line);
    const within = block && (block.kind === kind || (block.kind === "list" && (/^\s/.test(line) || kind === "paragraph" && block.open)) || (block.kind === "quote" && kind === "paragraph"));
    if (kind === "blank") {
      // An item may go on behind an empty line.
      if (block?.kind === "list" && block.open) {
        block.open = false;
        block.lines.push("");
      } else block = null;
    } else if (kind === "code") {
      const [, mark, language] = FENCE.exec(line);
      fence = mark;
      block = { kind, language, lines: [] };
      blocks.push(block);
    } else if (within && kind !== "heading" && kind !== "rule") {
      block.lines.push(line);
      block.open = true;
    } else {
      block = { kind, lines: [line], open: true };
      blocks.push(block);
    }
  }
  return blocks;
}

const isLinkable = (address) => /^https?:\/\/[^\s/]/i.test(address);

function linkNode(address, text) {
  const made = element("a", "", text);
  made.href = address;
  made.target = "_blank";
  made.rel = "noopener noreferrer";
  return made;
}

// Finds the next mark within a line: its place, its end, and what it makes. `missing` has the closing marks that are not there.
function markAt(text, at, missing) {
  const closing = (mark, from) => {
    if (missing.has(mark)) return -1;
    const end = text.indexOf(mark, from);
    if (end < 0) missing.add(mark);
    return end;
  };
  const sign = text[at];
  if (sign === "\x60") {
    const [mark] = /^\x60+/.exec(text.slice(at, at + 20));
    const end = closing(mark, at + mark.length);
    return end < 0 ? null : { end: end + mark.length, code: text.slice(at + mark.length, end) };
  }
  if (sign === "*" || sign === "_") {
    const mark = text[at + 1] === sign ? sign + sign : sign;
    const begin = at + mark.length;
    // Underscores within a word are part of it, and a mark before a blank is a sign.
    if (!text[begin] || /\s/.test(text[begin]) || (sign === "_" && /\w/.test(text[at - 1] ?? ""))) return null;
    let end = closing(mark, begin + 1);
    while (end > 0 && (/\s/.test(text[end - 1]) || (mark.length === 1 && text[end + 1] === sign) || (sign === "_" && /\w/.test(text[end + mark.length] ?? "")))) {
      end = closing(mark, end + (mark.length === 1 && text[end + 1] === sign ? 2 : 1));
    }
    return end < 0 ? null : { end: end + mark.length, name: mark.length === 2 ? "strong" : "em", inner: text.slice(begin, end) };
  }
  if (sign === "[") {
    const middle = closing("](", at + 1);
    const end = middle < 0 ? -1 : closing(")", middle + 2);
    const address = end < 0 ? "" : text.slice(middle + 2, end).trim();
    const label = text.slice(at + 1, Math.max(at + 1, middle));
    return isLinkable(address) && !/\s/.test(address) && !/[[\]]/.test(label) ? { end: end + 1, address, text: label } : null;
  }
  if (sign === "h" && !/\w/.test(text[at - 1] ?? "")) {
    const address = /^https?:\/\/[^\s<>"'\x60)\]]+[^\s<>"'\x60)\].,;:!?*_]/i.exec(text.slice(at, at + 2000))?.[0];
    return address ? { end: at + address.length, address, text: address } : null;
  }
  return null;
}

function appendInline(parent, text, depth = 0) {
  if (text.length > INLINE_CHARACTERS_MAX || depth > INLINE_DEPTH_MAX) {
    parent.append(text);
    return;
  }
  const missing = new Set();
  let plain = "";
  const flush = () => {
    if (plain) parent.append(plain);
    plain = "";
  };
  for (let at = 0; at < text.length;) {
    if (text[at] === "\\" && /[\\\x60*_[\]()#+\-.!>~|]/.test(text[at + 1] ?? "")) {
      plain += text[at + 1];
      at += 2;
      continue;
    }
    const mark = "\x60*_[h".includes(text[at]) ? markAt(text, at, missing) : null;
    if (!mark) {
      plain += text[at++];
      continue;
    }
    flush();
    if (mark.code !== undefined) parent.append(element("code", "", mark.code.replace(/^ (.*) $/, "$1")));
    else if (mark.address) parent.append(linkNode(mark.address, mark.text));
    else {
      const node = element(mark.name);
      appendInline(node, mark.inner, depth + 1);
      parent.append(node);
    }
    at = mark.end;
  }
  flush();
}

// Items at one depth; deeper ones are lists within them.
function listNode(lines, depth = 0) {
  const items = [];
  const indent = /^\s*/.exec(lines.find((line) => ITEM.test(line)))[0].length;
  let ordered = null;
  for (const line of lines) {
    const item = ITEM.exec(line);
    if (item && item[1].length < indent + 2) {
      ordered ??= parseInt(item[2], 10);
      items.push({ text: [item[3] ?? ""], inner: [] });
    } else {
      const { text, inner } = items[items.length - 1];
      if (inner.length || item) inner.push(line);
      else if (line.trim()) text.push(line.trim());
    }
  }
  const node = element(Number.isNaN(ordered) ? "ul" : "ol");
  if (ordered > 1) node.start = ordered;
  for (const { text, inner } of items) {
    const entry = element("li");
    appendInline(entry, text.join("\n"));
    if (inner.length && depth < LIST_DEPTH_MAX) entry.append(listNode(inner, depth + 1));
    else if (inner.length) entry.append(inner.join("\n"));
    node.append(entry);
  }
  return node;
}

function codeNode(text, language) {
  const node = element("div", "code");
  const head = element("div", "code-head");
  const copy = element("button", "quiet", "Copy");
  copy.type = "button";
  const name = language ? `Code, ${printable(language)}` : "Code";
  setAttribute(copy, "aria-label", `Copy: ${name}`);
  const pre = element("pre");
  pre.tabIndex = 0;
  setAttribute(pre, "role", "group");
  setAttribute(pre, "aria-label", name);
  const code = element("code", "", text);
  pre.append(code);
  copy.addEventListener("click", () => copyText(copy, code, "The code"));
  head.append(element("span", "", printable(language)), copy);
  node.append(head, pre);
  return node;
}

function blockNode({ kind, language, lines }, level) {
  if (kind === "code") return codeNode(lines.join("\n"), language);
  if (kind === "rule") return element("hr");
  if (kind === "list") return listNode(lines);
  const heading = kind === "heading" ? HEADING.exec(lines[0]) : null;
  const node = element(heading ? `h${level}` : kind === "quote" ? "blockquote" : "p");
  appendInline(node, heading ? heading[2] : lines.map((line) => (kind === "quote" ? QUOTE.exec(line)?.[1] ?? line : line.trim())).join("\n"));
  return node;
}

// Writes a text into a node. Blocks that are as they were stay: while an answer streams, only the last one is made anew.
function writeMarkdown(node, text) {
  const blocks = blocksOf(text);
  node.blocks ??= [];
  let level = TURN_LEVEL;
  blocks.forEach((block, at) => {
    // Headings are below that of their turn, and none leaves a level out.
    if (block.kind === "heading") level = Math.min(6, level + 1, TURN_LEVEL + HEADING.exec(block.lines[0])[1].length);
    const source = `${block.kind} ${block.kind === "heading" ? level : block.language ?? ""}\n${block.lines.join("\n")}`;
    if (node.blocks[at] === source) return;
    const made = blockNode(block, level);
    if (node.children[at]) node.children[at].replaceWith(made);
    else node.append(made);
    node.blocks[at] = source;
  });
  while (node.children.length > blocks.length) node.lastChild.remove();
  node.blocks.length = blocks.length;
}
