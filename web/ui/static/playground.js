// The playground: a chat with every branch kept, and what each answer's prompt found in the cache.
//
// What must always hold: after each step the focus is where the next key is wanted, and nothing that is refused for the
// tools becomes a turn.
import { fillAnswer, newAnswer } from "./answers.js";
import { getJson } from "./api.js";
import { Conversation } from "./conversation.js";
import { html, useEffect, useLayoutEffect, useReducer, useRef, useState } from "./html.js";
import { firstSettings, Settings } from "./playground_settings.js";
import { wrongTools } from "./tools_check.js";
import { isSendKey, Turn } from "./turns.js";

const IDEAS = ["What is a quipu?", "Tell me a story about Mira and Otto.", "What are you?"];
const NEAR_PX = 120;
const chat = { conversation: new Conversation(), settings: firstSettings(), draft: "", wrong: null }; // outlives a look at another page

const isRunning = () => chat.conversation.path().some(({ state }) => state === "running");

export function Playground({ session }) {
  const [, redraw] = useReducer((number) => number + 1, 0);
  const [models, setModels] = useState([]);
  const [error, setError] = useState(null);
  const end = useRef(null);
  useEffect(() => {
    getJson("v1/models").then(({ data }) => {
      setModels(data.map(({ id, parent }) => ({ id, label: parent ? `${id} (adapter of ${parent})` : id })));
      chat.settings.model ||= data[0]?.id ?? "";
      redraw();
    }, (failure) => setError(failure.message));
    const stopByKey = (event) => event.key === "Escape" && stop();
    window.addEventListener("keydown", stopByKey);
    return () => window.removeEventListener("keydown", stopByKey);
  }, []);

  const wanted = useRef(null); // what is to have the focus once it is drawn
  const focusOn = (...selectors) => {
    wanted.current = selectors;
    redraw();
  };
  useLayoutEffect(() => {
    const found = wanted.current?.map((selector) => document.querySelector(selector)).find((element) => element && !element.disabled);
    if (!found) return;
    wanted.current = null;
    found.focus();
  });

  const showEnd = () => requestAnimationFrame(() => end.current?.scrollIntoView({ block: "end" }));
  const refuse = (message, at) => {
    chat.wrong = message;
    redraw();
    const field = document.querySelector("textarea[name=tools]");
    field.closest("details").open = true;
    field.focus();
    if (at !== null) field.setSelectionRange(at, Math.min(at + 1, field.value.length));
    field.scrollIntoView({ block: "nearest" });
  };
  /** Append nodes below `parent` as [role, fields], and have them answered; return whether they became turns. */
  const say = (parent, ...nodes) => {
    const wrong = wrongTools(chat.settings.tools);
    if (wrong) {
      refuse(wrong.message, wrong.at);
      return false;
    }
    const { chosen: before, children } = parent;
    const draft = chat.draft;
    let last = parent;
    for (const [role, fields] of [...nodes, ["assistant", newAnswer()]]) last = chat.conversation.add(last, role, fields);
    const first = children.at(-1);
    fillAnswer(last, structuredClone(chat.settings), () => {
      if (last.state === "failed" && last.refusedField?.startsWith("tools") && children.includes(first)) {
        chat.conversation.remove(first, before);
        chat.draft ||= first.typed ?? draft;
        refuse(last.error, null);
      }
      if (isAtEnd()) showEnd(); // the answer has grown
      redraw();
    });
    focusOn("#draft");
    showEnd();
    return true;
  };
  const send = () => {
    const text = chat.draft.trim();
    if (!text || isRunning()) return;
    if (say(chat.conversation.last, ["user", { content: text, typed: text }])) chat.draft = "";
    redraw();
  };
  const stopByButton = () => {
    stop();
    focusOn("#draft");
  };
  const startAnew = () => {
    stop();
    chat.conversation = new Conversation();
    focusOn("#draft");
  };
  const actions = {
    redraw,
    focusOn,
    isRunning,
    seesCache: session.shows_cache,
    edit: (node, content) => say(node.parent, ["user", { content }]),
    retry: (node) => say(node.parent),
    giveResults: (node, results) => say(node, ...results.map(([callId, content]) => ["tool", { callId, content }])),
  };
  const changeTools = (text) => {
    chat.settings.tools = text;
    chat.wrong = null;
    redraw();
  };
  const path = chat.conversation.path();
  return html`
    <div class="playground">
      <h1 class="hidden">Playground</h1>
      <${Settings} settings=${chat.settings} models=${models} wrong=${chat.wrong} onTools=${changeTools} redraw=${redraw} />
      <section class="chat" aria-label="Conversation">
        ${error && html`<p class="error" role="alert">${error}</p>`}
        <div class="turns" role="log">
          ${path.length === 0 && html`<${Ideas} onChoose=${(text) => say(chat.conversation.root, ["user", { content: text }])} />`}
          ${path.map((node) => html`<${Turn} key=${node.id} node=${node} actions=${actions} isLast=${node === path.at(-1)} />`)}
          <div ref=${end}></div>
        </div>
        <${Composer} onSend=${send} onStop=${stopByButton} onNew=${startAnew} redraw=${redraw} isEmpty=${path.length === 0} />
      </section>
    </div>
  `;
}

/** Return whether the end of the conversation is read, and not something above it. */
function isAtEnd() {
  const { scrollHeight, scrollTop, clientHeight } = document.documentElement;
  return scrollHeight - scrollTop - clientHeight < NEAR_PX;
}

function stop() {
  for (const node of chat.conversation.path()) if (node.state === "running") node.abort.abort();
}

function Ideas({ onChoose }) {
  return html`
    <div class="ideas">
      <p>Send a message. Under each answer you see how much of its prompt came from the cache, and why not more.</p>
      ${IDEAS.map((text) => html`<button key=${text} onClick=${() => onChoose(text)}>${text}</button>`)}
    </div>
  `;
}

function Composer({ onSend, onStop, onNew, redraw, isEmpty }) {
  const wasRunning = useRef(false);
  const submit = (event) => {
    event.preventDefault();
    onSend();
  };
  const type = (event) => {
    chat.draft = event.target.value;
    redraw();
  };
  const running = isRunning();
  useLayoutEffect(() => {
    // the button "Stop" had the focus, and is gone
    if (!running && document.activeElement === document.body && wasRunning.current) document.getElementById("draft").focus();
    wasRunning.current = running;
  }, [running]);
  return html`
    <form class="composer" onSubmit=${submit}>
      <label class="hidden" for="draft">Message</label>
      <textarea id="draft" rows="2" placeholder="Message; Enter sends" title="Shift+Enter starts a line" value=${chat.draft}
        onInput=${type} onKeyDown=${(event) => isSendKey(event) && submit(event)}></textarea>
      ${running
        ? html`<button key="stop" type="button" class="primary" onClick=${onStop} aria-keyshortcuts="Escape">Stop</button>`
        : html`<button key="send" class="primary" disabled=${!chat.draft.trim()}>Send</button>`}
      <button type="button" onClick=${onNew} disabled=${isEmpty}>New</button>
    </form>
  `;
}
