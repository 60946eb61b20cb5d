// The cache explorer: the prefix tree as cords and knots, what a knot is, one request's path, and what is evicted next.
import { getJson, request } from "./api.js";
import { chosen, forget } from "./cache_choice.js";
import { Details, Legend, NextToGo, PathCard } from "./cache_details.js";
import { fit, makeTree, neighbour } from "./cache_layout.js";
import { Cords } from "./cords.js";
import { count } from "./format.js";
import { html, useEffect, useMemo, useReducer, useRef, useState } from "./html.js";

const INTERVAL_MS = 4000;
const LIMIT = 400;
const DEPTH = 12;
const NARROW = "(max-width: 40rem)";
const SIDE_BY_SIDE = "(min-width: 60rem)";
const BESIDE = 336; // the panel and the gap, as in the style sheet
const WIDE_PITCH = 44; // room for numbers between two cords
const AROUND = 110; // paddings and margins
const COLOURS = { age: "age", tier: "tier", engine: "engine" };
const ARROWS = {
  hanging: { ArrowDown: "out", ArrowUp: "in", ArrowLeft: "back", ArrowRight: "on" },
  lying: { ArrowRight: "out", ArrowLeft: "in", ArrowUp: "back", ArrowDown: "on" },
};
const seen = { answer: null, explained: null, tenants: new Set() }; // outlives a look at another page
window.addEventListener("quipu:locked", () => {
  // the next key may be another tenant's
  Object.assign(seen, { answer: null, explained: null, tenants: new Set() });
  forget();
});

async function look() {
  const topId = chosen.above.at(-1)?.id ?? null;
  const { tenant, request: wanted } = chosen;
  const asked = { from: topId, tenant, request: wanted };
  const given = Object.fromEntries(Object.entries(asked).filter(([, value]) => value));
  const query = new URLSearchParams({ depth: DEPTH, limit: LIMIT, ...given });
  const response = await request(`v1/cache/tree?${query}`);
  const answer = await response.json();
  // ages are told by the server's clock: the browser's may be wrong
  answer.at = (Date.parse(response.headers.get("Date")) || Date.now()) / 1000;
  answer.topId = topId;
  answer.request = wanted;
  for (const node of answer.nodes) seen.tenants.add(node.tenant);
  return answer;
}

export function Cache({ session }) {
  const [, redraw] = useReducer((number) => number + 1, 0);
  const [error, setError] = useState(null);
  const [notice, setNotice] = useState(null);
  const [width, setWidth] = useState(widthOfCords);
  const asked = useRef(0);
  const timer = useRef(null);
  const shownPath = useRef("");
  const box = useRef(null);

  const refresh = async () => {
    const number = (asked.current += 1);
    clearTimeout(timer.current);
    const again = () => (timer.current = setTimeout(tick, INTERVAL_MS));
    try {
      const answer = await look();
      if (number !== asked.current) return;
      seen.answer = answer;
      setError(null);
      if (answer.request && shownPath.current !== answer.request) showEnd(answer);
      shownPath.current = answer.request;
    } catch (failure) {
      if (number !== asked.current) return;
      if (failure.code === "branch_not_found" && chosen.above.length) {
        chosen.above.pop(); // it was evicted: show what it hung on
        return refresh();
      }
      if (failure.code === "request_not_found") {
        setNotice(`No path of the request ${chosen.request} is known: it is too old, or not one that you may see.`);
        chosen.request = "";
        return refresh();
      }
      setError(failure.message);
    }
    redraw();
    again();
  };
  const showEnd = ({ nodes }) => {
    const end = nodes.findLast((node) => node.path_tokens > 0);
    if (!end) return;
    chosen.selected = end.id;
    requestAnimationFrame(() => focus(end.id, false));
  };
  const tick = () => {
    if (document.visibilityState === "visible") refresh();
    else timer.current = setTimeout(tick, INTERVAL_MS);
  };
  const explain = async () => {
    const id = chosen.request;
    seen.explained = null;
    if (!id) return;
    const found = await getJson(`v1/cache/explain/${encodeURIComponent(id)}`).catch(() => null);
    if (id === chosen.request) seen.explained = found;
    redraw();
  };
  useEffect(() => {
    const measure = () => setWidth(widthOfCords());
    window.addEventListener("resize", measure);
    refresh();
    explain();
    return () => {
      asked.current = -1;
      clearTimeout(timer.current);
      window.removeEventListener("resize", measure);
    };
  }, []);

  const { answer } = seen;
  const isHanging = !matchMedia(NARROW).matches;
  const nodes = answer?.nodes ?? [];
  const hasNames = session.is_admin && new Set(nodes.map(({ tenant }) => tenant)).size > 1;
  const unfolded = [...chosen.unfolded].join();
  const drawn = useMemo(() => {
    if (!answer) return null;
    const tree = makeTree(answer, { topId: answer.topId, depth: DEPTH, unfolded: chosen.unfolded });
    const shape = isHanging ? { pitch: 30, stretch: 1 } : { pitch: 28, stretch: 0.62 };
    const room = isHanging ? { along: width - AROUND, away: innerHeight / 2 } : { along: 0, away: width - 1.7 * AROUND };
    return { tree, picture: fit(tree, { ...shape, hasNames, room }) };
  }, [answer, isHanging, hasNames, unfolded, width]);
  useEffect(() => {
    // when the first tree was on the screen, for who measures it
    if (drawn) requestAnimationFrame(() => requestAnimationFrame(() => performance.mark("quipu.cache.painted")));
  }, [drawn === null]);

  const focus = (id, withFocus = true) => {
    const element = box.current?.querySelector(`[data-id="${CSS.escape(id)}"]`);
    const knot = element?.querySelector("circle, text");
    if (!knot) return;
    if (withFocus) {
      element.focus({ preventScroll: true });
      knot.scrollIntoView({ block: "nearest", inline: "nearest" });
    } else {
      // only the drawing: who has laid a path over it is reading what stands above it
      const [inner, outer] = [knot, box.current].map((one) => one.getBoundingClientRect());
      box.current.scrollBy(inner.x - outer.x - outer.width / 2, inner.y - outer.y - outer.height / 2);
    }
  };
  const on = {
    select: (cord, withFocus = false) => {
      chosen.selected = cord.id;
      redraw();
      if (withFocus) requestAnimationFrame(() => focus(cord.id));
    },
    open: (cord) => {
      if (cord.more) {
        const before = new Set(drawn.picture.list.map(({ id }) => id));
        chosen.unfolded.add(cord.parent?.id ?? "");
        requestAnimationFrame(() => focus([...box.current.querySelectorAll("[role=treeitem]")].map(({ dataset }) => dataset.id).find((id) => !before.has(id)) ?? ""));
      } else if (cord.children.length + cord.below > 0) {
        chosen.above = [...chosen.above, ...stepsTo(cord)];
        chosen.selected = null;
        refresh().then(() => requestAnimationFrame(() => focus(box.current?.querySelector("[role=treeitem]")?.dataset.id ?? "")));
      }
      redraw();
    },
    layOver: (id) => {
      chosen.request = id;
      setNotice(null);
      document.querySelector("input[name=request]").focus(); // the button that asked may vanish
      refresh();
      explain();
    },
  };
  const climb = (number) => {
    const last = chosen.above[number];
    if (!last) return;
    chosen.above = chosen.above.slice(0, number);
    chosen.selected = last.id;
    refresh().then(() => requestAnimationFrame(() => focus(last.id)));
  };
  const press = (event) => {
    const { picture, tree } = drawn;
    const cord = picture.list.find(({ id }) => id === event.target.dataset?.id);
    const arrow = ARROWS[isHanging ? "hanging" : "lying"][event.key];
    const ends = { Home: picture.list[0], End: picture.list.at(-1) };
    if (event.key === "Escape") climb(chosen.above.length - 1);
    else if (!cord || event.ctrlKey || event.altKey || event.metaKey) return;
    else if (event.key === "Enter" || event.key === " ") on.open(cord);
    else if (arrow || event.key in ends) {
      const next = arrow ? neighbour(cord, arrow, picture) : ends[event.key];
      if (next) on.select(next, true);
    } else return;
    event.preventDefault();
  };
  const change = (name) => (event) => {
    chosen[name] = event.target.type === "checkbox" ? event.target.checked : event.target.value;
    redraw();
  };
  const changeTenant = (event) => {
    Object.assign(chosen, { tenant: event.target.value.trim(), above: [], selected: null });
    refresh();
  };

  const selected = drawn?.tree.byId.get(chosen.selected) ?? drawn?.picture.list.find(({ id }) => id === chosen.selected) ?? drawn?.picture.list[0] ?? null;
  const engines = [...new Set(nodes.flatMap((node) => Object.keys(node.engines)))].sort((one, other) => one - other);
  return html`
    <h1>Cache</h1>
    <${Controls} session=${session} engines=${engines} change=${change} changeTenant=${changeTenant} on=${on} />
    ${error && html`<p class="error" role="alert">${error}</p>`}
    ${notice && html`<p class="error" role="alert">${notice}</p>`}
    <${Steps} climb=${climb} />
    ${!answer && !error && html`<p class="note">loading…</p>`}
    ${drawn && html`<div class="explorer">
      <section class="card cords">
        ${drawn.picture.list.length === 0
          ? html`<${Nothing} />`
          : html`<div class="scroll" ref=${box} onKeyDown=${press}>
              <${Cords} picture=${drawn.picture} groups=${drawn.tree.groups} selected=${selected?.id} on=${on}
                look=${{ ...chosen, isHanging, hasNames, isWide: drawn.picture.pitch > WIDE_PITCH, now: answer.at }} />
            </div>`}
        <${Legend} nodes=${nodes} colour=${chosen.colour} />
        <p class="note">${sizeOf(nodes)}${answer.has_more ? " There are more: choose a knot and show what is below." : ""}
          ${" "}Arrows go from knot to knot, Enter shows only what is below one, Escape goes back up.</p>
      </section>
      <div class="beside">
        ${answer.request && html`<${PathCard} request=${answer.request} explained=${seen.explained} nodes=${nodes} isWhole=${!answer.topId} on=${on} />`}
        ${drawn.picture.list.length > 0 && html`<${Details} cord=${selected} now=${answer.at} on=${on} />`}
        ${chosen.showsOrder && html`<${NextToGo} order=${answer.eviction_order} byId=${drawn.tree.byId} on=${on} />`}
      </div>
    </div>`}
  `;
}

/** Return how wide the drawing may be. */
function widthOfCords() {
  const width = document.getElementById("main").clientWidth;
  return matchMedia(SIDE_BY_SIDE).matches ? width - BESIDE : width;
}

/** Return what is to be opened to come to a cord: itself, and what it hangs on. */
function stepsTo(cord) {
  const steps = [];
  for (let at = cord; at; at = at.parent) steps.unshift({ id: at.id, tokens: at.node.start + at.node.tokens });
  return steps;
}

function sizeOf(nodes) {
  const cached = nodes.reduce((sum, node) => sum + node.cached_tokens, 0);
  return `${count(nodes.length)} branches with ${count(cached)} cached tokens.`;
}

function Nothing() {
  const words = chosen.above.length ? "Nothing is cached below this knot any more." : "No block is cached yet. A prompt that fills one appears here.";
  return html`<p class="note nothing">${words}</p>`;
}

function Steps({ climb }) {
  if (!chosen.above.length) return null;
  return html`
    <nav class="steps" aria-label="Where this is">
      <button class="link" onClick=${() => climb(0)}>Whole tree</button>
      ${chosen.above.map(({ id, tokens }, at) => html`<span key=${id}>›
        ${at + 1 < chosen.above.length
          ? html`<button class="link" onClick=${() => climb(at + 1)}>token ${count(tokens)}</button>`
          : html`<b aria-current="true">behind token ${count(tokens)}</b>`}</span>`)}
    </nav>
  `;
}

function Controls({ session, engines, change, changeTenant, on }) {
  const [typed, setTyped] = useState(chosen.request);
  useEffect(() => setTyped(chosen.request), [chosen.request]);
  const submit = (event) => {
    event.preventDefault();
    on.layOver(typed.trim());
  };
  return html`
    <div class="controls" role="group" aria-label="What is shown">
      ${session.is_admin && seen.tenants.size > 1 && html`<label>Tenant
        <input name="tenant" list="tenants" value=${chosen.tenant} placeholder="all" onChange=${changeTenant} />
        <datalist id="tenants">${[...seen.tenants].map((tenant) => html`<option key=${tenant} value=${tenant}></option>`)}</datalist></label>`}
      ${(engines.length > 1 || chosen.engine) && html`<label>Engine
        <select name="engine" value=${chosen.engine} onChange=${change("engine")}>
          <option value="">all</option>
          ${[...new Set([...engines, ...(chosen.engine ? [chosen.engine] : [])])].map((id) => html`<option key=${id} value=${id}>${id}</option>`)}
        </select></label>`}
      <label>Colour by
        <select name="colour" value=${chosen.colour} onChange=${change("colour")}>
          ${Object.entries(COLOURS).map(([id, name]) => html`<option key=${id} value=${id}>${name}</option>`)}
        </select></label>
      <form onSubmit=${submit} class="request">
        <label>Path of a request
          <input name="request" value=${typed} placeholder="req-…" spellcheck=${false} autocomplete="off" onInput=${(event) => setTyped(event.target.value)} /></label>
        <button disabled=${typed.trim() === chosen.request}>${typed.trim() || !chosen.request ? "Show" : "Remove"}</button>
      </form>
      <label class="check"><input type="checkbox" name="order" checked=${chosen.showsOrder} onChange=${change("showsOrder")} />Order of eviction</label>
    </div>
  `;
}
