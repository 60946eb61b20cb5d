// The turns of the playground's conversation: what was said, with its branches, its editor, its calls and its bar.
//
// `actions` of `playground.js` changes the conversation. A control that vanishes names what has the focus after it.
import { AnswerBar } from "./answer_bar.js";
import { switchBranch } from "./conversation.js";
import { CodeBlock, CopyButton } from "./copy.js";
import { html, useLayoutEffect, useRef, useState } from "./html.js";
import { Markdown } from "./markdown.js";

export const isSendKey = (event) => event.key === "Enter" && !event.shiftKey && !event.isComposing;

export function Turn({ node, actions, isLast }) {
  const [edited, setEdited] = useState(null);
  const name = { user: "You", assistant: "Answer", tool: "Tool result" }[node.role];
  const finish = () => {
    setEdited(null);
    actions.focusOn(`[data-node="${node.id}"] .edit`);
  };
  const saveEdit = () => edited.trim() && actions.edit(node, edited) && setEdited(null);
  const isIdle = !actions.isRunning();
  return html`
    <article class=${`turn ${node.role}`} aria-label=${name} aria-busy=${node.state === "running"} data-node=${node.id}>
      <header>
        <b>${name}</b>
        <${Branches} node=${node} actions=${actions} />
        ${node.role === "user" && edited === null && isIdle &&
        html`<button class="link edit" onClick=${() => setEdited(node.content)}>edit</button>`}
        ${node.role === "assistant" && node.content && node.state !== "running" && html`<${CopyButton} what="answer" textOf=${() => node.content} />`}
        ${node.role === "assistant" && isIdle &&
        html`<button class="link" onClick=${() => actions.retry(node)}>answer again</button>`}
      </header>
      ${edited === null
        ? html`<${Content} node=${node} />`
        : html`<${Editor} text=${edited} onChange=${setEdited} onSave=${saveEdit} onCancel=${finish} />`}
      ${isLast && node.state === "done" && node.calls?.length > 0 &&
      html`<${Results} node=${node} onGive=${(results) => actions.giveResults(node, results)} />`}
      ${node.role === "assistant" && html`<${AnswerBar} node=${node} seesCache=${actions.seesCache} />`}
      ${node.asCurl && node.state !== "running" && html`<${Curl} node=${node} />`}
    </article>
  `;
}

function Editor({ text, onChange, onSave, onCancel }) {
  const area = useRef(null);
  useLayoutEffect(() => {
    area.current.focus();
    area.current.setSelectionRange(text.length, text.length);
  }, []);
  const press = (event) => {
    if (event.key === "Escape") {
      event.stopPropagation();
      onCancel();
    } else if (isSendKey(event)) {
      event.preventDefault();
      onSave();
    }
  };
  return html`<div class="editor">
    <textarea ref=${area} aria-label="Edited message" rows="3" title="Enter sends, Shift+Enter starts a line, Escape cancels" value=${text}
      onInput=${(event) => onChange(event.target.value)} onKeyDown=${press}></textarea>
    <button class="primary" disabled=${!text.trim()} onClick=${onSave}>Send as a branch</button>
    <button onClick=${onCancel}>Cancel</button>
  </div>`;
}

/** The request of an answer as a command. It is made when it is asked for. */
function Curl({ node }) {
  const [isOpen, setOpen] = useState(false);
  return html`<div class="curl">
    <button class="link" aria-expanded=${isOpen} onClick=${() => setOpen(!isOpen)}>as curl</button>
    ${isOpen && html`<${CodeBlock} what="command" text=${node.asCurl()} />`}
  </div>`;
}

function Branches({ node, actions }) {
  const { children, chosen } = node.parent;
  if (children.length < 2) return null;
  const move = (step) => {
    switchBranch(node, step);
    const turn = `[data-node="${node.parent.children[node.parent.chosen].id}"]`;
    const both = [`${turn} .previous`, `${turn} .next`];
    actions.focusOn(...(step < 0 ? both : both.reverse()));
  };
  return html`
    <span class="branches">
      <button class="link previous" aria-label="Previous branch" disabled=${chosen === 0} onClick=${() => move(-1)}>‹</button>
      ${chosen + 1} of ${children.length}
      <button class="link next" aria-label="Next branch" disabled=${chosen === children.length - 1} onClick=${() => move(1)}>›</button>
    </span>
  `;
}

function Content({ node }) {
  return html`
    ${node.reasoning && html`<details class="reasoning"><summary>Reasoning</summary><div class="text">${node.reasoning}</div></details>`}
    ${node.content && (node.role === "assistant" ? html`<${Markdown} text=${node.content} />` : html`<div class="text">${node.content}</div>`)}
    ${(node.calls ?? []).map(
      (call) => html`<div key=${call.id} class="call"><b>calls ${call.name}</b><pre>${readable(call.arguments)}</pre></div>`,
    )}
    ${node.state === "running" && !node.firstAt && html`<p class="note">waiting for the first token…</p>`}
    ${node.state === "stopped" && html`<p class="note">stopped</p>`}
    ${node.finishReason === "length" && html`<p class="note">cut at the limit of tokens</p>`}
    ${node.ignored && html`<p class="note">ignored by the server: ${node.ignored}</p>`}
    ${node.error && html`<p class="error" role="alert">${node.error}</p>`}
  `;
}

function readable(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text; // still arriving, or not JSON
  }
}

function Results({ node, onGive }) {
  const [texts, setTexts] = useState(() => node.calls.map(() => ""));
  const change = (place, text) => setTexts(texts.map((old, at) => (at === place ? text : old)));
  return html`
    <div class="editor">
      ${node.calls.map(
        (call, place) => html`<label key=${call.id}>Result of ${call.name}
          <textarea rows="2" value=${texts[place]} onInput=${(event) => change(place, event.target.value)}></textarea></label>`,
      )}
      <button class="primary" onClick=${() => onGive(node.calls.map((call, place) => [call.id, texts[place]]))}>Give results</button>
    </div>
  `;
}
