// The same for the TypeScript client 2.x.
import { Client, StreamableHTTPClientTransport } from '@modelcontextprotocol/client';
import { StdioClientTransport } from '@modelcontextprotocol/client/stdio';
import { check } from './check.js';

const [first, ...rest] = process.argv.slice(2);
const transport = first.startsWith('http')
  ? new StreamableHTTPClientTransport(new URL(first))
  : new StdioClientTransport({ command: first, args: rest });
const client = new Client({ name: 'tests', version: '1' });
await client.connect(transport);
await check({ client, call: (params, options) => client.callTool(params, options) });
await client.close();
