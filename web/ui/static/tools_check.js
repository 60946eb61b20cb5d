// Checks the playground's tools before anything is sent: what is wrong, and where. Pure functions.

const SPACE = /[ \t\r\n]*/y;
const STRING = /"(?:[^"\\\u0000-\u001f]|\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4}))*"/y;
const PLAIN = /-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+-]?\d+)?|true|false|null/y;

/** Return {message, at} of what is wrong with the text of a list of tools, or null. `at` is a place in the text. */
export function wrongTools(text) {
  if (!text.trim()) return null;
  let tools;
  try {
    tools = JSON.parse(text);
  } catch {
    const at = errorAt(text);
    return { message: `Not valid JSON at ${lineOf(text, at)}: ${at < text.length ? `unexpected ${JSON.stringify(String.fromCodePoint(text.codePointAt(at)))}` : "it ends too early"}.`, at };
  }
  const found = wrongIn(tools);
  return found && { message: `${found}.`, at: 0 };
}

function wrongIn(tools) {
  if (!Array.isArray(tools)) return "tools: must be a list, such as [{\"type\": \"function\", …}]";
  const names = new Set();
  for (const [at, tool] of tools.entries()) {
    const place = `tools[${at}]`;
    if (!isObject(tool)) return `${place}: must be an object`;
    if (typeof tool.type !== "string") return `${place}.type: must be a text, such as "function"`;
    if (tool.type !== "function") continue; // the server knows whether it has such tools
    if (!isObject(tool.function)) return `${place}.function: must be an object`;
    const { name, parameters } = tool.function;
    if (typeof name !== "string" || !name) return `${place}.function.name: must be the name of the function`;
    if (names.has(name)) return `${place}.function.name: ${JSON.stringify(name)} is there twice`;
    if (parameters !== undefined && parameters !== null && !isObject(parameters)) return `${place}.function.parameters: must be an object, a JSON Schema`;
    names.add(name);
  }
  return null;
}

const isObject = (value) => typeof value === "object" && value !== null && !Array.isArray(value);

/** Return "line 2, column 5" of a place in a text, both counted from 1. */
export function lineOf(text, at) {
  const before = text.slice(0, at).split("\n");
  return `line ${before.length}, column ${before.at(-1).length + 1}`;
}

/** Return where a text stops being JSON. Browsers say so each in its own words, and not always. */
export function errorAt(text) {
  const open = [];
  let at = 0;
  let wants = "value"; // or "first" (a value or the end), "key", "firstKey", "colon", "next"
  const read = (pattern) => {
    pattern.lastIndex = at;
    const found = pattern.exec(text)?.[0] ?? "";
    at += found.length;
    return found;
  };
  for (;;) {
    read(SPACE);
    const letter = text[at];
    if (wants === "colon") {
      if (letter !== ":") return at;
      wants = "value";
    } else if (wants === "next") {
      if (!open.length || (letter !== "," && letter !== open.at(-1))) return at;
      if (letter === ",") wants = open.at(-1) === "}" ? "key" : "value";
      else open.pop();
    } else if ((wants === "firstKey" || wants === "first") && letter === open.at(-1)) {
      open.pop();
      wants = "next";
    } else if (wants === "key" || wants === "firstKey") {
      if (!read(STRING)) return at;
      wants = "colon";
      continue;
    } else if (letter === "{" || letter === "[") {
      open.push(letter === "{" ? "}" : "]");
      wants = letter === "{" ? "firstKey" : "first";
    } else {
      if (!read(STRING) && !read(PLAIN)) return at;
      wants = "next";
      continue;
    }
    at += 1;
  }
}
