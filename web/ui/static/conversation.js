// A conversation as a tree: an edited message or a second answer is a branch beside the first, and nothing is lost.
// Pure data; `playground.js` draws it and `answers.js` fills in answers.

let lastId = 0;

function makeNode(parent, role, fields) {
  lastId += 1;
  return { id: lastId, parent, role, children: [], chosen: 0, ...fields };
}

export class Conversation {
  constructor() {
    this.root = makeNode(null, "root", {});
  }

  /** Append a node below `parent` and choose it. */
  add(parent, role, fields) {
    const node = makeNode(parent, role, fields);
    parent.chosen = parent.children.push(node) - 1;
    return node;
  }

  /** Take back `node`, which is the last child of its parent; what was chosen before it is chosen again. */
  remove(node, before) {
    const { parent } = node;
    parent.children.splice(parent.children.indexOf(node), 1);
    parent.chosen = Math.max(0, Math.min(before, parent.children.length - 1));
  }

  /** Return the nodes of the chosen branch, first to last. */
  path() {
    const nodes = [];
    for (let node = this.root.children[this.root.chosen]; node; node = node.children[node.chosen]) nodes.push(node);
    return nodes;
  }

  get last() {
    return this.path().at(-1) ?? this.root;
  }
}

/** Choose the sibling `step` places on. */
export function switchBranch(node, step) {
  const { parent } = node;
  parent.chosen = Math.min(Math.max(parent.chosen + step, 0), parent.children.length - 1);
}

/** Return the messages of the API for everything down to and including `node`. */
export function messagesTo(node, systemPrompt) {
  const messages = [];
  for (let at = node; at.role !== "root"; at = at.parent) messages.unshift(messageOf(at));
  return systemPrompt ? [{ role: "system", content: systemPrompt }, ...messages] : messages;
}

function messageOf(node) {
  if (node.role === "tool") return { role: "tool", tool_call_id: node.callId, content: node.content };
  if (node.role === "user") return { role: "user", content: node.content };
  const message = { role: "assistant", content: node.content };
  if (node.reasoning) message.reasoning_content = node.reasoning;
  if (node.calls.length) {
    message.tool_calls = node.calls.map((call) => ({
      id: call.id,
      type: "function",
      function: { name: call.name, arguments: call.arguments },
    }));
  }
  return message;
}
