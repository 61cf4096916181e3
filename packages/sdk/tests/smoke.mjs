// What must hold in every runtime: run by Node, Deno and Bun.
import { createServer } from 'node:net';
import { Chunk, Sandbox, ServerUnavailable } from '../dist/index.js';

const check = (isSo, what) => {
  if (!isSo) throw new Error(what);
};
const sandbox = await Sandbox.create();
try {
  check((await sandbox.shell.run('echo $((6 * 7))')).stdout === '42\n', 'shell');
  check((await sandbox.runCode('6 * 7')).text === '42', 'code');
  await sandbox.files.write('big', (async function* () {
    for (let i = 0; i < 20; i++) yield new Uint8Array(65536).fill(i);
  })());
  let size = 0;
  for await (const piece of await sandbox.files.read('big', 'stream')) size += piece.length;
  check(size === 20 * 65536, `streams: ${size}`);
  for await (const item of sandbox.shell.stream('echo begun; sleep 1000')) {
    check(item instanceof Chunk, 'chunk');
    break;
  }
  const controller = new AbortController();
  const running = sandbox.shell.run('touch on; sleep 1000', { signal: controller.signal });
  while (!(await sandbox.files.exists('on'))) await new Promise((go) => setTimeout(go, 20));
  controller.abort();
  check((await running.catch((error) => error.name)) === 'AbortError', 'abort');
  // One command at a time: this one gets its turn once the others are gone.
  check((await sandbox.shell.run('echo free')).stdout === 'free\n', 'stopped');
  check((await sandbox.tools.call('bash', { command: 'echo tool' })).text === 'tool\n', 'tools');
  const terminal = await sandbox.pty.open(['sh']);
  const attachment = await terminal.attach();
  await attachment.write('stty size; exit 3\n');
  let screen = '';
  for await (const data of attachment) screen += new TextDecoder().decode(data);
  check(screen.includes('24 80') && attachment.exitCode === 3, `terminal: ${screen}`);
  const port = await new Promise((resolve) => {
    const server = createServer().listen(0, '127.0.0.1', () => {
      const { port } = server.address();
      server.close(() => resolve(port));
    });
  });
  const unreachable = await Sandbox.list({ url: `http://127.0.0.1:${port}` }).catch((error) => error);
  check(unreachable instanceof ServerUnavailable && /hutch serve/.test(unreachable.message), String(unreachable));
} finally {
  await sandbox.close();
}
console.log('works');
