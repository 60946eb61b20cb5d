// A session with npm's `openai` on /v1/responses, streamed: the output of a response is part of the next one's input.

import assert from 'node:assert/strict';
import OpenAI from 'openai';
import { carryOut, checkCalls, options, tool, url } from './village.mjs';

const client = new OpenAI({ baseURL: `${url}/v1`, ...options });
const { name, description, parameters, question, answer } = tool;

async function streamed(input) {
  const tools = [{ type: 'function', name, description, parameters, strict: false }];
  const stream = client.responses.stream({ model: 'demo', temperature: 0, input, tools });
  const response = await stream.finalResponse();
  const { input_tokens, output_tokens, total_tokens, input_tokens_details: details } = response.usage;
  assert.ok(output_tokens > 0);
  assert.equal(input_tokens + output_tokens, total_tokens);
  assert.ok(details.cached_tokens >= 0 && details.cached_tokens < input_tokens);
  assert.equal(response.status, 'completed');
  return response;
}

const asking = { role: 'user', content: question };
const first = await streamed([asking]);
const [call] = first.output;
assert.equal(first.output.length, 1);
assert.equal(call.type, 'function_call');
assert.equal(call.name, name);
const output = carryOut(JSON.parse(call.arguments));

const result = { type: 'function_call_output', call_id: call.call_id, output };
const last = await streamed([asking, ...first.output, result]);
assert.equal(last.output_text, answer);
assert.ok(last.usage.input_tokens_details.cached_tokens > 0);

checkCalls(1);
