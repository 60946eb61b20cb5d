// The frame of the pages: navigation, who is looking, the key prompt, light and dark.
import { currentKey, getJson, setKey } from "./api.js";
import { Cache } from "./cache.js";
import { html, render, useEffect, useRef, useState } from "./html.js";
import { Live } from "./live.js";
import { Playground } from "./playground.js";
import { UsagePage } from "./usage.js";

const PAGES = [
  { id: "playground", title: "Playground", view: Playground, isShown: () => true },
  { id: "cache", title: "Cache", view: Cache, isShown: (session) => session.shows_cache },
  { id: "live", title: "Live", view: Live, isShown: (session) => session.shows_live },
  { id: "usage", title: "Usage", view: UsagePage, isShown: (session) => session.shows_usage },
];
const THEMES = ["system", "light", "dark"];

function App() {
  const [session, setSession] = useState(null);
  const [locked, setLocked] = useState(null);
  const [failure, setFailure] = useState(null);
  const [hash, setHash] = useState(location.hash);

  const load = async () => {
    setFailure(null);
    try {
      setSession(await getJson("ui/session"));
      setLocked(null);
    } catch (error) {
      if (error.status !== 401) setFailure(error.message);
    }
  };
  useEffect(() => {
    const lock = (event) => {
      // without a key nothing was wrong yet: only ask
      setLocked({ message: currentKey() ? event.detail : "" });
      setKey(null);
      setSession(null);
    };
    const move = () => setHash(location.hash);
    window.addEventListener("quipu:locked", lock);
    window.addEventListener("hashchange", move);
    load();
    return () => {
      window.removeEventListener("quipu:locked", lock);
      window.removeEventListener("hashchange", move);
    };
  }, []);

  const pages = session ? PAGES.filter((page) => page.isShown(session)) : [];
  const page = pages.find(({ id }) => hash === `#${id}`) ?? pages[0];
  const before = useRef(null); // the page, or false while a key is asked for
  useEffect(() => {
    // what had the focus is gone with the page that had it
    const isGone = before.current !== null && before.current !== page && document.activeElement === document.body;
    if (isGone && page) (document.getElementById("draft") ?? document.getElementById("main")).focus();
    before.current = locked ? false : (page ?? before.current);
  }, [page, locked]);
  useEffect(() => {
    document.title = page ? `${page.title} · quipu` : "quipu";
  }, [page]);
  const forget = () => {
    setKey(null);
    location.reload(); // nothing that was read with the key stays in memory
  };
  return html`
    <a class="skip" href="#main" onClick=${skip}>Skip to content</a>
    <header class="bar">
      <span class="brand"><img src="static/icon.svg" alt="" width="24" height="24" />quipu</span>
      <nav aria-label="Pages">
        ${pages.map(
          ({ id, title }) =>
            html`<a key=${id} href=${`#${id}`} aria-current=${page.id === id ? "page" : null}>${title}</a>`,
        )}
      </nav>
      <${Who} session=${session} onForget=${forget} />
      <${ThemeButton} />
    </header>
    <main id="main" tabindex="-1">
      ${failure && html`<p class="error" role="alert">${failure} <button onClick=${load}>Try again</button></p>`}
      ${locked && html`<${KeyPrompt} locked=${locked} onKey=${load} />`}
      ${page && html`<${page.view} session=${session} />`}
    </main>
  `;
}

function skip(event) {
  event.preventDefault(); // the hash chooses the page
  document.getElementById("main").focus();
}

function Who({ session, onForget }) {
  if (!session?.needs_key) return null;
  const sees = session.is_admin ? "sees all tenants" : `sees tenant ${session.tenant}`;
  return html`
    <span class="who" title=${session.key_id}><b>${session.key_name}</b> <small>${sees}</small></span>
    <button class="quiet" onClick=${onForget}>Forget key</button>
  `;
}

function KeyPrompt({ locked, onKey }) {
  const { message } = locked;
  const input = useRef(null);
  useEffect(() => input.current.focus(), [locked]);
  const submit = (event) => {
    event.preventDefault();
    const key = input.current.value.trim();
    if (!key) return;
    setKey(key);
    onKey();
  };
  return html`
    <form class="card keyprompt" onSubmit=${submit}>
      <h1>API key</h1>
      <p>This server asks for a key. It is kept in this tab only, until the tab is closed.</p>
      <label for="key">Key</label>
      <input id="key" ref=${input} type="password" autocomplete="off" spellcheck=${false} required
        aria-describedby=${message ? "keyerror" : null} />
      ${message && html`<p class="error" role="alert" id="keyerror">${message}</p>`}
      <button class="primary">Continue</button>
    </form>
  `;
}

function ThemeButton() {
  const [theme, setTheme] = useState(document.documentElement.dataset.theme ?? "system");
  const next = THEMES[(THEMES.indexOf(theme) + 1) % THEMES.length];
  const change = () => {
    if (next === "system") delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = next;
    try {
      localStorage.setItem("quipu.theme", next);
    } catch {
      // storage may be forbidden: then the choice ends with the page
    }
    setTheme(next);
  };
  return html`<button class="quiet theme" onClick=${change} aria-label=${`Colours: ${theme}. Change to ${next}`}>
    ${{ system: "◐", light: "☀", dark: "☾" }[theme]}
  </button>`;
}

render(html`<${App} />`, document.getElementById("app"));
