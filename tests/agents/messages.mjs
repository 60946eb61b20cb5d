// A session with npm's `@anthropic-ai/sdk` on /v1/messages: by hand with streams, then with the SDK's tool runner.

import assert from 'node:assert/strict';
import Anthropic from '@anthropic-ai/sdk';
import { betaTool } from '@anthropic-ai/sdk/helpers/beta/json-schema';
import { carryOut, checkCalls, options, tool, url } from './village.mjs';

const client = new Anthropic({ baseURL: url, ...options });
const { name, description, parameters: input_schema, question, answer } = tool;
const fields = { model: 'demo', max_tokens: 200, temperature: 0 };
const tools = [{ name, description, input_schema }];

async function checkUsage(usage, messages) {
  const counted = await client.messages.countTokens({ model: 'demo', messages, tools });
  const { input_tokens, cache_creation_input_tokens, cache_read_input_tokens } = usage;
  assert.equal(input_tokens + cache_creation_input_tokens + cache_read_input_tokens, counted.input_tokens);
  assert.ok(usage.output_tokens > 0);
}

async function streamed(messages) {
  const message = await client.messages.stream({ ...fields, messages, tools }).finalMessage();
  await checkUsage(message.usage, messages);
  return message;
}

const messages = [{ role: 'user', content: question }];
const first = await streamed(messages);
assert.equal(first.stop_reason, 'tool_use');
assert.deepEqual(first.content.map((block) => block.type), ['tool_use']);
const [call] = first.content;
assert.equal(call.name, name);
const content = carryOut(call.input);

const result = { type: 'tool_result', tool_use_id: call.id, content };
messages.push({ role: 'assistant', content: first.content }, { role: 'user', content: [result] });
const last = await streamed(messages);
assert.equal(last.stop_reason, 'end_turn');
assert.deepEqual(last.content.map((block) => block.text), [answer]);
assert.ok(last.usage.cache_read_input_tokens > 0);

const runnable = betaTool({ name, description, inputSchema: input_schema, run: carryOut });
const runner = client.beta.messages.toolRunner({ ...fields, messages: [messages[0]], tools: [runnable], stream: true });
const final = await runner.runUntilDone();
assert.equal(final.content.at(-1).text, answer);
await checkUsage(final.usage, messages);

checkCalls(2);
