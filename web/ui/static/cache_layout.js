// From the nodes of GET /v1/cache/tree to cords and knots with places. Pure functions.
//
// `a` runs along the main cord and `d` away from it, so that cords may hang down or lie to the right.

const BRANCHES_AT_A_KNOT = 24; // more are folded into one tassel
const SHORTEST = 9;
const TARGET = 24; // a cord is at least as long as a finger can hit
const STRETCH = 5;
const POWER = 0.4; // between a square root and a logarithm: 16 tokens and 100,000 are both seen
const MORE_LENGTH = 34;
const WIDEST = 60;
const LONGEST = 2.4;
const LABEL_UNIT = 8.5; // about the width of a letter of a tenant's name

/** Return {groups, byId}: the cords of each tenant, and all of them by id. `cords` know their parent and their children. */
export function makeTree(answer, { topId, depth, unfolded }) {
  const byId = new Map();
  for (const node of answer.nodes) byId.set(node.id, { id: node.id, node, parent: null, children: [], level: 1 });
  const groups = new Map();
  for (const cord of byId.values()) {
    const parent = cord.node.parent === topId ? null : byId.get(cord.node.parent);
    if (parent) {
      cord.parent = parent;
      parent.children.push(cord);
    } else {
      if (!groups.has(cord.node.tenant)) groups.set(cord.node.tenant, []);
      groups.get(cord.node.tenant).push(cord);
    }
  }
  const order = new Map(answer.eviction_order.map((id, at) => [id, at + 1]));
  const finish = (cords, parent) => {
    cords.sort((one, other) => other.node.requests - one.node.requests || one.node.created_at - other.node.created_at);
    const most = parent && unfolded.has(parent.id) ? Infinity : BRANCHES_AT_A_KNOT;
    if (cords.length > most + 1) {
      // a path that is laid over the tree is never folded away
      const kept = cords.filter(({ node }, at) => at < most || node.path_tokens > 0);
      const count = cords.length - kept.length;
      cords.length = 0;
      cords.push(...kept);
      if (count > 0) cords.push({ id: `${parent?.id ?? ""}+`, more: count, parent, children: [], level: (parent?.level ?? 0) + 1 });
    }
    // the branch that was there first is not known to differ: it does where the others differ from it
    const exact = cords.filter(({ node }) => node?.diverged?.exact).map(({ node }) => node.diverged);
    const nearest = exact.reduce((one, other) => (other.token < one.token ? other : one), exact[0]);
    for (const cord of cords) {
      if (cord.node) cord.diverged = cord.node.diverged?.exact ? cord.node.diverged : (nearest ?? cord.node.diverged);
      cord.level = (parent?.level ?? 0) + 1;
      if (cord.more) continue;
      cord.order = order.get(cord.id) ?? null;
      const unseen = cord.node.children - cord.children.length;
      // children that are not there have been evicted, or lie deeper than was asked for
      cord.below = unseen > 0 && (cord.level >= depth || answer.has_more) ? unseen : 0;
      finish(cord.children, cord);
    }
  };
  const named = [...groups].map(([tenant, cords]) => ({ tenant, cords }));
  for (const { cords } of named) finish(cords, null);
  return { groups: named, byId };
}

export const lengthOf = (tokens) => SHORTEST + STRETCH * tokens ** POWER;

export const radiusOf = (requests) => Math.min(2.6 + 1.5 * Math.log2(1 + requests), 11);

/** Give each cord its place; return {list, width, depth}: the cords from the main cord on, depth first, and the size. */
function layOut(tree, { pitch, stretch, hasNames }) {
  const list = [];
  let column = 0;
  let deepest = 0;
  const place = (cord, start) => {
    cord.a = column * pitch;
    cord.d0 = start;
    cord.length = cord.more ? MORE_LENGTH : Math.max(TARGET, stretch * lengthOf(cord.node.tokens));
    cord.d1 = start + cord.length;
    deepest = Math.max(deepest, cord.d1);
    list.push(cord);
    cord.children.forEach((child, at) => {
      if (at) column += 1;
      place(child, cord.d1);
    });
  };
  for (const group of tree.groups) {
    const first = column;
    group.a0 = column * pitch;
    group.cords.forEach((cord, at) => {
      if (at) column += 1;
      place(cord, 0);
    });
    if (hasNames) column = Math.max(column, first + Math.ceil((group.tenant.slice(0, 24).length * LABEL_UNIT) / pitch) - 1);
    group.a1 = column * pitch;
    column += hasNames ? 2 : 1;
  }
  const levels = new Map();
  for (const cord of list) {
    if (!levels.has(cord.level)) levels.set(cord.level, []);
    cord.place = levels.get(cord.level).push(cord) - 1;
  }
  return { list, levels, pitch, width: Math.max(0, column - (hasNames ? 2 : 1)) * pitch, depth: deepest };
}

/** Lay out so that few cords fill the room, and many have `pitch` each. `room` is along and away from the main cord. */
export function fit(tree, { pitch, stretch, hasNames, room }) {
  const least = layOut(tree, { pitch, stretch, hasNames });
  const wider = Math.min(Math.max(room.along / Math.max(least.width, 1), 1), WIDEST / pitch);
  const longer = Math.min(Math.max(room.away / Math.max(least.depth, 1), 1), LONGEST);
  return layOut(tree, { pitch: pitch * wider, stretch: stretch * longer, hasNames });
}

/** Return the cord that an arrow leads to from `cord`: "out" away from the main cord, "in", "back" or "on" along it. */
export function neighbour(cord, step, { levels }) {
  if (step === "out") return cord.children[0] ?? null;
  if (step === "in") return cord.parent;
  return levels.get(cord.level)[cord.place + (step === "on" ? 1 : -1)] ?? null;
}
