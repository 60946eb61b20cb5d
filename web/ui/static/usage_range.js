// The ranges of the usage page: the last hours and days, calendar months, and one's own. Pure functions; all in UTC, as the
// server's buckets, reports and prices are.

const HOUR = 3600;
const DAY = 86400;
const MOST_DAYS = 1000; // as many buckets as the server gives
const NUM_MONTHS = 13;
export const WIDTHS = { "1m": 60, "1h": HOUR, "1d": DAY };
const LASTS = {
  "1h": { name: "last hour", seconds: HOUR },
  "24h": { name: "last 24 hours", seconds: DAY },
  "7d": { name: "last 7 days", seconds: 7 * DAY },
  "30d": { name: "last 30 days", seconds: 30 * DAY },
};
const monthName = new Intl.DateTimeFormat("en", { month: "long", year: "numeric", timeZone: "UTC" });

/** Return [id, name] of the ranges before one's own: lengths up to now, and months, the newest first. */
export function namedRanges(now) {
  const today = new Date(now * 1000);
  const months = Array.from({ length: NUM_MONTHS }, (_, back) => {
    const first = new Date(Date.UTC(today.getUTCFullYear(), today.getUTCMonth() - back, 1));
    return [first.toISOString().slice(0, 7), monthName.format(first)];
  });
  return { lasts: Object.entries(LASTS).map(([id, { name }]) => [id, name]), months };
}

/** Return {since, until, bucket} of what is chosen, in Unix seconds, or {wrong} in words. `now` is a whole second. */
export function rangeOf({ range, first, last }, now) {
  if (range in LASTS) return withBucket(now - LASTS[range].seconds, now);
  if (range !== "own") {
    const [year, month] = range.split("-").map(Number);
    return withBucket(Date.UTC(year, month - 1, 1) / 1000, Math.min(Date.UTC(year, month, 1) / 1000, now));
  }
  const [since, end] = [first, last].map((day) => Date.parse(`${day}T00:00:00Z`) / 1000);
  if (!Number.isFinite(since) || !Number.isFinite(end)) return { wrong: "Choose the first and the last day." };
  if (end < since) return { wrong: "The last day is before the first." };
  if (since < 0 || end > Date.UTC(9999, 11, 30) / 1000) return { wrong: "Choose days between 1970 and 9999." };
  if ((end - since) / DAY >= MOST_DAYS) return { wrong: `Choose at most ${MOST_DAYS} days.` };
  return withBucket(since, end + DAY);
}

function withBucket(since, until) {
  const seconds = until - since;
  return { since, until, bucket: seconds <= 2 * HOUR ? "1m" : seconds <= 8 * DAY ? "1h" : "1d" };
}
