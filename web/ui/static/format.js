// Numbers, durations and times as people read them.

const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const compact = new Intl.NumberFormat("en", { notation: "compact", maximumFractionDigits: 1 });

export const count = (number) => (number === null || number === undefined ? "–" : whole.format(number));

export const short = (number) => (Math.abs(number) < 10000 ? rate(number) : compact.format(number));

export function rate(number) {
  if (!Number.isFinite(number)) return "–";
  return number !== 0 && Math.abs(number) < 10 ? number.toFixed(1) : whole.format(number);
}

export const share = (part, all) => (all > 0 ? `${((100 * part) / all).toFixed(1)} %` : "–");

export function duration(seconds) {
  if (!Number.isFinite(seconds)) return "–";
  if (seconds < 0.0995) return `${(seconds * 1000).toFixed(1)} ms`;
  if (seconds < 0.9995) return `${(seconds * 1000).toFixed(0)} ms`;
  return `${seconds.toFixed(seconds < 9.95 ? 2 : 1)} s`;
}

export function money(cost) {
  const amounts = Object.entries(cost).map(([currency, amount]) => `${amount} ${currency}`);
  return amounts.length ? amounts.join(" + ") : "–";
}

const utcDay = new Intl.DateTimeFormat("en", { month: "short", day: "numeric", timeZone: "UTC" });
const utcDate = new Intl.DateTimeFormat("en", { year: "numeric", month: "short", day: "numeric", timeZone: "UTC" });
const utcTime = new Intl.DateTimeFormat("en", { hour: "2-digit", minute: "2-digit", hourCycle: "h23", timeZone: "UTC" });

/** Return a time in UTC; `detail` is "day", "date" (with the year), "time", or all but the year. */
export function utc(unixSeconds, detail = "") {
  const ms = unixSeconds * 1000;
  const one = { day: utcDay, date: utcDate, time: utcTime }[detail];
  return one ? one.format(ms) : `${utcDay.format(ms)} ${utcTime.format(ms)}`;
}

export function clock(unixSeconds, withDate = true) {
  const date = new Date(unixSeconds * 1000);
  const time = date.toLocaleTimeString([], { hour: "2-digit", minute: "2-digit" });
  return withDate ? `${date.toLocaleDateString([], { month: "short", day: "numeric" })} ${time}` : time;
}
