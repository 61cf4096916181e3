// What the TypeScript SDK 1.x sees of a server: over HTTP with a url, else over stdio with a command.
import { Client } from '@modelcontextprotocol/sdk/client/index.js';
import { StdioClientTransport } from '@modelcontextprotocol/sdk/client/stdio.js';
import { StreamableHTTPClientTransport } from '@modelcontextprotocol/sdk/client/streamableHttp.js';
import { check } from './check.js';

const [first, ...rest] = process.argv.slice(2);
const transport = first.startsWith('http')
  ? new StreamableHTTPClientTransport(new URL(first))
  : new StdioClientTransport({ command: first, args: rest });
const client = new Client({ name: 'tests', version: '1' });
await client.connect(transport);
await check({
  client,
  call: (params, options) => client.callTool(params, undefined, options),
});
if (first.startsWith('http')) await transport.terminateSession();
await client.close();
