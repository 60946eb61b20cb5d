// Draws the tree as a quipu: pendant cords on a main cord, knots where prompts part. SVG, with a tree for screen readers.
import { radiusOf } from "./cache_layout.js";
import { ageOf, labelOf, TIERS } from "./cache_words.js";
import { count } from "./format.js";
import { html } from "./html.js";

const BEND = 11;
const KNOT = 11; // as far as the largest one reaches
const HANGING = { along: 28, before: 34, after: 40 };
const LYING = { along: 26, before: 20, after: 84 };
const NAME = 16; // a tenant's name above cords that lie
const ENGINE_COLOURS = 6;
const LONG = 62; // a cord with room for its number of tokens
const LETTER = 7;

/** `picture` is of layOut(), `look` how it is shown, `on` what is called for a cord: select, open. */
export function Cords({ picture, groups, look, selected, on }) {
  const { along, before, after } = marginOf(look);
  const across = picture.width + 2 * along;
  const away = picture.depth + before + after;
  const at = (a, d) => (look.isHanging ? [a + along, d + before] : [d + before, a + along]);
  const [width, height] = look.isHanging ? [across, away] : [away, across];
  const focused = selected ?? picture.list[0]?.id;
  return html`
    <svg class=${`quipu ${look.request ? "has-path" : ""}`} width=${width} height=${height} role="tree"
      aria-label="Prefix tree of the cache" aria-orientation=${look.isHanging ? "horizontal" : "vertical"}>
      <g aria-hidden="true">
        ${groups.map((group) => html`<${MainCord} key=${group.tenant} group=${group} at=${at} look=${look} />`)}
      </g>
      <g aria-hidden="true">
        ${["edge", ""].map((part) => picture.list.map((cord) => cord.node?.path_tokens > 0 &&
        html`<${Overlay} key=${part + cord.id} cord=${cord} at=${at} part=${part} />`))}
      </g>
      ${picture.list.map((cord) => html`<${Cord} key=${cord.id} cord=${cord} at=${at} look=${look} on=${on}
        isSelected=${cord.id === selected} isFocusable=${cord.id === focused} />`)}
    </svg>
  `;
}

function MainCord({ group, at, look }) {
  const [x0, y0] = at(group.a0 - 14, 0);
  const [x1, y1] = at(group.a1 + 14, 0);
  const name = group.tenant.length > 24 ? `${group.tenant.slice(0, 23)}…` : group.tenant;
  const [x, y] = look.isHanging ? [x0 + 2, y0 - 12] : [x0 - 3, y0 - 7];
  return html`
    <line class="main-cord" x1=${x0} y1=${y0} x2=${x1} y2=${y1} />
    <line class="main-ply" x1=${x0} y1=${y0} x2=${x1} y2=${y1} />
    ${look.hasNames && html`<text class="tenant" x=${x} y=${y}>${name}</text>`}
  `;
}

function Cord({ cord, at, look, on, isSelected, isFocusable }) {
  const siblings = cord.parent?.children ?? null;
  const classes = ["cord", ...(cord.more ? ["is-more"] : classesOf(cord, look)), isSelected ? "is-selected" : ""];
  const [x, y] = at(cord.a, cord.d1);
  return html`
    <g class=${classes.join(" ")} role="treeitem" data-id=${cord.id} tabindex=${isFocusable ? 0 : -1}
      aria-level=${cord.level} aria-selected=${isSelected} aria-label=${labelOf(cord, look.now)}
      aria-setsize=${siblings?.length ?? null} aria-posinset=${siblings ? siblings.indexOf(cord) + 1 : null}
      aria-expanded=${cord.children.length ? true : cord.below || cord.more ? false : null}
      onClick=${() => on.select(cord)} onDblClick=${() => on.open(cord)} onFocus=${() => isSelected || on.select(cord)}>
      <${Strands} cord=${cord} at=${at} look=${look} />
      ${cord.more ? html`<text class="number" x=${x + (look.isHanging ? 0 : 4)} y=${y + (look.isHanging ? 12 : 4)}
        text-anchor=${look.isHanging ? "middle" : "start"}>+${count(cord.more)}</text>` : html`<${Knot} cord=${cord} at=${at} look=${look} />`}
    </g>
  `;
}

function classesOf({ node }, look) {
  const engines = enginesOf(node);
  const isOther = look.engine !== "" && !(look.engine in node.engines);
  return [
    { age: `age-${ageOf(node, look.now)}`, tier: tierClass(node.tier), engine: engineClass(engines[0]) }[look.colour],
    isOther ? "is-elsewhere" : "",
    node.path_tokens > 0 ? "is-on-path" : "",
  ];
}

export const tierClass = (tier) => `tier-${TIERS.includes(tier) ? tier : "other"}`;

export const engineClass = (engine) => (engine === undefined ? "engine-none" : `engine-${Number(engine) % ENGINE_COLOURS}`);

/** Return the engines that have some of a branch, those with most of it first. */
export const enginesOf = (node) => Object.entries(node.engines).sort(([, one], [, other]) => other - one).map(([id]) => id);

/** The path of a request, below all cords: its edge, and within it a ground on which they can be seen. */
function Overlay({ cord, at, part }) {
  const { link, whole } = shapeOf(cord, at);
  return html`
    ${link && html`<path class=${`over ${part}`} d=${link} />`}
    <path class=${`over ${part}`} d=${whole} ...${partly(cord.node.path_tokens / cord.node.tokens)} />
  `;
}

function Strands({ cord, at, look }) {
  const { node } = cord;
  const { link, whole, reach } = shapeOf(cord, at);
  const share = node ? node.cached_tokens / node.tokens : 1;
  const thickness = { strokeWidth: node ? Math.min(1.9 + 0.6 * Math.log2(Math.max(node.requests, 1)), 6) : 1.2 };
  const second = look.colour === "engine" && node && enginesOf(node)[1];
  return html`
    ${link && html`<path class="link" d=${link} />`}
    ${share < 1 && html`<path class="gone" d=${whole} />`}
    ${share > 0 && html`<path class="strand" d=${whole} ...${partly(share)} style=${thickness} />`}
    ${share > 0 && node && node.tier !== "device" && html`<path class="tier-mark" d=${whole} style=${thickness} />`}
    ${second && html`<path class=${`second ${engineClass(second)}`} d=${whole} style=${thickness} />`}
    <path class="hit" d=${reach} />
  `;
}

/** Return the parts of a cord: how it comes to its place, if it begins beside its knot, what hangs there, and its reach. */
function shapeOf({ id, a, d0, d1, parent }, at) {
  const from = parent?.a ?? a;
  const edge = parent ? 0.8 * radiusOf(parent.node.requests) : 0; // of the knot that it is tied to
  const start = d0 + (from === a ? edge : BEND);
  const point = (along, away) => at(along, away).map((value) => value.toFixed(1)).join(" ");
  const third = (d1 - start) / 3;
  const sway = swayOf(id);
  return {
    link: from !== a && `M${point(from + edge, d0)} L${point(a - BEND, d0)} Q${point(a, d0)} ${point(a, start)}`,
    whole: `M${point(a, start)} C${point(a + sway, start + third)} ${point(a - sway, start + 2 * third)} ${point(a, d1)}`,
    reach: `M${point(a, d0 + KNOT)} L${point(a, d1)}`, // the knot itself is not its own
  };
}

/** Return the attributes by which only the first part of a cord is drawn. */
const partly = (part) => (part < 1 ? { pathLength: 100, "stroke-dasharray": `${(100 * part).toFixed(1)} 100` } : {});

/** Return how far a cord hangs from straight: a little, and the same each time. */
const swayOf = (id) => ((parseInt(id.slice(-2), 16) || 0) / 255 - 0.5) * 7;

function Knot({ cord, at, look }) {
  const { node, order, below, children, d0, d1, a } = cord;
  const [x, y] = at(a, d1);
  const radius = radiusOf(node.requests);
  const isKnot = children.length + below > 0;
  const [pinX, pinY] = at(a, (d0 + d1) / 2);
  const counted = `${count(node.requests)}×`;
  const tokens = look.isHanging && cord.length > LONG && (look.isWide || cord.level === 1) ? count(node.tokens) : "";
  const text = look.showsOrder ? (order ? count(order) : "") : labelAt(cord, counted, look, isKnot);
  const place = look.isHanging
    ? { x: x + radius + 3, y: isKnot ? y - 4 : y + 4 }
    : isKnot ? { x: x - 2, y: y - radius - 3, "text-anchor": "end" } : { x: x + radius + 5, y: y + 4 };
  return html`
    ${node.pinned_until && html`<path class="pin" d=${`M${pinX} ${pinY - 7}l6 7-6 7-6-7z`}><title>pinned</title></path>`}
    ${isKnot ? html`
      <circle class="knot" cx=${x} cy=${y} r=${radius} />
      <path class="turns" d=${turnsOf(x, y, radius, look.isHanging)} />`
    : html`<circle class="end" cx=${x} cy=${y} r=${Math.max(radius * 0.6, 2.2)} />`}
    ${node.in_use && html`<circle class="ring" cx=${x} cy=${y} r=${radius + 3.5} />`}
    ${below > 0 && html`<path class="frayed" d=${frayed(x, y, radius, look.isHanging)} />`}
    ${tokens && html`<text class="number tokens" x="0" y="0" text-anchor="middle" transform=${`translate(${pinX - 6} ${pinY}) rotate(-90)`} dx=${node.pinned_until ? 24 : 0}>${tokens}</text>`}
    ${text && html`<text class="number" ...${place}>${text}</text>`}
  `;
}

/** Return the room around the drawing. */
const marginOf = ({ isHanging, hasNames }) => (isHanging ? HANGING : { ...LYING, along: LYING.along + (hasNames ? NAME : 0) });

function labelAt({ node, length }, counted, look, isKnot) {
  if (!look.isHanging && !isKnot) return `${count(node.tokens)} · ${counted}`;
  if (node.requests < 2 || (!look.isHanging && length < LETTER * counted.length)) return "";
  return counted;
}

/** Return the turns of the cord around itself that make a knot. */
function turnsOf(x, y, radius, isHanging) {
  const half = radius * 0.8;
  return [-0.35, 0.35]
    .map((place) => (isHanging
      ? `M${x - half} ${y + place * radius + 1.5}q${half} -3 ${2 * half} -1`
      : `M${x + place * radius - 1.5} ${y - half}q3 ${half} 1 ${2 * half}`))
    .join("");
}

/** Return loose ends: more branches than are loaded. */
function frayed(x, y, radius, isHanging) {
  const ends = [-5, 0, 5];
  return ends.map((end) => (isHanging ? `M${x} ${y + radius}q${end / 2} 5 ${end} 12` : `M${x + radius} ${y}q5 ${end / 2} 12 ${end}`)).join("");
}
