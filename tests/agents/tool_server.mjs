// An MCP server on stdio with the tool. What it is called with becomes lines of the file LOG.
//
//     node tool_server.mjs LOG

import { writeFileSync } from 'node:fs';
import { createInterface } from 'node:readline';
import { asked, mcpAnswer } from './village.mjs';

const [log] = process.argv.slice(2);

for await (const line of createInterface({ input: process.stdin })) {
  const answer = mcpAnswer(JSON.parse(line));
  writeFileSync(log, asked.map((given) => `${JSON.stringify(given)}\n`).join(''));
  if (answer) process.stdout.write(`${JSON.stringify(answer)}\n`);
}
