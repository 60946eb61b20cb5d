// The live page: what the server does now, from /metrics, and its engines.
import { getJson, getText } from "./api.js";
import { Shares, Sparkline } from "./charts.js";
import { count, duration, rate, short } from "./format.js";
import { html, useEffect, useReducer, useState } from "./html.js";
import { parseMetrics, pointOf, sumOf } from "./metrics_text.js";

const INTERVAL_MS = 2000;
const SLOTS = 90;
const FEWEST_SLOTS = 15;
const GRAPHS = [
  { name: "requests", title: "Requests per second", show: rate },
  { name: "running", title: "Running", show: count },
  { name: "waiting", title: "Waiting in the queue", show: count },
  { name: "tokens", title: "Tokens generated per second", show: short },
  { name: "prompt", title: "Prompt tokens per second", show: short },
  { name: "cachedShare", title: "Prompt tokens from cache", show: (value) => `${value.toFixed(1)} %` },
  { name: "steps", title: "Steps per second", show: rate },
  { name: "gap", title: "Between two tokens", show: duration },
  { name: "firstToken", title: "To first token", show: duration },
  { name: "lag", title: "Event-loop lag", show: duration },
];
const STATES = { used: "in use", pinned: "pinned", cached: "cached", free: "free" };
const TIERS = { host: "Host tier", disk: "Disk tier", remote: "Remote tier" };
const SOURCES = { device: "on the device", host: "from the host", disk: "from disk", remote: "from remote", unattributed: "of no known tier" };
const OUTCOMES = ["finished", "cancelled", "failed", "rejected"];
const seen = { last: null, points: [] }; // outlives a look at another page

async function look() {
  const [text, listed] = await Promise.all([getText("metrics"), getJson("v1/admin/engines").catch((error) => ({ error }))]);
  const now = { at: performance.now() / 1000, samples: parseMetrics(text), ...listed };
  const isRecent = seen.last && now.at - seen.last.at < 5 * (INTERVAL_MS / 1000);
  if (!isRecent) seen.points = [];
  seen.points.push(pointOf(isRecent ? seen.last : now, now));
  seen.points.splice(0, seen.points.length - SLOTS);
  seen.last = now;
}

export function Live() {
  const [, redraw] = useReducer((number) => number + 1, 0);
  const [error, setError] = useState(null);
  useEffect(() => {
    let timer = null;
    let isOver = false;
    const go = async () => {
      if (document.visibilityState === "visible") {
        await look().then(() => setError(null), (failure) => setError(failure.message));
      }
      if (isOver) return;
      redraw();
      timer = setTimeout(go, INTERVAL_MS);
    };
    go();
    return () => {
      isOver = true;
      clearTimeout(timer);
    };
  }, []);
  if (!seen.last) return html`<h1>Live</h1>${error ? html`<p class="error" role="alert">${error}</p>` : html`<p class="note">loading…</p>`}`;
  const { samples } = seen.last;
  const now = seen.points.at(-1);
  return html`
    <h1>Live</h1>
    ${error && html`<p class="error" role="alert">${error}</p>`}
    <div class="cards">
      ${GRAPHS.map((graph) => html`<${Graph} key=${graph.name} ...${graph} />`)}
    </div>
    <div class="columns">
      <section class="card">
        <h2>Pool of KV blocks</h2>
        <${Shares} label="Blocks of the pool by state" parts=${Object.entries(STATES).map(([kind, name]) => ({ kind, name, value: now.pool[kind], text: count(now.pool[kind]) }))} />
        ${now.tiers.map((tier) => html`<${Tier} key=${tier.tier} ...${tier} />`)}
        ${now.tiers.length > 0 && html`<${Hits} samples=${samples} />`}
      </section>
      <section class="card">
        <h2>Since the start</h2>
        <dl>
          ${OUTCOMES.map((outcome) => html`<div key=${outcome}><dt>requests ${outcome}</dt><dd>${count(sumOf(samples, "requests_total", { outcome }))}</dd></div>`)}
          <div><dt>open accounts</dt><dd>${count(sumOf(samples, "open_accounts"))}</dd></div>
          <div><dt>disputed accounts</dt><dd>${count(sumOf(samples, "usage_disputed_total"))}</dd></div>
          <div><dt>preemptions</dt><dd>${count(sumOf(samples, "num_preemptions_total"))}</dd></div>
          <div><dt>longest loop lag just now</dt><dd>${now.worstLag === null ? "–" : now.worstLag === Infinity ? "> 10 s" : `≤ ${duration(now.worstLag)}`}</dd></div>
        </dl>
      </section>
    </div>
    <${Adapters} samples=${samples} />
    <${Engines} last=${seen.last} />
  `;
}

function Tier({ tier, blocks, loaded, failed }) {
  const parts = [["cached", "cached", blocks.used], ["free", "free", blocks.free]];
  return html`
    <h2>${TIERS[tier]}</h2>
    <${Shares} label=${`Blocks of the ${tier} tier by state`} parts=${parts.map(([kind, name, value]) => ({ kind, name, value, text: count(value) }))} />
    <p class="note" data-tier=${tier}>${count(loaded)} blocks loaded, ${count(failed)} that could not be</p>
  `;
}

/** Where the cached tokens of prompts were, since the start. */
function Hits({ samples }) {
  const found = Object.entries(SOURCES).map(([tier, name]) => {
    const value = sumOf(samples, "cached_tokens_total", { tier });
    return { kind: { device: "reused", unattributed: "copied" }[tier] ?? tier, name, value, text: count(value) };
  });
  return html`
    <h2>Prompt tokens from cache</h2>
    <${Shares} label="Prompt tokens from cache by tier" parts=${found.filter(({ kind, value }) => value > 0 || kind === "reused")} />
  `;
}

function Graph({ name, title, show }) {
  const values = seen.points.map((point) => point[name]);
  const latest = values.findLast(Number.isFinite);
  const text = latest === undefined ? "–" : show(latest);
  return html`
    <section class="card graph" data-graph=${name}>
      <h2>${title}</h2>
      <p class="big">${text}</p>
      <${Sparkline} values=${values} slots=${Math.max(values.length, FEWEST_SLOTS)} label=${`${title}: now ${text}`} />
    </section>
  `;
}

/** What is loaded beside the model, if anything. */
function Adapters({ samples }) {
  const loaded = samples.get("adapter_info") ?? [];
  if (!loaded.length) return null;
  return html`
    <section class="card">
      <h2>Adapters</h2>
      <div class="scroll" tabindex="0" role="region" aria-label="Adapters"><table>
        <thead><tr><th>Adapter</th><th>Model</th><th>Digest</th><th class="n">Requests</th></tr></thead>
        <tbody>
          ${loaded.map(({ labels }) => html`<tr key=${labels.adapter}>
            <td>${labels.adapter}</td><td>${labels.model_name}</td><td><code title=${labels.digest}>${labels.digest.slice(0, 12)}</code></td>
            <td class="n">${count(sumOf(samples, "adapter_requests_total", { adapter: labels.adapter }))}</td>
          </tr>`)}
        </tbody>
      </table></div>
    </section>
  `;
}

function Engines({ last }) {
  if (last.error) return html`<section class="card"><h2>Engines</h2><p class="note">${last.error.message}</p></section>`;
  return html`
    ${last.engines.length > 0 && html`
    <section class="card">
      <h2>Engines</h2>
      <div class="scroll" tabindex="0" role="region" aria-label="Engines"><table>
        <thead><tr><th>Engine</th><th>State</th><th>Role</th><th class="n">Running</th><th class="n">Waiting</th><th class="n">Blocks in use</th><th class="n">of</th><th class="n">Deaths</th></tr></thead>
        <tbody>
          ${last.engines.map((engine) => html`<tr key=${engine.id}>
            <td>${engine.id}</td><td>${engine.state}${engine.detail && ` (${engine.detail})`}</td><td>${engine.role}</td>
            <td class="n">${count(engine.num_running)}</td><td class="n">${count(engine.num_waiting)}</td>
            <td class="n">${count(engine.blocks_used)}</td><td class="n">${count(engine.blocks_total)}</td><td class="n">${count(engine.deaths)}</td>
          </tr>`)}
        </tbody>
      </table></div>
    </section>`}
    ${last.upstreams.length > 0 && html`
    <section class="card">
      <h2>Upstreams</h2>
      <div class="scroll" tabindex="0" role="region" aria-label="Upstreams"><table>
        <thead><tr><th>Upstream</th><th>State</th><th>Models</th><th class="n">Running</th><th class="n">Failures</th></tr></thead>
        <tbody>
          ${last.upstreams.map((upstream) => html`<tr key=${upstream.id}>
            <td>${upstream.url}</td><td>${upstream.state}${upstream.detail && ` (${upstream.detail})`}</td>
            <td>${upstream.models.join(", ")}</td><td class="n">${count(upstream.num_running)}</td><td class="n">${count(upstream.failures)}</td>
          </tr>`)}
        </tbody>
      </table></div>
    </section>`}
  `;
}
