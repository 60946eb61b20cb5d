// A session with npm's `@anthropic-ai/sdk` on /v1/messages: by hand with streams, then with the SDK's tool runner.

import assert from 'node:assert/strict';
import Anthropic from '@anthropic-ai/sdk';
import { betaTool } from '@anthropic-ai/sdk/helpers/beta/json-schema';
import * as weather from './weather.mjs';

const client = new Anthropic({ baseURL: weather.url, ...weather.options });
const { name, description, parameters: input_schema } = weather;
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

const messages = [{ role: 'user', content: weather.QUESTION }];
const first = await streamed(messages);
assert.equal(first.stop_reason, 'tool_use');
assert.deepEqual(first.content.map((block) => block.type), ['tool_use']);
const [call] = first.content;
assert.equal(call.name, name);
const content = weather.getWeather(call.input);

const result = { type: 'tool_result', tool_use_id: call.id, content };
messages.push({ role: 'assistant', content: first.content }, { role: 'user', content: [result] });
const last = await streamed(messages);
assert.equal(last.stop_reason, 'end_turn');
assert.deepEqual(last.content.map((block) => block.text), [weather.ANSWER]);
assert.ok(last.usage.cache_read_input_tokens > 0);

const tool = betaTool({ name, description, inputSchema: input_schema, run: weather.getWeather });
const runner = client.beta.messages.toolRunner({ ...fields, messages: [messages[0]], tools: [tool], stream: true });
const final = await runner.runUntilDone();
assert.equal(final.content.at(-1).text, weather.ANSWER);
await checkUsage(final.usage, messages);

weather.checkCalls(2);
