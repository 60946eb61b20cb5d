// Under each answer: where its prompt came from, how fast it was, and "why not more?".
import { showInCache } from "./cache_choice.js";
import { explainInWords, nameOf, partsOf, sourcesIn } from "./explain.js";
import { count, duration, rate, share } from "./format.js";
import { html, useLayoutEffect, useRef, useState } from "./html.js";

const SHORTEST_S = 0.02; // a shorter answer arrives in one piece, which has no speed
const NAMES = {
  reused: "from cache",
  host: "from cache on the host",
  disk: "from cache on disk",
  remote: "from a remote cache",
  copied: "copied",
  moved: "from another engine",
  computed: "computed",
};

export function AnswerBar({ node, seesCache }) {
  const [isOpen, setOpen] = useState(false);
  const { usage } = node;
  if (!usage || usage.prompt_tokens === null || usage.prompt_tokens === undefined) return null;
  const prompt = node.explain?.prompts?.[0] ?? null;
  const parts = partsOf(usage, prompt);
  const all = usage.prompt_tokens;
  const sums = sourcesIn(parts, { start: 0, end: all });
  const id = `why-${node.id}`;
  return html`
    <div class="promptbar">
      <${Strip} class="sources" all=${all} parts=${parts.map((part) => ({
        ...part,
        kind: part.source,
        title: `${NAMES[part.source] ?? part.source}: tokens ${count(part.start)} to ${count(part.end)}`,
      }))} label=${labelOf(sums, all)} />
      ${prompt?.messages?.length > 0 &&
      html`<${Strip} class="messages" all=${all} label=${`${prompt.messages.length} messages`}
        parts=${prompt.messages.map((message) => ({
          start: message.start,
          end: message.end,
          kind: `role-${message.role}`,
          text: message.role,
          title: `${nameOf(message)}: ${labelOf(sourcesIn(parts, message), message.end - message.start)}`,
        }))} />`}
      <p class="facts">
        <span>${count(all)} prompt tokens</span>
        ${Object.entries(sums).map(
          ([source, tokens]) => html`<span key=${source}><i class=${`key ${kindClass(source)}`}></i>${count(tokens)} ${NAMES[source] ?? source} (${share(tokens, all)})</span>`,
        )}
        <span title="from sending the request to the first text">${duration((node.firstAt - node.startedAt) / 1000)} to first token</span>
        <span>${count(usage.completion_tokens)} tokens${speedOf(node)}</span>
        <button class="link" aria-expanded=${isOpen} aria-controls=${id} onClick=${() => setOpen(!isOpen)}>why not more?</button>
        ${node.explain && seesCache && html`<button class="link" onClick=${() => showInCache(node.requestId)}>show in the cache</button>`}
      </p>
      <div id=${id} hidden=${!isOpen}>${isOpen && html`<${Why} usage=${usage} prompt=${prompt} />`}</div>
    </div>
  `;
}

function Strip({ class: name, all, parts, label }) {
  const box = useRef(null);
  useLayoutEffect(() => {
    const watcher = new ResizeObserver(() => showWhole(box.current));
    watcher.observe(box.current);
    return () => watcher.disconnect();
  }, []);
  useLayoutEffect(() => showWhole(box.current));
  return html`
    <div class=${`strip ${name}`} role="img" aria-label=${label} ref=${box}>
      ${parts.map(
        ({ start, end, kind, text, title }) =>
          html`<span key=${start} class=${kindClass(kind)} title=${title} style=${{ width: `${(100 * (end - start)) / all}%` }}>${text && html`<b>${text}</b>`}</span>`,
      )}
    </div>
  `;
}

/** Show the labels that have room, and no part of the others: their part's title has them, too. */
function showWhole(box) {
  const labels = [...box.querySelectorAll("b")];
  for (const label of labels) label.hidden = false;
  const fits = labels.map((label) => label.getBoundingClientRect().width <= label.parentNode.clientWidth);
  labels.forEach((label, at) => (label.hidden = !fits[at]));
}

function Why({ usage, prompt }) {
  const { words, advice } = explainInWords(usage, prompt);
  return html`
    <div class="why">
      <p>${words.join(" ")}</p>
      ${advice.length > 0 &&
      html`<ul>
        ${advice.map(({ code, text }) => html`<li key=${code}><code>${code}</code> ${text}</li>`)}
      </ul>`}
    </div>
  `;
}

// a class name has only letters: a role may come from a client
const kindClass = (kind) => `is-${String(kind).replace(/[^a-z-]/g, "")}`;

const labelOf = (sums, all) =>
  Object.entries(sums)
    .map(([source, tokens]) => `${count(tokens)} of ${count(all)} tokens ${NAMES[source] ?? source}`)
    .join(", ");

function speedOf({ usage, firstAt, lastAt }) {
  const seconds = (lastAt - firstAt) / 1000;
  return seconds >= SHORTEST_S ? `, ${rate((usage.completion_tokens - 1) / seconds)} per second` : "";
}
