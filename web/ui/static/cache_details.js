// Beside the cords: what the chosen one is, what lies over it, what is evicted next, and what the colours mean.
import { chosen } from "./cache_choice.js";
import { AGES, aboutKnot, ago, placeOf, times, TIERS } from "./cache_words.js";
import { engineClass, enginesOf, tierClass } from "./cords.js";
import { explainInWords } from "./explain.js";
import { clock, count, share } from "./format.js";
import { html } from "./html.js";

const SHOWN = 8;

export function Details({ cord, now, on }) {
  if (!cord) return html`<section class="card"><h2>Nothing chosen</h2><p class="note">Choose a cord or a knot.</p></section>`;
  if (cord.more) {
    return html`<section class="card details">
      <h2>${times(cord.more, "more branch", "more branches")}</h2>
      <p>They have fewer requests than those drawn, or came later.</p>
      <button onClick=${() => on.open(cord)}>Unfold them</button>
    </section>`;
  }
  const { node } = cord;
  const branches = cord.children.filter((child) => !child.more);
  return html`
    <section class="card details">
      <h2>${cord.children.length + cord.below ? "Knot" : "End"} at token ${count(node.start + node.tokens)} <code>${node.id.slice(0, 8)}</code></h2>
      <p class="about">${aboutKnot(cord).join(" ")}</p>
      <p class="buttons">
        ${cord.children.length + cord.below > 0 && html`<button onClick=${() => on.open(cord)}>Show only what is below</button>`}
        ${node.last_request && node.last_request !== chosen.request &&
        html`<button onClick=${() => on.layOver(node.last_request)}>Path of its last request</button>`}
      </p>
      <dl>
        <div><dt>tokens</dt><dd>${count(node.tokens)}</dd></div>
        <div><dt>begins at token</dt><dd>${count(node.start)}</dd></div>
        <div><dt>cached</dt><dd>${node.cached_tokens ? `${count(node.cached_tokens)} (${share(node.cached_tokens, node.tokens)})` : "evicted"}</dd></div>
        ${chosen.request && html`<div><dt>on the path</dt><dd>${node.path_tokens ? `${count(node.path_tokens)} tokens` : "no"}</dd></div>`}
        <div><dt>last used</dt><dd title=${clock(node.last_used_at)}>${ago(now - node.last_used_at)}</dd></div>
        <div><dt>made</dt><dd title=${clock(node.created_at)}>${ago(now - node.created_at)}</dd></div>
        <div><dt>tier</dt><dd>${node.cached_tokens ? tiersOf(node) : "–"}</dd></div>
        <div><dt>eviction order</dt><dd title="of the branches shown">${evictionOf(cord)}</dd></div>
        ${node.pinned_until && html`<div><dt>pinned until</dt><dd>${clock(node.pinned_until, false)}, unless used</dd></div>`}
        <div><dt>tenant</dt><dd class="wraps">${node.tenant}</dd></div>
      </dl>
      ${enginesOf(node).length > 0 && html`<h3>Engines</h3>
      <ul class="plain">${enginesOf(node).slice(0, SHOWN).map((engine) => html`<li key=${engine}>
        <span>engine ${engine}</span>
        <span class="strip"><span class=${engineClass(engine)} style=${{ width: `${(100 * node.engines[engine]) / node.tokens}%` }}></span></span>
        <span class="n">${count(node.engines[engine])}</span></li>`)}</ul>`}
      <h3>It begins</h3>
      <p class="note">${placeOf(cord.diverged, node.start)}${cord.diverged ? "" : " (in which message is not known)"}.</p>
      ${branches.length > 0 && html`<h3>What goes on</h3>
      <ul class="plain goes-on">${branches.slice(0, SHOWN).map((child) => html`<li key=${child.id}>
        <button class="link" onClick=${() => on.select(child, true)}>${count(child.node.tokens)} tokens, ${times(child.node.requests, "request")}</button>
        <small>${placeOf(child.diverged, child.node.start)}</small></li>`)}
        ${branches.length > SHOWN && html`<li><small>and ${count(branches.length - SHOWN)} more</small></li>`}</ul>`}
    </section>
  `;
}

function tiersOf({ tier, cached_tokens_by_tier: byTier }) {
  const held = Object.entries(byTier ?? {}).filter(([, tokens]) => tokens > 0);
  return held.length > 1 ? held.map(([name, tokens]) => `${count(tokens)} on the ${name}`).join(", ") : tier;
}

function evictionOf({ node, order }) {
  if (node.in_use) return "not while in use";
  if (node.pinned_until) return "not while pinned";
  if (!node.cached_tokens) return "evicted";
  return order ? `number ${count(order)}` : "–";
}

export function PathCard({ request, explained, nodes, isWhole, on }) {
  const path = nodes.filter((node) => node.path_tokens > 0);
  const tokens = path.reduce((sum, node) => sum + node.path_tokens, 0);
  const cached = path.reduce((sum, node) => sum + Math.min(node.path_tokens, node.cached_tokens), 0);
  const prompt = explained?.prompts?.length === 1 ? explained.prompts[0] : null;
  const { words, advice } = prompt ? explainInWords({ prompt_tokens: prompt.prompt_tokens }, prompt) : { words: [], advice: [] };
  return html`
    <section class="card details path-card">
      <h2>Path of a request</h2>
      <p><code>${request}</code> <button class="link" onClick=${() => on.layOver("")}>remove</button></p>
      ${explained?.parent && html`<p>With the adapter ${explained.model} of ${explained.parent}.</p>`}
      ${path.length > 0
        ? html`<p>${count(tokens)} tokens in whole blocks${isWhole ? "" : " below this knot"}; ${cached === tokens ? "all of them are" : `${count(cached)} are`} cached now.</p>`
        : html`<p class="note">${isWhole ? "It fills no block, or so much came after it that its path is not remembered." : "It does not come by here."}</p>`}
      ${prompt && html`<p class="facts"><span><i class="key is-reused"></i>${count(prompt.cached_tokens)} came from cache</span><span>of ${count(prompt.prompt_tokens)} prompt tokens</span></p>`}
      ${words.length > 0 && html`<p>${words.join(" ")}</p>`}
      ${advice.length > 0 && html`<ul>${advice.map(({ code, text }) => html`<li key=${code}><code>${code}</code> ${text}</li>`)}</ul>`}
    </section>
  `;
}

export function NextToGo({ order, byId, on }) {
  const cords = order.map((id) => byId.get(id)).filter((cord) => cord?.node);
  if (!cords.length) return null;
  return html`
    <section class="card details">
      <h2>Next in the order of eviction</h2>
      <ol class="plain goes-on">${cords.slice(0, SHOWN).map((cord, at) => html`<li key=${cord.id}>
        <span>${at + 1}.</span> <button class="link" onClick=${() => on.select(cord, true)}>${count(cord.node.tokens)} tokens at ${count(cord.node.start)}</button>
        <small>${cord.node.requests > 1 ? `${count(cord.node.requests)} requests` : "one request"}</small></li>`)}</ol>
      <p class="note">Of the branches shown. What is in use or pinned stays.</p>
    </section>
  `;
}

export function Legend({ nodes, colour }) {
  const tiers = [...new Set(nodes.map(({ tier }) => tier))];
  const engines = [...new Set(nodes.flatMap((node) => Object.keys(node.engines)))].sort((one, other) => one - other);
  const keys = {
    age: AGES.map(({ name }, at) => ({ name, kind: `age-${at}` })),
    tier: TIERS.filter((tier) => tiers.includes(tier)).map((name) => ({ name, kind: tierClass(name) })),
    engine: engines.slice(0, 12).map((id) => ({ name: `engine ${id}`, kind: engineClass(id) })),
  }[colour];
  return html`
    <p class="facts legend">
      ${keys.map(({ name, kind }) => html`<span key=${kind + name}><i class=${`key fill ${kind}`}></i>${name}</span>`)}
      <span><${Sign} kind="knot" />prompts part or end, larger with more requests</span>
      <span><${Sign} kind="pin" />pinned</span>
      <span><${Sign} kind="ring" />in use</span>
      <span><${Sign} kind="gone" />evicted</span>
      ${tiers.some((tier) => tier !== "device") && html`<span><${Sign} kind="other-tier" />not on the device</span>`}
      <span><${Sign} kind="frayed" />more below: Enter opens it</span>
    </p>
  `;
}

function Sign({ kind }) {
  const shapes = {
    knot: html`<circle class="knot" cx="8" cy="7" r="5" />`,
    pin: html`<path class="pin" d="M8 0l6 7-6 7-6-7z" />`,
    ring: html`<circle class="ring" cx="8" cy="7" r="5.5" />`,
    gone: html`<path class="gone" d="M1 7h14" />`,
    "other-tier": html`<path class="strand" d="M1 7h14" /><path class="tier-mark" d="M1 7h14" />`,
    frayed: html`<path class="frayed" d="M8 1q-2 5-5 12M8 1v12M8 1q2 5 5 12" />`,
  };
  return html`<svg class="sign quipu" width="16" height="14" aria-hidden="true">${shapes[kind]}</svg>`;
}
