// Why a prompt was not cached further, in words; and the parts of its bar. Pure functions of the server's answers.
import { count } from "./format.js";

const REASONS = {
  none: "Every block that could come from the cache did. The last token of a prompt is always computed, and only full blocks are kept.",
  disabled: "Prefix caching is turned off on this server.",
  shorter_than_a_block: "The prompt is too short: it does not fill one block of the cache.",
  evicted: "What follows had been cached before, but when this request came its blocks had been taken for other prompts.",
  other_domain: "The same tokens are cached for another tenant or salt. Caches are never shared between them.",
  diverged: "From there on the prompt differs from every prompt that is cached.",
  needs_prompt_logprobs: "The request asks for scores of its prompt, so all of it is computed.",
  needs_every_position: "The embedding is a mean over all of the prompt, so all of it is computed.",
  cheaper_to_compute: "What follows is in a slower tier of the cache. To load it from there would have taken longer than to compute it.",
  load_failed: "What follows was in a slower tier of the cache, but could not be loaded from there, or not in time.",
};

/** Return sentences about the end of the cached prefix, and advice. `prompt` is explain's, or null. */
export function explainInWords(usage, prompt) {
  const words = [];
  const details = usage.prompt_tokens_details ?? {};
  const ended = prompt?.ended ?? details.cache_misses?.[0] ?? null;
  if (ended) {
    if (ended.reason !== "none") words.push(`The cached part ends ${whereOf(ended, prompt)}.`);
    words.push(REASONS[ended.reason] ?? `Reason: ${ended.reason}.`);
    if (ended.diverged_from) words.push(`Request ${asText(ended.diverged_from)} continued differently there.`);
    if (ended.evicted) words.push(...evictionOf(ended.evicted));
  } else if (details.cached_tokens === undefined) {
    words.push("The server that answered does not say how much of the prompt was cached.");
  } else if (prompt) {
    words.push(REASONS.none);
  }
  if (prompt?.recomputed_tokens) words.push(`${count(prompt.recomputed_tokens)} tokens were computed twice: after a preemption, or on a second engine.`);
  if (prompt?.lost_to_rounding) {
    words.push(`${count(prompt.lost_to_rounding)} more tokens were the same, but do not fill a block.`);
  }
  return { words, advice: prompt?.advice ?? [] };
}

function whereOf({ token, message, part }, prompt) {
  const role = prompt?.messages?.find(({ index }) => index === message)?.role;
  const within = isNumber(message) ? `, in message ${numberOf(message)}${role ? ` (${role})` : ""}` : "";
  return `at token ${count(token)}${within}${isNumber(part) ? `, part ${numberOf(part)}` : ""}`;
}

function evictionOf({ by, idle_s: idle }) {
  const words = [];
  if (by) words.push(`Request ${asText(by)} took its place.`);
  if (Number.isFinite(idle)) words.push(`It had not been used for ${idle.toFixed(0)} s.`);
  return words;
}

const isNumber = (value) => typeof value === "number";

/** Return an index of the API, which counts from 0, as people count. */
export const numberOf = (index) => (isNumber(index) ? index + 1 : index);

/** Return what a message of the prompt is called. What the template adds at the end has no number. */
export const nameOf = ({ index, role }) => (isNumber(index) ? `message ${numberOf(index)}, ${role}` : `${role}, from the template`);

const asText = (value) => (typeof value === "string" ? value : JSON.stringify(value));

/** Return the parts of a prompt, in order, as {start, end, source}: from its blocks, or else from its usage.
 *
 * The source of what was reused from another tier than the device is that tier. */
export function partsOf(usage, prompt) {
  const all = usage.prompt_tokens ?? 0;
  const parts = [];
  if (prompt?.blocks?.length) {
    for (const block of prompt.blocks) append(parts, block.start, Math.min(block.end, all), sourceOf(block));
  } else {
    append(parts, 0, usage.prompt_tokens_details?.cached_tokens ?? 0, "reused");
  }
  append(parts, parts.at(-1)?.end ?? 0, all, "computed");
  return parts;
}

const sourceOf = ({ source, tier }) => (source === "reused" && typeof tier === "string" && tier !== "device" ? tier : source);

function append(parts, start, end, source) {
  if (end <= start) return;
  const last = parts.at(-1);
  if (last?.source === source && last.end === start) last.end = end;
  else parts.push({ start, end, source });
}

/** Return how many tokens of each source lie in a message. */
export function sourcesIn(parts, { start, end }) {
  const found = {};
  for (const part of parts) {
    const overlap = Math.min(end, part.end) - Math.max(start, part.start);
    if (overlap > 0) found[part.source] = (found[part.source] ?? 0) + overlap;
  }
  return found;
}
