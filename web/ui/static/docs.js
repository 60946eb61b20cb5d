// The page at /docs: what /openapi.json says, operation by operation. It asks the server for nothing else.
import { html, render, useEffect, useMemo, useState } from "./html.js";

const REF = "#/components/schemas/";
const METHODS = ["get", "post", "put", "patch", "delete"];

/** Text of the document, in which code stands between backticks. */
const prose = (text) => text.split("`").map((part, index) => (index % 2 ? html`<code>${part}</code>` : part));

/** Return every operation of a tag whose path or summary contains `wanted`. */
function operationsOf(spec, tag, wanted) {
  const found = [];
  for (const [path, item] of Object.entries(spec.paths)) {
    for (const method of METHODS) {
      const operation = item[method];
      const text = operation && `${method} ${path} ${operation.summary}`.toLowerCase();
      if (text && operation.tags[0] === tag && text.includes(wanted)) found.push({ method, path, operation });
    }
  }
  return found;
}

function resolve(spec, schema) {
  const name = schema.$ref && schema.$ref.slice(REF.length);
  return name ? { name, schema: spec.components.schemas[name] } : { name: "", schema };
}

/** Return the kinds of a value, without null, and whether it may be null. */
function kindsOf(schema) {
  const all = schema.anyOf || [schema];
  const kinds = all.filter((one) => one.type !== "null");
  const nullable = kinds.length < all.length || (Array.isArray(schema.type) && schema.type.includes("null"));
  return { kinds, nullable };
}

const typeOf = (schema) => [schema.type].flat().filter((type) => type && type !== "null").join(" or ");

function limitsOf(schema) {
  const said = [];
  if (schema.minimum !== undefined) said.push(`at least ${schema.minimum}`);
  if (schema.exclusiveMinimum !== undefined) said.push(`above ${schema.exclusiveMinimum}`);
  if (schema.maximum !== undefined) said.push(`at most ${schema.maximum}`);
  if (schema.minLength) said.push("not empty");
  if (schema.maxLength !== undefined) said.push(`at most ${schema.maxLength} characters`);
  if (schema.minItems) said.push("not empty");
  if (schema.maxItems !== undefined) said.push(`at most ${schema.maxItems} items`);
  if (schema.pattern) said.push(`matches ${schema.pattern}`);
  return said.length ? `, ${said.join(", ")}` : "";
}

/** Describe one kind of a value in words. */
function wordsOf(spec, part) {
  const { name, schema } = resolve(spec, part);
  if (schema.const !== undefined) return JSON.stringify(schema.const);
  if (schema.enum) return schema.enum.filter((one) => one !== null).map((one) => JSON.stringify(one)).join(", ");
  if (typeOf(schema) === "array") return `list of ${wordsOf(spec, schema.items || {})}${limitsOf(schema)}`;
  if (schema.anyOf && !name) return schema.anyOf.map((one) => wordsOf(spec, one)).join(" or ");
  return (name || typeOf(schema) || "anything") + limitsOf(schema);
}

/** Return the schemas within a value that have fields of their own. */
function objectsIn(spec, part) {
  const { name, schema } = resolve(spec, part);
  if (schema.anyOf) return schema.anyOf.flatMap((one) => objectsIn(spec, one).map((found) => ({ ...found, name: found.name || name })));
  if (schema.items) return objectsIn(spec, schema.items);
  if (schema.additionalProperties && schema.additionalProperties !== true) return objectsIn(spec, schema.additionalProperties);
  return schema.properties && Object.keys(schema.properties).length ? [{ name, schema }] : [];
}

/** What is shown only once it is opened: schemas may contain themselves. */
function Opened({ summary, children, label }) {
  const [isOpen, setOpen] = useState(false);
  return html`<details onToggle=${(event) => setOpen(event.currentTarget.open)}><summary aria-label=${label}>${summary}</summary>${isOpen && children()}</details>`;
}

function Field({ spec, name, schema, isRequired }) {
  const { kinds, nullable } = kindsOf(schema);
  const objects = kinds.flatMap((kind) => objectsIn(spec, kind));
  const said = html`<code>${name}</code> <span class="type">${kinds.map((kind) => wordsOf(spec, kind)).join(" or ")}${nullable && !isRequired ? "" : nullable ? " or null" : ""}${schema.default === undefined ? "" : `, default ${JSON.stringify(schema.default)}`}</span>${isRequired && html` <span class="must">required</span>`}${schema.description && html`<span class="about">${prose(schema.description)}</span>`}`;
  if (!objects.length) return html`<li>${said}</li>`;
  return html`<li><${Opened} summary=${said}>${() => objects.map((object) => html`<${Fields} spec=${spec} schema=${object.schema} />`)}<//></li>`;
}

function Fields({ spec, schema }) {
  const required = schema.required || [];
  const lists = [["Refused", Object.keys(schema["x-refused-fields"] || {})], ["Ignored", schema["x-ignored-fields"] || []]];
  return html`<ul class="fields">
    ${Object.entries(schema.properties).map(([name, inner]) => html`<${Field} key=${name} spec=${spec} name=${name} schema=${inner} isRequired=${required.includes(name)} />`)}
    ${lists.map(([what, names]) => names.length > 0 && html`<li class="note">${what}: ${names.join(", ")}</li>`)}
  </ul>`;
}

/** A body or an answer: the fields of its object, or what it is. */
function Value({ spec, schema }) {
  const objects = objectsIn(spec, schema);
  if (!objects.length) return html`<p class="type">${wordsOf(spec, schema)}</p>`;
  if (objects.length === 1) return html`<${Fields} spec=${spec} schema=${objects[0].schema} />`;
  return html`<p class="type">One of:</p>${objects.map((object) => html`<${Fields} spec=${spec} schema=${object.schema} />`)}`;
}

function Media({ spec, content }) {
  return Object.entries(content || {}).map(([type, { schema, "x-event-data": events }]) => html`
    <p class="type">${type}${events ? ": one of these in each event" : ""}</p><${Value} spec=${spec} schema=${events || schema} />`);
}

function whoMay({ security }) {
  if (!security.length) return "No key is needed.";
  return security.some((one) => Object.keys(one)[0].startsWith("admin")) ? "Needs an admin key, if the server has keys." : "Needs an API key, if the server has keys.";
}

function Answer({ spec, status, answer }) {
  const said = html`<code>${status}</code> <span class="type">${answer.description}</span>`;
  return html`<li>${answer.content ? html`<${Opened} summary=${said}>${() => html`<${Media} spec=${spec} content=${answer.content} />`}<//>` : said}</li>`;
}

function Operation({ spec, method, path, operation, isOpen }) {
  const [open, setOpen] = useState(isOpen);
  const body = operation.requestBody;
  const inside = () => html`<div>
    ${operation.description && html`<p>${prose(operation.description)}</p>`}
    <p class="note">${whoMay(operation)}</p>
    ${operation.parameters && html`<h3>Parameters</h3><ul class="fields">${operation.parameters.map((one) => html`<${Field} key=${one.name} spec=${spec} name=${`${one.name} (${one.in})`} schema=${{ ...one.schema, description: one.description }} isRequired=${one.required} />`)}</ul>`}
    ${body && html`<h3>Body</h3><${Media} spec=${spec} content=${body.content} />`}
    <h3>Answers</h3><ul class="fields">${Object.entries(operation.responses).map(([status, answer]) => html`<${Answer} key=${status} spec=${spec} status=${status} answer=${answer} />`)}</ul>
  </div>`;
  return html`<details class="operation" id=${operation.operationId} open=${open} onToggle=${(event) => setOpen(event.currentTarget.open)}>
    <summary><span class="method">${method.toUpperCase()}</span><code>${path}</code><span class="what">${operation.summary}</span></summary>
    ${open && inside()}
  </details>`;
}

function Docs() {
  const [spec, setSpec] = useState(null);
  const [error, setError] = useState("");
  const [filter, setFilter] = useState("");
  useEffect(() => {
    fetch("openapi.json").then((answer) => answer.json()).then(setSpec, () => setError("The document could not be loaded."));
  }, []);
  const wanted = filter.trim().toLowerCase();
  const groups = useMemo(() => spec && spec.tags.map((tag) => ({ tag, operations: operationsOf(spec, tag.name, wanted) })), [spec, wanted]);
  const chosen = location.hash.slice(1);
  return html`<header class="bar"><span class="brand">quipu API</span><a href="openapi.json">openapi.json</a></header>
  <main>
    ${error && html`<p class="error" role="alert">${error}</p>`}
    ${spec && html`<h1>${spec.info.title} ${spec.info.version}</h1><p class="note">${prose(spec.info.description)}</p>
    <label class="filter">Find<input type="search" value=${filter} onInput=${(event) => setFilter(event.target.value)} placeholder="path or word" /></label>
    ${groups.map(({ tag, operations }) => operations.length > 0 && html`<section key=${tag.name} aria-label=${tag.name}><h2>${tag.name}</h2><p class="note">${tag.description}</p>
      ${operations.map((one) => html`<${Operation} key=${one.operation.operationId} spec=${spec} ...${one} isOpen=${one.operation.operationId === chosen} />`)}</section>`)}
    ${groups.every(({ operations }) => !operations.length) && html`<p class="note" role="status">Nothing matches.</p>`}`}
  </main>`;
}

render(html`<${Docs} />`, document.getElementById("docs"));
