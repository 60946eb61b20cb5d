// The playground: a chat with every branch kept, and what each answer's prompt found in the cache.
import { AnswerBar } from "./answer_bar.js";
import { fillAnswer, newAnswer } from "./answers.js";
import { getJson } from "./api.js";
import { Conversation, switchBranch } from "./conversation.js";
import { html, useEffect, useReducer, useRef, useState } from "./html.js";
import { firstSettings, Settings } from "./playground_settings.js";

const IDEAS = ["What is a quipu?", "Tell me a story about Mira and Otto.", "What are you?"];
const chat = { conversation: new Conversation(), settings: firstSettings(), draft: "" }; // outlives a look at another page

const isRunning = () => chat.conversation.path().some(({ state }) => state === "running");

export function Playground({ session }) {
  const [, redraw] = useReducer((number) => number + 1, 0);
  const [models, setModels] = useState([]);
  const [error, setError] = useState(null);
  const end = useRef(null);
  useEffect(() => {
    getJson("v1/models").then(({ data }) => {
      setModels(data.map(({ id }) => id));
      chat.settings.model ||= data[0]?.id ?? "";
      redraw();
    }, (failure) => setError(failure.message));
    const stopByKey = (event) => event.key === "Escape" && stop();
    window.addEventListener("keydown", stopByKey);
    return () => window.removeEventListener("keydown", stopByKey);
  }, []);

  const answer = (parent) => {
    const node = chat.conversation.add(parent, "assistant", newAnswer());
    fillAnswer(node, structuredClone(chat.settings), redraw);
    redraw();
    requestAnimationFrame(() => end.current?.scrollIntoView({ block: "end" }));
  };
  const say = (parent, content) => answer(chat.conversation.add(parent, "user", { content }));
  const send = () => {
    const text = chat.draft.trim();
    if (!text || isRunning()) return;
    chat.draft = "";
    say(chat.conversation.last, text);
  };
  const startAnew = () => {
    stop();
    chat.conversation = new Conversation();
    redraw();
  };
  const actions = {
    redraw,
    seesCache: session.shows_cache,
    edit: (node, content) => say(node.parent, content),
    retry: (node) => answer(node.parent),
    giveResults: (node, results) => {
      let last = node;
      for (const [callId, content] of results) last = chat.conversation.add(last, "tool", { callId, content });
      answer(last);
    },
  };
  const path = chat.conversation.path();
  return html`
    <div class="playground">
      <h1 class="hidden">Playground</h1>
      <${Settings} settings=${chat.settings} models=${models} redraw=${redraw} />
      <section class="chat" aria-label="Conversation">
        ${error && html`<p class="error" role="alert">${error}</p>`}
        <div class="turns" role="log">
          ${path.length === 0 && html`<${Ideas} onChoose=${(text) => say(chat.conversation.root, text)} />`}
          ${path.map((node) => html`<${Turn} key=${node.id} node=${node} actions=${actions} isLast=${node === path.at(-1)} />`)}
          <div ref=${end}></div>
        </div>
        <${Composer} onSend=${send} onNew=${startAnew} redraw=${redraw} isEmpty=${path.length === 0} />
      </section>
    </div>
  `;
}

function stop() {
  for (const node of chat.conversation.path()) if (node.state === "running") node.abort.abort();
}

function Ideas({ onChoose }) {
  return html`
    <div class="ideas">
      <p>Say something to the model. Under each answer stands how much of its prompt came from the cache, and why not more.</p>
      ${IDEAS.map((text) => html`<button key=${text} onClick=${() => onChoose(text)}>${text}</button>`)}
    </div>
  `;
}

function Composer({ onSend, onNew, redraw, isEmpty }) {
  const submit = (event) => {
    event.preventDefault();
    onSend();
  };
  const type = (event) => {
    chat.draft = event.target.value;
    redraw();
  };
  return html`
    <form class="composer" onSubmit=${submit}>
      <label class="hidden" for="draft">Message</label>
      <textarea id="draft" rows="2" placeholder="Message; Enter sends" title="Shift+Enter starts a line" value=${chat.draft}
        onInput=${type} onKeyDown=${(event) => isSendKey(event) && submit(event)}></textarea>
      ${isRunning()
        ? html`<button type="button" class="primary" onClick=${stop} aria-keyshortcuts="Escape">Stop</button>`
        : html`<button class="primary" disabled=${!chat.draft.trim()}>Send</button>`}
      <button type="button" onClick=${onNew} disabled=${isEmpty}>New</button>
    </form>
  `;
}

const isSendKey = (event) => event.key === "Enter" && !event.shiftKey && !event.isComposing;

function Turn({ node, actions, isLast }) {
  const [edited, setEdited] = useState(null);
  const name = { user: "You", assistant: "Answer", tool: "Tool result" }[node.role];
  const saveEdit = () => {
    actions.edit(node, edited);
    setEdited(null);
  };
  return html`
    <article class=${`turn ${node.role}`} aria-label=${name} aria-busy=${node.state === "running"}>
      <header>
        <b>${name}</b>
        <${Branches} node=${node} redraw=${actions.redraw} />
        ${node.role === "user" && edited === null && !isRunning() &&
        html`<button class="link" onClick=${() => setEdited(node.content)}>edit</button>`}
        ${node.role === "assistant" && !isRunning() &&
        html`<button class="link" onClick=${() => actions.retry(node)}>answer again</button>`}
      </header>
      ${edited === null
        ? html`<${Content} node=${node} />`
        : html`<div class="editor">
            <textarea aria-label="Edited message" rows="3" value=${edited} onInput=${(event) => setEdited(event.target.value)}></textarea>
            <button class="primary" disabled=${!edited.trim()} onClick=${saveEdit}>Send as a branch</button>
            <button onClick=${() => setEdited(null)}>Cancel</button>
          </div>`}
      ${isLast && node.state === "done" && node.calls?.length > 0 &&
      html`<${Results} node=${node} onGive=${(results) => actions.giveResults(node, results)} />`}
      ${node.role === "assistant" && html`<${AnswerBar} node=${node} seesCache=${actions.seesCache} />`}
    </article>
  `;
}

function Branches({ node, redraw }) {
  const { children, chosen } = node.parent;
  if (children.length < 2) return null;
  const move = (step) => {
    switchBranch(node, step);
    redraw();
  };
  return html`
    <span class="branches">
      <button class="link" aria-label="Previous branch" disabled=${chosen === 0} onClick=${() => move(-1)}>‹</button>
      ${chosen + 1} of ${children.length}
      <button class="link" aria-label="Next branch" disabled=${chosen === children.length - 1} onClick=${() => move(1)}>›</button>
    </span>
  `;
}

function Content({ node }) {
  return html`
    ${node.reasoning && html`<details class="reasoning"><summary>Reasoning</summary><div class="text">${node.reasoning}</div></details>`}
    ${node.content && html`<div class="text">${node.content}</div>`}
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
