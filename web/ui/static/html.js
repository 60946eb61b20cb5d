// Preact and htm as every other module uses them. Text in a template is a text node, never markup, whatever it contains.
import htm from "./vendor/htm.js";
import { h, render } from "./vendor/preact.js";

export { h, render };
export { useEffect, useLayoutEffect, useMemo, useReducer, useRef, useState } from "./vendor/preact-hooks.js";
export const html = htm.bind(h);
