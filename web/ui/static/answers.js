// One streamed answer: sends the chat, fills in the node as tokens come, and measures what a client can measure.
import { currentKey, events, getJson, request } from "./api.js";
import { messagesTo } from "./conversation.js";
import { asCurl } from "./curl.js";

const REDRAW_MS = 33;
let hasExplain = true; // until the server says that it has no such endpoint

/** Fill in the answer `node`, the child of what is answered. Never throws: errors are stored in the node. */
export async function fillAnswer(node, settings, redraw) {
  const draw = throttle(redraw);
  node.abort = new AbortController();
  node.startedAt = performance.now();
  try {
    const body = bodyOf(node, settings);
    node.asCurl = () => asCurl(new URL("../v1/chat/completions", document.baseURI).href, body, currentKey() !== null);
    const response = await request("v1/chat/completions", { body, signal: node.abort.signal });
    node.requestId = response.headers.get("X-Quipu-Request-Id");
    node.ignored = response.headers.get("X-Quipu-Ignored-Fields");
    for await (const chunk of events(response)) {
      take(node, chunk);
      draw();
    }
    node.state = "done";
  } catch (error) {
    node.state = error.name === "AbortError" ? "stopped" : "failed";
    node.error = node.state === "failed" ? error.message : null;
    node.refusedField = error.param ?? null;
  }
  redraw();
  if (node.state === "done") {
    node.explain = await explain(node.requestId);
    redraw();
  }
}

export const newAnswer = () => ({ content: "", reasoning: "", calls: [], state: "running" });

function bodyOf(node, settings) {
  const body = {
    model: settings.model,
    messages: messagesTo(node.parent, settings.system),
    stream: true,
    stream_options: { include_usage: true },
    return_cached_tokens_details: true,
  };
  for (const [name, text] of Object.entries(settings.numbers)) {
    if (text.trim() !== "") body[name] = Number(text);
  }
  if (settings.thinking) body.enable_thinking = settings.thinking === "on";
  if (settings.tools.trim()) body.tools = JSON.parse(settings.tools);
  return body;
}

function take(node, chunk) {
  if (chunk.error) throw new Error(chunk.error.message);
  if (chunk.usage) node.usage = chunk.usage;
  const choice = chunk.choices?.[0];
  if (!choice) return;
  const { delta } = choice;
  const reasoning = delta.reasoning_content ?? delta.reasoning ?? "";
  if (delta.content || reasoning || delta.tool_calls) {
    node.lastAt = performance.now();
    node.firstAt ??= node.lastAt;
  }
  node.content += delta.content ?? "";
  node.reasoning += reasoning;
  for (const part of delta.tool_calls ?? []) {
    const call = (node.calls[part.index] ??= { id: "", name: "", arguments: "" });
    call.id = part.id ?? call.id;
    call.name += part.function?.name ?? "";
    call.arguments += part.function?.arguments ?? "";
  }
  node.finishReason = choice.finish_reason ?? node.finishReason;
}

/** Return why the prompt of a request was cached as it was; null if the server does not say. */
async function explain(requestId) {
  if (!hasExplain || !requestId) return null;
  try {
    return await getJson(`v1/cache/explain/${encodeURIComponent(requestId)}`);
  } catch (error) {
    if (error.code === "unknown_url") hasExplain = false;
    return null;
  }
}

/** Call `draw` at most every REDRAW_MS: a fast model sends more tokens than a screen shows. */
function throttle(draw) {
  let isDue = false;
  return () => {
    if (isDue) return;
    isDue = true;
    setTimeout(() => {
      isDue = false;
      draw();
    }, REDRAW_MS);
  };
}
