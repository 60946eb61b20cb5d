// The form of the calculator, in the element with the id `sizing`. See `sizing.js`.
"use strict";

(() => {
  const place = document.getElementById("sizing");
  if (place === null) return;
  const { MODELS, plan, show } = quipuSizing;
  const OWN = "from a config.json";
  const FIELDS = [
    ["model", "model", [...Object.keys(MODELS), OWN]],
    ["dtype", "--dtype", ["bfloat16", "float32"]],
    ["quantization", "--quantization", ["none", "int8", "int4", "int4-g128"]],
    ["kvDtype", "--kv-cache-dtype", ["auto", "int8", "float32"]],
    ["blockSize", "--block-size", 16],
    ["context", "tokens of a stream, prompt and output", 8192],
    ["streams", "streams at once", 8],
    ["memory", "memory, in GiB", 32],
  ];
  const ROWS = [
    ["weights", "weights"],
    ["tokenBytes", "KV cache of one token"],
    ["block", "one block"],
    ["blocks", "blocks, the null block included"],
    ["cache", "KV cache for these streams"],
    ["total", "in all, with 1 GiB for the process"],
    ["fit", "streams of this length that fit the memory"],
  ];

  const STYLE = `
    .sizing { display: grid; gap: .6rem 1.5rem; grid-template-columns: repeat(auto-fit, minmax(15rem, 1fr)); }
    .sizing label { display: flex; flex-direction: column; font-size: .875em; }
    .sizing label[hidden] { display: none; }
    .sizing input, .sizing select, .sizing textarea { font: inherit; padding: .25rem; color: inherit;
      background: var(--color-background-secondary, transparent); border: 1px solid gray; border-radius: .2rem; }
    .sizing label:has(textarea) { grid-column: 1 / -1; }
    .sizing-error { color: #c0392b; min-height: 1.5em; margin: .5rem 0; }
    #sizing table { display: table; width: 100%; } #sizing th { text-align: left; font-weight: normal; }
    #sizing td { text-align: right; font-variant-numeric: tabular-nums; }
    #sizing-command { white-space: pre-wrap; margin: 1rem 0; }`;

  function element(name, attributes, ...children) {
    const one = Object.assign(document.createElement(name), attributes);
    one.append(...children);
    return one;
  }

  const inputs = {};
  const form = element("form", { className: "sizing" });
  for (const [name, label, values] of FIELDS) {
    inputs[name] = Array.isArray(values)
      ? element("select", { name }, ...values.map((value) => element("option", {}, value)))
      : element("input", { name, type: "number", min: 1, step: name === "memory" ? "any" : 1, value: values });
    form.append(element("label", {}, element("span", {}, label), inputs[name]));
  }
  const own = element("textarea", { name: "config", rows: 6, spellcheck: false });
  const ownLabel = element("label", { hidden: true }, element("span", {}, "config.json"), own);
  form.append(ownLabel);
  const error = element("p", { className: "sizing-error", role: "alert" });
  const cells = Object.fromEntries(ROWS.map(([name]) => [name, element("td", { id: `sizing-${name}` })]));
  const table = element("table", { className: "docutils" }, element("tbody", {},
    ...ROWS.map(([name, label]) => element("tr", {}, element("th", { scope: "row" }, label), cells[name]))));
  const command = element("pre", { id: "sizing-command" });

  function update() {
    const isOwn = inputs.model.value === OWN;
    ownLabel.hidden = !isOwn;
    let found = null;
    error.textContent = "";
    try {
      if (isOwn && own.value.trim() === "") throw new Error("paste the model's config.json");
      found = plan({
        data: isOwn ? JSON.parse(own.value) : MODELS[inputs.model.value],
        model: "MODEL",
        dtype: inputs.dtype.value,
        quantization: inputs.quantization.value === "none" ? "" : inputs.quantization.value,
        kvDtype: inputs.kvDtype.value,
        blockSize: Math.floor(inputs.blockSize.valueAsNumber),
        context: Math.floor(inputs.context.valueAsNumber),
        streams: Math.floor(inputs.streams.valueAsNumber),
        memory: inputs.memory.valueAsNumber * 2 ** 30,
      });
    } catch (problem) {
      error.textContent = problem.message;
    }
    for (const [name] of ROWS) {
      const isCount = name === "blocks" || name === "fit";
      const value = found?.[name];
      cells[name].textContent = value === undefined ? "" : isCount ? value.toLocaleString("en") : show(value);
    }
    command.textContent = found?.command ?? "";
  }

  form.addEventListener("input", update);
  form.addEventListener("submit", (event) => event.preventDefault());
  place.replaceChildren(element("style", {}, STYLE), form, error, table, command);
  update();
})();
