// The usage page: by time, model, key and tenant, with cost; disputed accounts; export.
import { download, getJson, getText } from "./api.js";
import { StackedBars } from "./charts.js";
import { clock, count, money, share } from "./format.js";
import { html, useEffect, useState } from "./html.js";

const RANGES = {
  "1h": { name: "last hour", seconds: 3600, bucket: "1m", width: 60 },
  "24h": { name: "last 24 hours", seconds: 86400, bucket: "1h", width: 3600 },
  "7d": { name: "last 7 days", seconds: 7 * 86400, bucket: "1h", width: 3600 },
  "30d": { name: "last 30 days", seconds: 30 * 86400, bucket: "1d", width: 86400 },
};
const GROUPS = { model: "Model", api_key: "Key", tenant: "Tenant" };
const chosen = { range: "24h", by: ["model"] }; // outlives a look at another page

function pathOf({ range, by, until, bucket, format }) {
  const query = new URLSearchParams({ since: until - RANGES[range].seconds, until });
  for (const name of by) query.append("by", name);
  if (bucket) query.set("bucket", RANGES[range].bucket);
  if (format) query.set("format", format);
  return `ui/usage?${query}`;
}

const nextSecond = () => Math.floor(Date.now() / 1000) + 1;

export function UsagePage({ session }) {
  const [asked, setAsked] = useState({ ...chosen, until: nextSecond() });
  const [found, setFound] = useState(null);
  const [error, setError] = useState(null);
  useEffect(() => {
    let isStale = false;
    Object.assign(chosen, { range: asked.range, by: asked.by });
    Promise.all([getJson(pathOf(asked)), getJson(pathOf({ ...asked, by: [], bucket: true }))]).then(
      ([groups, times]) => isStale || (setFound({ groups, times, asked }), setError(null)),
      (failure) => isStale || setError(failure.message),
    );
    return () => (isStale = true);
  }, [asked]);
  const ask = (change) => setAsked({ ...asked, until: nextSecond(), ...change });
  const toggle = (name) => ask({ by: asked.by.includes(name) ? asked.by.filter((one) => one !== name) : [...asked.by, name] });
  const exportTable = () =>
    getText(pathOf({ ...asked, bucket: true, format: "csv" })).then(
      (text) => download(`quipu-usage-${asked.range}.csv`, "text/csv", text),
      (failure) => setError(failure.message),
    );
  return html`
    <h1>Usage</h1>
    <div class="controls" role="group" aria-label="What is shown">
      <label>Time
        <select value=${asked.range} onChange=${(event) => ask({ range: event.target.value })}>
          ${Object.entries(RANGES).map(([id, { name }]) => html`<option key=${id} value=${id}>${name}</option>`)}
        </select>
      </label>
      <fieldset>
        <legend>By</legend>
        ${Object.entries(GROUPS).map(
          ([name, title]) => html`<label key=${name}><input type="checkbox" checked=${asked.by.includes(name)} onChange=${() => toggle(name)} />${title}</label>`,
        )}
      </fieldset>
      <button onClick=${() => ask({})}>Refresh</button>
      <button onClick=${exportTable}>Export CSV</button>
    </div>
    <p class="note">${session.is_admin ? "Every tenant." : `Tenant ${session.tenant}.`} A request counts when it has ended.</p>
    ${error && html`<p class="error" role="alert">${error}</p>`}
    ${found && html`<${Found} ...${found} />`}
  `;
}

function Found({ groups, times, asked }) {
  const { total, has_prices: hasPrices } = groups;
  return html`
    <div class="cards">
      <${Figure} title="Requests" text=${count(total.requests)} />
      <${Figure} title="Prompt tokens" text=${count(total.prompt_tokens)} />
      <${Figure} title="From cache" text=${share(total.cached_tokens, total.queried_tokens)} />
      <${Figure} title="Completion tokens" text=${count(total.completion_tokens)} />
      ${hasPrices && html`<${Figure} title="Cost" text=${money(total.cost)} />`}
    </div>
    ${total.unpriced_models.length > 0 && html`<p class="note">Without a price, and so without cost: ${total.unpriced_models.join(", ")}</p>`}
    <section class="card">
      <h2>Tokens by time</h2>
      <${Timeline} rows=${times.rows} asked=${asked} />
      <details>
        <summary>As a table</summary>
        <${Table} rows=${times.rows} by=${[]} withStart hasPrices=${hasPrices} label="By time" />
      </details>
    </section>
    <section class="card">
      <h2>${groups.by.length ? `By ${groups.by.map((name) => GROUPS[name].toLowerCase()).join(", ")}` : "All together"}</h2>
      <${Table} rows=${groups.rows} by=${groups.by} hasPrices=${hasPrices} label="By group" />
    </section>
    <section class="card">
      <h2>Disputed accounts</h2>
      <${Disputed} total=${total.disputed} records=${groups.disputed} />
    </section>
  `;
}

function Figure({ title, text }) {
  return html`<section class="card graph" data-figure=${title}><h2>${title}</h2><p class="big">${text}</p></section>`;
}

function Timeline({ rows, asked }) {
  const { seconds, width } = RANGES[asked.range];
  const byStart = new Map(rows.map((row) => [row.start, row]));
  const bars = [];
  for (let start = Math.floor((asked.until - seconds) / width) * width; start < asked.until; start += width) {
    const row = byStart.get(start);
    const parts = row ? [row.cached_tokens, row.prompt_tokens - row.cached_tokens, row.completion_tokens] : [0, 0, 0];
    bars.push({ parts, title: `${clock(start)}: ${count(parts[0])} from cache, ${count(parts[1])} computed, ${count(parts[2])} completion tokens` });
  }
  return html`
    <${StackedBars} bars=${bars} kinds=${["reused", "computed", "output"]} label="Tokens by time; the table below has the numbers" />
    <p class="axis"><span>${clock(asked.until - seconds)}</span><span>${clock(asked.until)}</span></p>
    <p class="facts">
      <span><i class="key is-reused"></i>prompt, from cache</span><span><i class="key is-computed"></i>prompt, computed</span><span><i class="key is-output"></i>completion</span>
    </p>
  `;
}

function Table({ rows, by, withStart = false, hasPrices, label }) {
  if (!rows.length) return html`<p class="note">No request has ended in this time.</p>`;
  return html`
    <div class="scroll" tabindex="0" role="region" aria-label=${label}><table>
      <thead><tr>
        ${withStart && html`<th>From</th>`}${by.map((name) => html`<th key=${name}>${GROUPS[name]}</th>`)}
        <th class="n">Requests</th><th class="n">Prompt</th><th class="n">Cached</th><th class="n">Share</th><th class="n">Written</th><th class="n">Completion</th>
        ${hasPrices && html`<th class="n">Cost</th>`}<th class="n">Disputed</th>
      </tr></thead>
      <tbody>
        ${rows.map((row, at) => html`<tr key=${at}>
          ${withStart && html`<td>${clock(row.start)}</td>`}${by.map((name) => html`<td key=${name}>${row[name] ?? "–"}</td>`)}
          <td class="n">${count(row.requests)}</td><td class="n">${count(row.prompt_tokens)}</td><td class="n">${count(row.cached_tokens)}</td>
          <td class="n">${share(row.cached_tokens, row.queried_tokens)}</td><td class="n">${count(row.cache_write_tokens)}</td><td class="n">${count(row.completion_tokens)}</td>
          ${hasPrices && html`<td class="n">${money(row.cost)}</td>`}<td class="n">${count(row.disputed)}</td>
        </tr>`)}
      </tbody>
    </table></div>
  `;
}

function Disputed({ total, records }) {
  if (!total) return html`<p class="note">None: both books agree on every prompt token.</p>`;
  return html`
    <p>${count(total)} accounts did not add up. Clients were told the numbers of their first admission.${total > records.length && ` The newest ${records.length}:`}</p>
    <div class="scroll" tabindex="0" role="region" aria-label="Disputed accounts"><table>
      <thead><tr><th>Request</th><th>Closed</th><th>Tenant</th><th>Key</th><th>Model</th><th class="n">Prompt</th><th class="n">Cached</th></tr></thead>
      <tbody>
        ${records.map((record) => html`<tr key=${record.request_id}>
          <td><code>${record.request_id}</code></td><td>${clock(record.closed_at)}</td><td>${record.tenant}</td><td>${record.api_key ?? "–"}</td><td>${record.model}</td>
          <td class="n">${count(record.prompt_tokens)}</td><td class="n">${count(record.cached_tokens)}</td>
        </tr>`)}
      </tbody>
    </table></div>
  `;
}
