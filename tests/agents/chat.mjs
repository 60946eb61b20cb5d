// A session with npm's `openai` on /v1/chat/completions: by hand with streams, then with the SDK's tool runner.

import assert from 'node:assert/strict';
import OpenAI from 'openai';
import { carryOut, checkCalls, options, tool, url } from './village.mjs';

const client = new OpenAI({ baseURL: `${url}/v1`, ...options });
const { name, description, parameters, question, answer } = tool;
const fields = { model: 'demo', temperature: 0, stream_options: { include_usage: true } };

function checkUsage({ prompt_tokens, completion_tokens, total_tokens, prompt_tokens_details: details }) {
  assert.ok(completion_tokens > 0);
  assert.equal(prompt_tokens + completion_tokens, total_tokens);
  assert.ok(details.cached_tokens >= 0 && details.cached_tokens < prompt_tokens);
}

async function streamed(messages) {
  const tools = [{ type: 'function', function: { name, description, parameters } }];
  const { choices, usage } = await client.chat.completions.stream({ ...fields, messages, tools }).finalChatCompletion();
  checkUsage(usage);
  return { choice: choices[0], usage };
}

const messages = [{ role: 'user', content: question }];
const first = await streamed(messages);
assert.equal(first.choice.finish_reason, 'tool_calls');
assert.equal(first.choice.message.content, null);
const [call] = first.choice.message.tool_calls;
assert.equal(call.function.name, name);
const content = carryOut(JSON.parse(call.function.arguments));

const last = await streamed([...messages, first.choice.message, { role: 'tool', tool_call_id: call.id, content }]);
assert.equal(last.choice.finish_reason, 'stop');
assert.equal(last.choice.message.content, answer);
assert.ok(last.usage.prompt_tokens_details.cached_tokens > 0);

const runnable = { name, description, parameters, parse: JSON.parse, function: carryOut };
const runner = client.chat.completions.runTools({
  ...fields,
  stream: true,
  messages,
  tools: [{ type: 'function', function: runnable }],
});
assert.equal(await runner.finalContent(), answer);
const total = await runner.totalUsage();
assert.equal(total.prompt_tokens + total.completion_tokens, total.total_tokens);

checkCalls(2);
