// Requests to the server that served this page, with the key of this tab.
//
// What must always hold: the key is kept in sessionStorage alone, which ends with the tab, and is sent in a header only:
// no URL and no cookie has it.

const KEY = "quipu.key";
const SENDABLE = /^[\x21-\x7e]+$/; // what a header can carry

export class ApiError extends Error {
  constructor(status, message, code, param) {
    super(message);
    this.status = status;
    this.code = code;
    this.param = param; // the field that is wrong, if the server names one
  }
}

export const currentKey = () => sessionStorage.getItem(KEY);

export function setKey(key) {
  if (key) sessionStorage.setItem(KEY, key);
  else sessionStorage.removeItem(KEY);
}

/** Send a request; return the response if it succeeded. Throws ApiError. `path` is relative to the server's root. */
export async function request(path, { body, signal } = {}) {
  const headers = {};
  const key = currentKey();
  if (key && !SENDABLE.test(key)) throw lock(new ApiError(401, "This is not a key."));
  if (key) headers.Authorization = `Bearer ${key}`;
  if (body !== undefined) headers["Content-Type"] = "application/json";
  let response;
  try {
    response = await fetch(new URL(`../${path}`, document.baseURI), {
      method: body === undefined ? "GET" : "POST",
      headers,
      body: body === undefined ? undefined : JSON.stringify(body),
      signal,
      cache: "no-store",
      credentials: "omit",
      redirect: "error",
      referrerPolicy: "no-referrer",
    });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError(0, "The server does not answer.");
  }
  if (response.ok) return response;
  const error = await errorOf(response);
  throw error.status === 401 ? lock(error) : error;
}

/** Have the page ask for a key; return the error that says why. */
function lock(error) {
  window.dispatchEvent(new CustomEvent("quipu:locked", { detail: error.message }));
  return error;
}

export const getJson = async (path, options) => (await request(path, options)).json();

export const getText = async (path, options) => (await request(path, options)).text();

async function errorOf(response) {
  try {
    const { error } = await response.json();
    return new ApiError(response.status, String(error.message), error.code, error.param);
  } catch {
    return new ApiError(response.status, `The server answered ${response.status}.`);
  }
}

/** Yield the data of each server-sent event of a response, parsed; `[DONE]` ends them. */
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      const lines = (rest + value).split("\n");
      rest = lines.pop();
      for (const line of lines) {
        if (!line.startsWith("data:")) continue;
        const data = line.slice(5).trim();
        if (data === "[DONE]") return;
        yield JSON.parse(data);
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

/** Offer text as a file. */
export function download(name, type, text) {
  const url = URL.createObjectURL(new Blob([text], { type }));
  const link = document.createElement("a");
  link.href = url;
  link.download = name;
  link.click();
  URL.revokeObjectURL(url);
}
