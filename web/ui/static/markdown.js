// Answers as Markdown: markdown-it parses, and its tokens become elements here. No string ever becomes markup.
//
// What must always hold: HTML in an answer is text, a link leads to http, https or mail only, nothing is loaded. A text is
// parsed in pieces of at most LONGEST_PIECE characters, each once when it is complete, so that neither a long answer nor a
// hostile one holds up the page; what is longer is shown as it is.
import { CodeBlock } from "./copy.js";
import { h, html, useMemo } from "./html.js";
import MarkdownIt from "./vendor/markdown-it.js";

const LONGEST_PIECE = 8000;
const MOST_PIECES = 1500;
const LONGEST = 200_000;
const parser = new MarkdownIt({ html: false, linkify: false, typographer: false, maxNesting: 30 }).disable("entity");
const SCHEMES = ["http:", "https:", "mailto:"];
const TAGS = new Set(["p", "h1", "h2", "h3", "h4", "h5", "h6", "ul", "ol", "li", "blockquote", "em", "strong", "s",
  "table", "thead", "tbody", "tr", "th", "td", "hr", "br"]);
const FENCE = /^ {0,3}(`{3,}|~{3,})(.*)$/;
const GOES_ON = /^(?:[ \t]|[-*+](?:\s|$)|\d{1,9}[.)](?:\s|$))/; // a list may go on behind an empty line

export function Markdown({ text }) {
  return html`<div class="text md">${piecesOf(text).map((piece, at) => html`<${Piece} key=${at} kind=${piece.kind} text=${piece.text} />`)}</div>`;
}

function Piece({ kind, text }) {
  return useMemo(() => {
    if (kind === "code") return html`<${CodeBlock} text=${text} />`;
    if (kind === "plain" || text.length > LONGEST_PIECE) return html`<div class="plain-text">${text}</div>`;
    return elementsOf(parser.parse(text, {}));
  }, [kind, text]);
}

/** Return the parts of a text that can be parsed alone, in order. Takes time in proportion to its length. */
export function piecesOf(text) {
  const pieces = [];
  const end = Math.min(text.length, LONGEST);
  let lines = [];
  let fence = null;
  const close = (kind) => {
    const joined = lines.join("\n");
    lines = [];
    if (kind === "code" || joined.trim()) pieces.push({ kind, text: joined });
  };
  let at = 0;
  for (; at < end && pieces.length < MOST_PIECES; ) {
    const next = text.indexOf("\n", at);
    const line = text.slice(at, next < 0 || next > end ? end : next);
    at += line.length + 1;
    const mark = FENCE.exec(line);
    if (fence) {
      if (mark && mark[1].startsWith(fence) && !mark[2].trim()) {
        close("code");
        fence = null;
      } else lines.push(line);
    } else if (mark && !(mark[1][0] === "`" && mark[2].includes("`")) && !isInList(lines)) {
      close("text");
      fence = mark[1];
    } else {
      if (lines.length && lines.at(-1).trim() === "" && line.trim() !== "" && !GOES_ON.test(line)) close("text");
      lines.push(line);
    }
  }
  close(fence ? "code" : "text");
  if (at < text.length) pieces.push({ kind: "plain", text: text.slice(at) });
  return pieces;
}

const isInList = (lines) => lines.length > 0 && lines.at(-1).trim() !== "" && GOES_ON.test(lines[0]) && lines.length > 1 && /^\s/.test(lines.at(-1));

/** Return the elements of a flat list of tokens. Nesting is bounded by the parser, and no step calls itself but for inline text. */
function elementsOf(tokens) {
  const open = [{ children: [] }];
  const add = (child) => open.at(-1).children.push(child);
  for (const token of tokens) {
    if (token.nesting === 1) open.push({ token, children: [] });
    else if (token.nesting === -1 && open.length > 1) {
      const { token: opened, children } = open.pop();
      add(elementOf(opened, children));
    } else if (token.type === "inline") for (const child of elementsOf(token.children)) add(child);
    else add(leafOf(token));
  }
  while (open.length > 1) {
    const { token, children } = open.pop();
    add(elementOf(token, children));
  }
  return open[0].children;
}

function elementOf(token, children) {
  if (token.type === "paragraph_open" && token.hidden) return children;
  if (token.tag === "a") return linkTo(token.attrGet("href"), children);
  if (!TAGS.has(token.tag)) return children;
  const start = token.tag === "ol" ? token.attrGet("start") : null;
  const element = h(token.tag, start ? { start } : null, children);
  return token.tag === "table" ? html`<div class="scroll" tabindex="0" role="region" aria-label="Table">${element}</div>` : element;
}

function leafOf(token) {
  if (token.type === "fence" || token.type === "code_block") return html`<${CodeBlock} text=${token.content.replace(/\n$/, "")} />`;
  if (token.type === "code_inline") return html`<code>${token.content}</code>`;
  if (token.type === "image") return linkTo(token.attrGet("src"), [`[image: ${token.content || "without a description"}]`]);
  if (token.type === "softbreak") return "\n";
  return TAGS.has(token.tag) ? h(token.tag, null) : token.content;
}

function linkTo(address, children) {
  let url = null;
  try {
    url = new URL(address);
  } catch {
    // not a whole address: shown as text
  }
  if (!url || !SCHEMES.includes(url.protocol)) return children;
  return html`<a href=${url.href} target="_blank" rel="noopener noreferrer nofollow" title=${url.href}>${children}</a>`;
}
