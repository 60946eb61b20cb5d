// The usage page: by time, model, kind, key and tenant, with cost; disputed accounts; export.
import { download, getJson, getText } from "./api.js";
import { StackedBars } from "./charts.js";
import { count, money, share, utc } from "./format.js";
import { html, useEffect, useState } from "./html.js";
import { namedRanges, rangeOf, WIDTHS } from "./usage_range.js";

const TIERS = { host: "From host", disk: "From disk", remote: "From remote" };
const tokensFrom = (row, tier) => row[`cached_${tier}_tokens`];
const GROUPS = { model: "Model", kind: "Kind", api_key: "Key", tenant: "Tenant" };
const KINDS = { generate: "Text", embed: "Embeddings", score: "Scores, reranking" };
const NAMES_AT_ONCE = 100;
const chosen = { range: "24h", first: "", last: "", by: ["model"], tenant: "" }; // outlives a look at another page
const keyNames = new Map(); // by id: those that the server has told
window.addEventListener("quipu:locked", () => {
  // the next key may be another tenant's
  keyNames.clear();
  chosen.tenant = "";
});

function pathOf({ since, until, bucket, by, tenant, withTime, format }) {
  const query = new URLSearchParams({ since, until });
  for (const name of by) query.append("by", name);
  if (tenant) query.set("tenant", tenant);
  if (withTime) query.set("bucket", bucket);
  if (format) query.set("format", format);
  return `ui/usage?${query}`;
}

const nextSecond = () => Math.floor(Date.now() / 1000) + 1;

/** Have the names of keys in a table ready. A key without a name keeps its id. */
async function learnNames({ rows, disputed }) {
  const ids = new Set([...rows, ...disputed].map((row) => row.api_key).filter((id) => id && !keyNames.has(id)));
  for (let left = [...ids]; left.length > 0; left = left.slice(NAMES_AT_ONCE)) {
    const asked = left.slice(0, NAMES_AT_ONCE);
    const { names } = await getJson(`ui/key-names?${new URLSearchParams(asked.map((id) => ["id", id]))}`);
    for (const id of asked) keyNames.set(id, names[id] ?? null);
  }
}

export function UsagePage({ session }) {
  const [asked, setAsked] = useState({ ...chosen, now: nextSecond() });
  const [found, setFound] = useState(null);
  const [tenants, setTenants] = useState([]);
  const [error, setError] = useState(null);
  const range = rangeOf(asked, asked.now);
  const query = { ...asked, ...range };
  useEffect(() => {
    let isStale = false;
    const { now, ...kept } = asked;
    Object.assign(chosen, kept);
    if (range.wrong) return;
    const tables = [getJson(pathOf(query)), getJson(pathOf({ ...query, by: [], withTime: true }))];
    Promise.all(tables)
      .then(async ([groups, times]) => {
        await learnNames(groups).catch(() => {}); // then ids are shown
        return { groups, times, range };
      })
      .then((all) => isStale || (setFound(all), setError(null)), (failure) => isStale || setError(failure.message));
    if (session.is_admin) {
      const names = (answer) => isStale || setTenants(answer.rows.map(({ tenant }) => tenant));
      getJson(pathOf({ ...query, by: ["tenant"], tenant: "" })).then(names, () => {}); // only to choose from
    }
    return () => (isStale = true);
  }, [asked]);
  const ask = (change) => setAsked({ ...asked, now: nextSecond(), ...change });
  const toggle = (name) => ask({ by: asked.by.includes(name) ? asked.by.filter((one) => one !== name) : [...asked.by, name] });
  const choose = (id) => {
    const days = id === "own" && !asked.first && !range.wrong ? { first: dayOf(range.since), last: dayOf(range.until - 1) } : {};
    ask({ range: id, ...days });
  };
  const exportTable = () =>
    getText(pathOf({ ...query, withTime: true, format: "csv" })).then(
      (text) => download(`quipu-usage-${dayOf(range.since)}-${dayOf(range.until - 1)}.csv`, "text/csv", text),
      (failure) => setError(failure.message),
    );
  const { lasts, months } = namedRanges(asked.now);
  const options = (all) => all.map(([id, name]) => html`<option key=${id} value=${id}>${name}</option>`);
  return html`
    <h1>Usage</h1>
    <div class="controls" role="group" aria-label="What is shown">
      <label>Time (UTC)
        <select name="range" value=${asked.range} onChange=${(event) => choose(event.target.value)}>
          <optgroup label="Up to now">${options(lasts)}</optgroup>
          <optgroup label="Calendar months">${options(months)}</optgroup>
          <option value="own">own range</option>
        </select>
      </label>
      ${asked.range === "own" && ["first", "last"].map((end) => html`<label key=${end}>${{ first: "First day", last: "Last day" }[end]}
        <input type="date" name=${end} value=${asked[end]} aria-describedby=${range.wrong && "rangeerror"} onChange=${(event) => ask({ [end]: event.target.value })} /></label>`)}
      ${session.is_admin && html`<label>Tenant
        <input name="tenant" list="usage-tenants" value=${asked.tenant} placeholder="all" autocomplete="off" onChange=${(event) => ask({ tenant: event.target.value.trim() })} />
        <datalist id="usage-tenants">${tenants.map((tenant) => html`<option key=${tenant} value=${tenant}></option>`)}</datalist></label>`}
      <fieldset>
        <legend>By</legend>
        ${Object.entries(GROUPS).map(
          ([name, title]) => html`<label key=${name}><input type="checkbox" name=${`by-${name}`} checked=${asked.by.includes(name)} onChange=${() => toggle(name)} />${title}</label>`,
        )}
      </fieldset>
      <button onClick=${() => ask({})}>Refresh</button>
      <button onClick=${exportTable} disabled=${Boolean(range.wrong)}>Export CSV</button>
    </div>
    <p class="note">${session.is_admin ? (asked.tenant ? `Tenant ${asked.tenant}.` : "Every tenant.") : `Tenant ${session.tenant}.`}
      ${range.wrong ? "" : ` ${utc(range.since, "date")} ${utc(range.since, "time")} to ${utc(range.until, "date")} ${utc(range.until, "time")} UTC.`} A request counts when it has ended.</p>
    ${range.wrong && html`<p class="error" role="alert" id="rangeerror">${range.wrong}</p>`}
    ${error && html`<p class="error" role="alert">${error}</p>`}
    ${found && !range.wrong && html`<${Found} ...${found} />`}
  `;
}

const dayOf = (seconds) => new Date(seconds * 1000).toISOString().slice(0, 10);

function Found({ groups, times, range }) {
  const { total, has_prices: hasPrices } = groups;
  const tiers = Object.keys(TIERS).filter((tier) => tokensFrom(total, tier) > 0);
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
      <h2>Tokens by time, in UTC</h2>
      <${Timeline} rows=${times.rows} range=${range} tiers=${tiers} />
      <details>
        <summary>As a table</summary>
        <${Table} rows=${times.rows} by=${[]} withStart tiers=${tiers} hasPrices=${hasPrices} label="By time" />
      </details>
    </section>
    <section class="card">
      <h2>${groups.by.length ? `By ${groups.by.map((name) => GROUPS[name].toLowerCase()).join(", ")}` : "All together"}</h2>
      <${Table} rows=${groups.rows} by=${groups.by} tiers=${tiers} hasPrices=${hasPrices} label="By group" />
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

function Timeline({ rows, range, tiers }) {
  const kinds = ["reused", ...tiers, "computed", "output"];
  const names = [tiers.length ? "prompt, from the device's cache" : "prompt, from cache", ...tiers.map((tier) => `prompt, ${TIERS[tier].toLowerCase()}`), "prompt, computed", "completion"];
  const width = WIDTHS[range.bucket];
  const first = Math.floor(range.since / width) * width;
  const byStart = new Map(rows.map((row) => [row.start, row]));
  const bars = [];
  let start = first;
  for (; start < range.until; start += width) {
    const row = byStart.get(start);
    const parts = row ? partsOf(row, tiers) : kinds.map(() => 0);
    bars.push({ parts, title: `${utc(start)} UTC, tokens: ${parts.map((part, at) => `${count(part)} ${names[at]}`).join("; ")}` });
  }
  const detail = { "1m": "time", "1h": "", "1d": "day" }[range.bucket];
  const ticks = [0, 1, 2, 3, 4].map((at) => utc(first + ((start - first) * at) / 4, detail));
  return html`
    <${StackedBars} bars=${bars} kinds=${kinds} unit="tokens" ticks=${ticks} label="Tokens by time, in UTC; the table below has the numbers" />
    <p class="facts">
      ${kinds.map((kind, at) => html`<span key=${kind}><i class=${`key is-${kind}`}></i>${names[at]}</span>`)}
      <span>a bar is ${{ "1m": "a minute", "1h": "an hour", "1d": "a day" }[range.bucket]}</span>
    </p>
  `;
}

/** Return the tokens of a bar: from cache, of which those from lower tiers are apart, computed, and completion. */
function partsOf(row, tiers) {
  const loaded = tiers.map((tier) => tokensFrom(row, tier));
  const rest = row.cached_tokens - loaded.reduce((sum, tokens) => sum + tokens, 0);
  return [rest, ...loaded, row.prompt_tokens - row.cached_tokens, row.completion_tokens];
}

/** A key by its name, with its id, since names may be given twice; an adapter with its model; a kind in words. */
function Group({ name, value, parent }) {
  if (name === "model" && parent) return html`${value} <small class="id">adapter of ${parent}</small>`;
  if (name === "kind") return html`${KINDS[value] ?? value}`;
  const known = name === "api_key" ? keyNames.get(value) : null;
  return known ? html`${known} <small class="id">${value}</small>` : html`${value ?? "–"}`;
}

function Table({ rows, by, withStart = false, tiers, hasPrices, label }) {
  if (!rows.length) return html`<p class="note">No request has ended in this time.</p>`;
  return html`
    <div class="scroll" tabindex="0" role="region" aria-label=${label}><table>
      <thead><tr>
        ${withStart && html`<th>From (UTC)</th>`}${by.map((name) => html`<th key=${name}>${GROUPS[name]}</th>`)}
        <th class="n">Requests</th><th class="n">Prompt</th><th class="n">Cached</th>
        ${tiers.map((tier) => html`<th key=${tier} class="n">${TIERS[tier]}</th>`)}
        <th class="n">Share</th><th class="n">Written</th><th class="n">Completion</th>
        ${hasPrices && html`<th class="n">Cost</th>`}<th class="n">Disputed</th>
      </tr></thead>
      <tbody>
        ${rows.map((row, at) => html`<tr key=${at}>
          ${withStart && html`<td>${utc(row.start)}</td>`}${by.map((name) => html`<td key=${name}><${Group} name=${name} value=${row[name]} parent=${row.parent} /></td>`)}
          <td class="n">${count(row.requests)}</td><td class="n">${count(row.prompt_tokens)}</td><td class="n">${count(row.cached_tokens)}</td>
          ${tiers.map((tier) => html`<td key=${tier} class="n">${count(tokensFrom(row, tier))}</td>`)}
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
      <thead><tr><th>Request</th><th>Closed (UTC)</th><th>Tenant</th><th>Key</th><th>Model</th><th class="n">Prompt</th><th class="n">Cached</th></tr></thead>
      <tbody>
        ${records.map((record) => html`<tr key=${record.request_id}>
          <td><code>${record.request_id}</code></td><td>${utc(record.closed_at)}</td><td>${record.tenant}</td><td><${Group} name="api_key" value=${record.api_key} /></td><td><${Group} name="model" value=${record.model} parent=${record.parent} /></td>
          <td class="n">${count(record.prompt_tokens)}</td><td class="n">${count(record.cached_tokens)}</td>
        </tr>`)}
      </tbody>
    </table></div>
  `;
}
