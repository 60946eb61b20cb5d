// What cords and knots mean, in words, for the panel and for screen readers. Pure functions.
import { numberOf } from "./explain.js";
import { count } from "./format.js";

export const TIERS = ["device", "host", "disk", "remote"];
export const AGES = [
  { name: "used within 10 s", seconds: 10 },
  { name: "a minute", seconds: 60 },
  { name: "10 minutes", seconds: 600 },
  { name: "an hour", seconds: 3600 },
  { name: "longer ago", seconds: Infinity },
];

export const ageOf = (node, now) => AGES.findIndex(({ seconds }) => now - node.last_used_at <= seconds);

export function ago(seconds) {
  const past = Math.max(0, seconds);
  if (past < 1.5) return "just now";
  if (past < 90) return `${past.toFixed(0)} s ago`;
  if (past < 5400) return `${(past / 60).toFixed(0)} min ago`;
  if (past < 129600) return `${(past / 3600).toFixed(0)} h ago`;
  return `${(past / 86400).toFixed(0)} days ago`;
}

export const times = (number, one, many = `${one}s`) => `${count(number)} ${number === 1 ? one : many}`;

/** Return where a branch begins to differ. */
export function placeOf(diverged, start) {
  if (!diverged) return `at token ${count(start)}`;
  const { token, exact, role, message, part } = diverged;
  const where = exact ? `at token ${count(token)}` : `in the block at token ${count(token)}`;
  return role === null || role === undefined ? where : `in ${messageOf({ role, message, part })}, ${where}`;
}

export function messageOf({ role, message, part }) {
  if (message === null || message === undefined) return { assistant: "the answer", system: "the system prompt" }[role] ?? `the template (${role})`;
  return `message ${numberOf(message)} (${role})${part === null || part === undefined ? "" : `, part ${numberOf(part)}`}`;
}

/** Return sentences about the knot at the end of a cord: how many requests, how many go on, and what diverged. */
export function aboutKnot({ node, children, below }) {
  const words = [`${times(node.requests, "request")} came by.`];
  const cords = children.filter((child) => !child.more);
  const more = children.find((child) => child.more)?.more ?? 0;
  const onward = cords.reduce((sum, child) => sum + child.node.requests, 0);
  const known = cords.length + more;
  if (known + below === 0) {
    if (node.children) words.push(`${times(node.children, "branch", "branches")} behind it ${node.children === 1 ? "has" : "have"} been evicted.`);
    else words.push("Nothing follows.");
    return words;
  }
  words.push(known + below === 1 ? "One branch goes on." : `${times(known + below, "branch", "branches")} go on.`);
  const gone = node.children - known - below;
  if (gone > 0) words.push(gone === 1 ? "Another one has been evicted." : `${count(gone)} others have been evicted.`);
  const ended = node.requests - onward;
  if (!more && !below && node.children === cords.length && ended > 0) words.push(`${times(ended, "request")} ended here.`);
  const parts = cords.map((child) => child.diverged).filter(Boolean);
  if (cords.length > 1 && parts.length) words.push(whereTheyPart(parts));
  else if (cords.length === 1) words.push(`It goes on ${placeOf(cords[0].diverged, cords[0].node.start)}.`);
  return words;
}

function whereTheyPart(parts) {
  const named = parts.filter(({ role }) => role !== null && role !== undefined);
  const first = Math.min(...(parts.some(({ exact }) => exact) ? parts.filter(({ exact }) => exact) : parts).map(({ token }) => token));
  const names = [...new Set((named.some(({ exact }) => exact) ? named.filter(({ exact }) => exact) : named).map(messageOf))];
  const where = parts.some(({ exact }) => exact) ? `from token ${count(first)} on` : `in the block at token ${count(first)}`;
  if (!names.length) return `They differ ${where}. They have no messages, or these are not remembered.`;
  return `They differ ${where}, in ${names.slice(0, 3).join(", or ")}${names.length > 3 ? ", or others" : ""}.`;
}

/** Return a cord in one line, as it is read out. */
export function labelOf(cord, now) {
  if (cord.more) return `${times(cord.more, "more branch", "more branches")}, folded`;
  const { node, children, below, order } = cord;
  const words = [`${count(node.tokens)} tokens from token ${count(node.start)}`, times(node.requests, "request")];
  if (node.path_tokens) words.push("on the path of the request");
  if (node.cached_tokens < node.tokens) words.push(node.cached_tokens ? `${count(node.cached_tokens)} still cached` : "evicted");
  if (node.pinned_until) words.push("pinned");
  if (node.in_use) words.push("in use");
  if (order) words.push(`number ${count(order)} in the order of eviction`);
  words.push(`used ${ago(now - node.last_used_at)}`);
  words.push(children.length ? times(children.length, "branch", "branches") : below ? `${times(below, "branch", "branches")} not loaded` : "end");
  return words.join(", ");
}
