// One of the tools that the demo model was trained to call, carried out: it returns what tool.json says, and keeps in
// `asked` what it was called with.

import assert from 'node:assert/strict';
import { readFileSync } from 'node:fs';

export const tool = JSON.parse(readFileSync(new URL('tool.json', import.meta.url)));

export const asked = [];

export function carryOut(given) {
  asked.push(given);
  return tool.result;
}

export function checkCalls(numCalls) {
  assert.deepEqual(asked, Array(numCalls).fill(tool.arguments));
}

// Answers a client of the Model Context Protocol that is offered the tool; there is none to a notification.
export function mcpAnswer({ id, method, params }) {
  if (id === undefined) return undefined;
  const { name, description, parameters: inputSchema } = tool;
  const results = {
    initialize: () => ({
      protocolVersion: params.protocolVersion,
      capabilities: { tools: {} },
      serverInfo: { name: 'village', version: '1.0.0' },
    }),
    ping: () => ({}),
    'tools/list': () => ({ tools: [{ name, description, inputSchema }] }),
    'tools/call': () => ({ content: [{ type: 'text', text: carryOut(params.arguments) }] }),
  };
  const outcome = results[method]
    ? { result: results[method]() }
    : { error: { code: -32601, message: `unknown method ${method}` } };
  return { jsonrpc: '2.0', id, ...outcome };
}

// Options of both SDKs: a failed request fails the session instead of being sent again.
export const options = { apiKey: 'none', maxRetries: 0 };
export const url = process.env.QUIPU_URL;
