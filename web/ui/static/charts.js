// Small graphs in SVG. Their colours are in the style sheet, so that they follow light and dark by themselves.
import { short } from "./format.js";
import { html } from "./html.js";

const WIDTH = 120;
const HEIGHT = 32;

/** A line of the last values, oldest first; null is a gap. The scale begins at 0. */
export function Sparkline({ values, slots, label }) {
  const top = Math.max(...values.filter(Number.isFinite), 1e-9);
  const place = (value, at) => `${(((slots - values.length + at) / (slots - 1)) * WIDTH).toFixed(1)},${(HEIGHT - 2 - (value / top) * (HEIGHT - 5)).toFixed(1)}`;
  const runs = [[]];
  values.forEach((value, at) => (Number.isFinite(value) ? runs.at(-1).push(place(value, at)) : runs.push([])));
  return html`
    <svg class="spark" viewBox=${`0 0 ${WIDTH} ${HEIGHT}`} preserveAspectRatio="none" role="img" aria-label=${label}>
      ${runs.filter((run) => run.length).map((run) => html`<polyline key=${run[0]} points=${run.length > 1 ? run.join(" ") : `${run[0]} ${run[0]}`} />`)}
    </svg>
  `;
}

/** Bars over time. `bars` have `title` and `parts`: a number for each of `kinds`. `ticks` are written below, evenly. */
export function StackedBars({ bars, kinds, label, unit, ticks }) {
  const top = roundUp(Math.max(...bars.map(({ parts }) => parts.reduce((sum, part) => sum + part, 0)), 1));
  const width = WIDTH / Math.max(bars.length, 1);
  return html`
    <div class="chart">
      <p class="axis down" aria-hidden="true"><span>${short(top)} ${unit}</span><span>${short(top / 2)}</span><span>0</span></p>
      <svg class="bars" viewBox=${`0 0 ${WIDTH} 40`} preserveAspectRatio="none" role="img" aria-label=${label}>
        ${[0, 20].map((y) => html`<line key=${y} class="grid" x1="0" x2=${WIDTH} y1=${y} y2=${y} />`)}
        ${bars.map(({ title, parts }, at) => {
          let below = 0;
          return html`<g key=${at}>
            <title>${title}</title>
            <rect class="is-ground" x=${at * width} y="0" width=${width} height="40" />
            ${parts.map((part, place) => {
              const height = (part / top) * 40;
              below += height;
              return part > 0 && html`<rect key=${place} class=${`is-${kinds[place]}`} x=${(at + 0.1) * width} y=${40 - below} width=${0.8 * width} height=${height} />`;
            })}
          </g>`;
        })}
      </svg>
      <p class="axis along" aria-hidden="true">${ticks.map((text, at) => html`<span key=${at}>${text}</span>`)}</p>
    </div>
  `;
}

/** Return the next number of the form 1, 2 or 5 with zeros. */
function roundUp(number) {
  const size = 10 ** Math.floor(Math.log10(number));
  return [1, 2, 5, 10].find((step) => step * size >= number) * size;
}

/** Shares of a whole in one line, with their names and numbers below. */
export function Shares({ parts, label }) {
  const all = parts.reduce((sum, { value }) => sum + value, 0);
  return html`
    <div class="strip sources" role="img" aria-label=${label}>
      ${parts.map(({ kind, value }) => value > 0 && html`<span key=${kind} class=${`is-${kind}`} style=${{ width: `${(100 * value) / all}%` }}></span>`)}
    </div>
    <p class="facts">
      ${parts.map(({ kind, name, text }) => html`<span key=${kind}><i class=${`key is-${kind}`}></i>${name} ${text}</span>`)}
    </p>
  `;
}
