// A request of the playground as a command for a shell. Pure functions.
//
// What must always hold: the key is never in the command, only the name of a variable; no text of the request can end a quote.

const LONGEST_ARGUMENT = 100_000; // Linux takes 128 KiB; a character may be 3 bytes
const END = "QUIPU_REQUEST";

/** Return text as one word of a POSIX shell. */
export const quoted = (text) => `'${text.replaceAll("'", `'\\''`)}'`;

/** Return the command that sends `body` to `url`, which may not be anybody's to see: only `hasKey` is known of a key. */
export function asCurl(url, body, hasKey) {
  const json = JSON.stringify(body);
  const isLong = 3 * json.length > LONGEST_ARGUMENT;
  const lines = [`curl -N ${quoted(url)}`, `  -H ${quoted("Content-Type: application/json")}`];
  if (hasKey) lines.push('  -H "Authorization: Bearer $QUIPU_API_KEY"');
  // JSON has no line breaks of its own, so no line of it is the end of the here-document
  lines.push(isLong ? `  --data-binary @- <<'${END}'\n${json}\n${END}` : `  --data-raw ${quoted(json)}`);
  return lines.join(" \\\n");
}
