// Reads the text of /metrics, and makes of two readings what happened between them. Pure functions.

const LINE = /^quipu:([a-z0-9_]+)(?:\{(.*)\})? (\S+)$/;
const LOWER_TIERS = ["host", "disk", "remote"];
const LABEL = /([a-z_]+)="((?:[^"\\]|\\.)*)"/g;

/** Return the samples by name: a list of {labels, value} each. */
export function parseMetrics(text) {
  const samples = new Map();
  for (const line of text.split("\n")) {
    const found = LINE.exec(line);
    if (!found) continue;
    const labels = {};
    for (const [, name, value] of (found[2] ?? "").matchAll(LABEL)) labels[name] = value;
    if (!samples.has(found[1])) samples.set(found[1], []);
    samples.get(found[1]).push({ labels, value: Number(found[3]) });
  }
  return samples;
}

/** Return the sum of a metric over all engines, of those samples that have the given label values. */
export function sumOf(samples, name, wanted = {}) {
  let sum = 0;
  for (const { labels, value } of samples.get(name) ?? []) {
    if (Object.entries(wanted).every(([label, text]) => labels[label] === text)) sum += value;
  }
  return sum;
}

/** Return a point of the graphs: gauges now, and rates since the reading before. Times are in seconds. */
export function pointOf(before, now) {
  const seconds = Math.max(now.at - before.at, 0.001);
  const grown = (name, labels) => Math.max(0, sumOf(now.samples, name, labels) - sumOf(before.samples, name, labels));
  const mean = (name) => {
    const number = grown(`${name}_count`);
    return number ? grown(`${name}_sum`) / number : null;
  };
  const prompt = grown("prompt_tokens_total");
  const queried = grown("prefix_cache_queries_total"); // of which the number of cached ones is known
  const blocks = (state) => sumOf(now.samples, "kv_blocks", { state });
  return {
    requests: grown("requests_total") / seconds,
    // the counter of generated tokens grows when requests close: these two grow with each token
    tokens: (grown("inter_token_latency_seconds_count") + grown("time_to_first_token_seconds_count")) / seconds,
    prompt: prompt / seconds,
    cachedShare: queried ? (100 * grown("prefix_cache_hits_total")) / queried : null,
    steps: grown("engine_steps_total") / seconds,
    running: sumOf(now.samples, "num_requests_running"),
    waiting: sumOf(now.samples, "num_requests_waiting"),
    firstToken: mean("time_to_first_token_seconds"),
    gap: mean("inter_token_latency_seconds"),
    lag: mean("event_loop_lag_seconds"),
    worstLag: worstOf(before.samples, now.samples, "event_loop_lag_seconds_bucket"),
    pool: Object.fromEntries(["used", "pinned", "cached", "free"].map((state) => [state, blocks(state)])),
    tiers: lowerTiers(now.samples),
  };
}

/** Return the tiers below the device that the engines have, fastest first. */
function lowerTiers(samples) {
  const names = new Set((samples.get("kv_tier_blocks") ?? []).map(({ labels }) => labels.tier));
  return LOWER_TIERS.filter((tier) => names.has(tier)).map((tier) => ({
    tier,
    blocks: Object.fromEntries(["used", "free"].map((state) => [state, sumOf(samples, "kv_tier_blocks", { tier, state })])),
    loaded: sumOf(samples, "kv_tier_loaded_blocks_total", { tier }),
    failed: sumOf(samples, "kv_tier_failed_load_blocks_total", { tier }),
  }));
}

/** Return the upper bound of the highest bucket that something fell into; Infinity beyond the last, null for nothing. */
function worstOf(before, now, name) {
  const counts = new Map();
  for (const [sign, samples] of [[-1, before], [1, now]]) {
    for (const { labels, value } of samples.get(name) ?? []) {
      const bound = labels.le === "+Inf" ? Infinity : Number(labels.le);
      counts.set(bound, (counts.get(bound) ?? 0) + sign * value);
    }
  }
  const bounds = [...counts.keys()].sort((a, b) => a - b);
  const all = counts.get(Infinity) ?? 0;
  return all > 0 ? bounds.find((bound) => counts.get(bound) >= all) : null;
}
