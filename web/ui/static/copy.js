// Copying: a button that says whether it worked, and blocks of code that have one.
import { html, useEffect, useRef, useState } from "./html.js";

const SAID_MS = 2000;

/** `what` is copied, as in "answer"; `textOf` returns the text. The focus stays on the button. */
export function CopyButton({ what, textOf }) {
  const [said, setSaid] = useState("");
  const timer = useRef(null);
  useEffect(() => () => clearTimeout(timer.current), []);
  const copy = async (event) => {
    const button = event.currentTarget;
    const isCopied = await copyText(textOf());
    button.focus();
    setSaid(isCopied ? "copied" : "could not copy");
    clearTimeout(timer.current);
    timer.current = setTimeout(() => setSaid(""), SAID_MS);
  };
  return html`<button type="button" class="link" aria-label=${said ? null : `Copy ${what}`} onClick=${copy}>${said || "copy"}</button><span class="hidden" role="status">${said}</span>`;
}

export function CodeBlock({ text, what = "code" }) {
  return html`<div class="code"><${CopyButton} what=${what} textOf=${() => text} /><pre tabindex="0" aria-label=${what}>${text}</pre></div>`;
}

async function copyText(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    return copySelected(text); // without https browsers have no clipboard, except for their own machine
  }
}

function copySelected(text) {
  const area = document.createElement("textarea");
  area.value = text;
  area.className = "hidden";
  document.body.append(area);
  area.select();
  const isCopied = document.execCommand("copy");
  area.remove();
  return isCopied;
}
