// Owns: the little Markdown that models write (code, headings, lists, rules, bold, italics) as DOM
// nodes. Refuses to know: where the text comes from; it may be hostile. Invariant: every character
// ends in a text node or is one of the marks; links and images stay text. Time grows with the text,
// not with its square, so that no text can make the page hang.

import { make } from "./dom.js";

const ITEM = /^(\s*)([-*+]|\d{1,9}[.)])\s+(.*)$/s;
const HEADING = /^#{1,6}\s+(.*)$/;
const RULE = /^ {0,3}([-*_])( *\1){2,} *$/;
const FENCE = /^\s*(`{3,}(?=[^`]*$)|~{3,})\s*([\w+#.-]*)/;

const DEEPEST = 8; // lists in lists

const sources = new WeakMap();

/**
 * Show a text in an element that shows nothing else, or an earlier part of the same text: blocks
 * that have not changed stay the nodes they are, selection and scroll position included.
 */
export function show(host, text) {
  let old = host.firstElementChild;
  for (const lines of split(text)) {
    const source = lines.join("\n");
    const next = old?.nextElementSibling;
    if (!old || sources.get(old) !== source) {
      const block = render(lines);
      sources.set(block, source);
      if (old) old.replaceWith(block);
      else host.append(block);
    }
    old = next;
  }
  while (old) {
    const next = old.nextElementSibling;
    old.remove();
    old = next;
  }
}

/** Cut a text into blocks, each a list of lines. */
function split(text) {
  const parts = [];
  let lines = [];
  let fence = "";
  const close = () => {
    while (lines.at(-1)?.trim() === "" && !fence) lines.pop();
    if (lines.length) parts.push(lines);
    [lines, fence] = [[], ""];
  };
  for (const line of text.split("\n")) {
    const opened = fence ? null : FENCE.exec(line);
    if (opened || (!fence && ends(lines, line))) close();
    if (opened) fence = opened[1];
    else if (fence && closes(line, fence)) {
      lines.push(line);
      close();
      continue;
    }
    if (fence || line.trim() || lines.length) lines.push(line);
  }
  close();
  return parts;
}

/** Whether a line begins another block than the one so far. */
function ends(lines, line) {
  if (!lines.length) return false;
  const blank = lines.at(-1).trim() === "";
  if (isSingle(lines[0]) || isSingle(line)) return true;
  if (!ITEM.test(lines[0])) return blank || ITEM.test(line);
  return blank && line.trim() !== "" && !ITEM.test(line) && !/^\s{2}/.test(line);
}

const isSingle = (line) => HEADING.test(line) || RULE.test(line);

const closes = (line, fence) => {
  const bare = line.trim();
  return bare.length >= fence.length && bare === fence[0].repeat(bare.length);
};

function render(lines) {
  const [first] = lines;
  if (FENCE.test(first)) return code(lines);
  if (RULE.test(first)) return make("hr");
  const heading = HEADING.exec(first);
  if (heading) return inline(make("p", { class: "heading" }), heading[1]);
  return ITEM.test(first) ? list(lines) : inline(make("p"), lines.join("\n"));
}

function code(lines) {
  const [, fence, language] = FENCE.exec(lines[0]);
  const indent = /^\s*/.exec(lines[0])[0];
  const closed = lines.length > 1 && closes(lines.at(-1), fence);
  const body = lines.slice(1, closed ? -1 : undefined);
  const text = body.map((line) => (line.startsWith(indent) ? line.slice(indent.length) : line));
  const label = language ? `Code, ${language}` : "Code";
  const block = make("pre", { tabindex: "0", role: "region", "aria-label": label });
  block.append(make("code", {}, text.join("\n")));
  return block;
}

function list(lines) {
  const open = []; // lists from the outermost to the one that grows: [indent, element]
  for (const [, spaces, mark, text] of items(lines)) {
    const indent = spaces.length;
    while (open.length > 1 && indent < open.at(-1)[0]) open.pop();
    if (!open.length || (indent > open.at(-1)[0] + 1 && open.length < DEEPEST)) {
      const inner = listFor(mark);
      open.at(-1)?.[1].lastElementChild.append(inner);
      open.push([indent, inner]);
    }
    open.at(-1)[1].append(inline(make("li"), text));
  }
  return open[0][1];
}

/** The items of a list, lines that continue one joined to it. */
function items(lines) {
  const whole = [];
  for (const line of lines) {
    if (ITEM.test(line)) whole.push(ITEM.exec(line));
    else if (line.trim()) whole.at(-1)[3] += `\n${line.trim()}`;
  }
  return whole;
}

function listFor(mark) {
  return /\d/.test(mark) ? make("ol", { start: String(parseInt(mark, 10)) }) : make("ul");
}

/** Fill an element with a text: code, bold, italics, and the rest as it is. */
function inline(element, text) {
  const marks = /`+|\*{1,2}/g;
  const alone = new Set(); // marks that are not closed in what follows
  let shown = 0;
  for (let found = marks.exec(text); found; found = marks.exec(text)) {
    const [mark] = found;
    const start = marks.lastIndex;
    if (alone.has(mark) || (mark[0] === "*" && /\s/.test(text[start] ?? " "))) continue;
    const end = closing(text, mark, start);
    if (end < 0) {
      alone.add(mark);
      continue;
    }
    if (found.index > shown) element.append(text.slice(shown, found.index));
    element.append(span(mark, text.slice(start, end)));
    shown = marks.lastIndex = end + mark.length;
  }
  if (shown < text.length) element.append(text.slice(shown));
  return element;
}

/** Where a mark is closed: by exactly as many of its characters, behind something. */
function closing(text, mark, start) {
  const run = mark[0] === "`" ? /`+/g : /\*+/g;
  run.lastIndex = start;
  for (let found = run.exec(text); found; found = run.exec(text)) {
    const behind = mark[0] === "`" || /\S/.test(text[found.index - 1]);
    if (found[0] === mark && found.index > start && behind) return found.index;
  }
  return -1;
}

function span(mark, text) {
  if (mark === "**") return inline(make("strong"), text);
  if (mark === "*") return inline(make("em"), text);
  return make("code", {}, /^ .*\S.* $/s.test(text) ? text.slice(1, -1) : text);
}
