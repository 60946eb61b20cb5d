// The playground's settings: model, system prompt, sampling, tools. They hold for the next answer.
import { html, useState } from "./html.js";

const NUMBERS = [
  { name: "temperature", label: "Temperature", min: 0, step: 0.1 },
  { name: "top_p", label: "Top p", min: 0, max: 1, step: 0.05 },
  { name: "top_k", label: "Top k", min: 0, step: 1 },
  { name: "max_tokens", label: "Max. tokens", min: 1, step: 1 },
  { name: "seed", label: "Seed", step: 1 },
];

export const firstSettings = () => ({
  model: "",
  system: "",
  numbers: Object.fromEntries(NUMBERS.map(({ name }) => [name, ""])),
  thinking: "",
  tools: "",
});

/** `wrong` is the message about tools that were refused, or null. */
export function Settings({ settings, models, wrong, onTools, redraw }) {
  const [isWide] = useState(() => window.matchMedia("(min-width: 60rem)").matches);
  const set = (change) => (event) => {
    change(event.target.value);
    redraw();
  };
  return html`
    <details class="settings card" open=${isWide}>
      <summary>Settings</summary>
      <label>Model
        <select value=${settings.model} onChange=${set((value) => (settings.model = value))}>
          ${models.map(({ id, label }) => html`<option key=${id} value=${id}>${label}</option>`)}
        </select>
      </label>
      <label>System prompt
        <textarea rows="4" value=${settings.system} onInput=${set((value) => (settings.system = value))}></textarea>
      </label>
      <div class="numbers">
        ${NUMBERS.map(
          ({ name, label, min, max, step }) => html`<label key=${name}>${label}
            <input type="number" name=${name} min=${min} max=${max} step=${step} placeholder="default"
              value=${settings.numbers[name]} onInput=${set((value) => (settings.numbers[name] = value))} /></label>`,
        )}
        <label>Reasoning
          <select value=${settings.thinking} onChange=${set((value) => (settings.thinking = value))}>
            <option value="">default</option>
            <option value="on">on</option>
            <option value="off">off</option>
          </select>
        </label>
      </div>
      <label>Tools (JSON list)
        <textarea rows="3" name="tools" spellcheck=${false} value=${settings.tools} aria-invalid=${wrong !== null} aria-describedby=${wrong && "toolserror"}
          onInput=${(event) => onTools(event.target.value)} placeholder='[{"type": "function", "function": {…}}]'></textarea>
      </label>
      ${wrong && html`<p class="error" role="alert" id="toolserror">${wrong}</p>`}
    </details>
  `;
}
