// A session with Claude Code, driven as Anthropic's Agent SDK drives it: over its stdin and stdout, and with an MCP
// server inside this process, whose tools have their bare names. Prints the answer.

import assert from 'node:assert/strict';
import { spawn } from 'node:child_process';
import { createInterface } from 'node:readline';
import { checkCalls, mcpAnswer, tool } from './village.mjs';

const server = { type: 'sdk', name: 'village' };
const claude = spawn(
  new URL('node_modules/.bin/claude', import.meta.url).pathname,
  [
    ...['--print', '--input-format', 'stream-json', '--output-format', 'stream-json', '--verbose'],
    // without a message about the machine and the date, which would be longer than the demo model can read
    ...['--bare', '--model', 'demo', '--system-prompt', 'Use the tools where they help.', '--tools', ''],
    ...['--strict-mcp-config', '--mcp-config', JSON.stringify({ mcpServers: { village: server } })],
    ...['--allowedTools', `mcp__village__${tool.name}`],
  ],
  { stdio: ['pipe', 'pipe', 'inherit'], env: { ...process.env, CLAUDE_AGENT_SDK_MCP_NO_PREFIX: '1' } },
);
const send = (message) => claude.stdin.write(`${JSON.stringify(message)}\n`);

send({
  type: 'control_request',
  request_id: 'start',
  request: { subtype: 'initialize', sdkMcpServers: ['village'] },
});
send({ type: 'user', parent_tool_use_id: null, message: { role: 'user', content: tool.question } });

let answer;
for await (const line of createInterface({ input: claude.stdout })) {
  const message = JSON.parse(line);
  if (message.type === 'control_request' && message.request.subtype === 'mcp_message') {
    const response = { mcp_response: mcpAnswer(message.request.message) ?? {} };
    send({ type: 'control_response', response: { subtype: 'success', request_id: message.request_id, response } });
  }
  if (message.type === 'result') {
    answer = message.result;
    claude.stdin.end();
  }
}
assert.equal(answer, tool.answer);
checkCalls(1);
