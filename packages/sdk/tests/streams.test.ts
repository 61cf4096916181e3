import assert from 'node:assert/strict';
import { test } from 'node:test';
import { BoxLost, Chunk, Result, Sandbox, ServerUnavailable } from 'hutch';
import { control, Proxy, until, url } from './setup.js';

const apiKey = process.env.HUTCH_API_KEY!;

/** Whether a command of the box has this argument. */
async function runs(sandbox: Sandbox, argument: string): Promise<boolean> {
  const look = `for p in /proc/[0-9]*; do tr "\\0" " " <$p/cmdline; echo; done 2>/dev/null`;
  const { stdout } = await sandbox.commands.run(['sh', '-c', look]);
  return stdout.split('\n').some((line) => line.startsWith(`sleep ${argument}`));
}

test('aborting the signal stops the command in the box', async () => {
  await using sandbox = await Sandbox.create();
  for (const [argument, start] of [
    ['7001', (signal: AbortSignal) => sandbox.shell.run('sleep 7001', { signal })],
    ['7002', (signal: AbortSignal) => sandbox.commands.run(['sleep', '7002'], { signal })],
    ['7003', (signal: AbortSignal) => sandbox.runCode('import subprocess; subprocess.run(["sleep", "7003"])', { signal })],
  ] as const) {
    const controller = new AbortController();
    const running = start(controller.signal);
    await until(() => runs(sandbox, argument));
    controller.abort();
    await assert.rejects(running, { name: 'AbortError' });
    await until(async () => !(await runs(sandbox, argument)));
  }
  await assert.rejects(sandbox.shell.run('echo', { signal: AbortSignal.abort(new Error('mine')) }), /mine/);
  assert.equal((await sandbox.shell.run('echo alive')).stdout, 'alive\n');
});

test('leaving the loop stops the command, and closing ends a wait', async () => {
  await using sandbox = await Sandbox.create();
  for await (const item of sandbox.shell.stream('echo begun; sleep 7004')) {
    assert.ok(item instanceof Chunk);
    break;
  }
  await until(async () => !(await runs(sandbox, '7004')));
  const stream = sandbox.shell.stream('echo begun; sleep 7005');
  await stream.next();
  const waiting = stream.next();
  await stream.close();
  assert.deepEqual(await waiting, { done: true, value: undefined });
  await until(async () => !(await runs(sandbox, '7005')));
});

test('a stream that is not read holds the program back, and loses nothing', async () => {
  await using sandbox = await Sandbox.create();
  const total = 64 * 1024 * 1024;
  const write = `
import os
for i in range(1024):
    os.write(1, bytes(65536))
    open("/tmp/count", "w").write(str(i + 1))`;
  const stream = sandbox.commands.stream(['python3', '-c', write]);
  await stream.next();
  const count = async () => Number(await sandbox.files.read('/tmp/count').catch(() => 0));
  // It stands still once the buffers on the way are full.
  let last = -1;
  await until(async () => {
    const before = last;
    last = await count();
    await new Promise((resolve) => setTimeout(resolve, 500));
    return before === last && last > 0;
  });
  assert.ok(last < 512, `${last} of 1024 were written without a reader`);
  let size = 0;
  for await (const item of stream) {
    if (item instanceof Result) assert.equal(item.totalBytes, total);
    else size += item.data.length;
  }
  assert.equal(await count(), 1024);
  assert.ok(size > total - 1024 * 1024 && size <= total); // the first chunk was read before
});

test('a box is opened once, however often the answer is lost', async () => {
  await using proxy = new Proxy();
  const way = { url: await proxy.listen(), apiKey };
  await Sandbox.list(way);
  proxy.dropAnswers = 2;
  await using sandbox = await Sandbox.create({ ...way, labels: { once: 'yes' } });
  assert.equal(proxy.dropAnswers, 0);
  assert.deepEqual((await Sandbox.list({ label: 'once' })).map(({ id }) => id), [sandbox.id]);
});

test('a command whose connection drops is not sent twice', async () => {
  await using proxy = new Proxy();
  await using sandbox = await Sandbox.create({ url: await proxy.listen(), apiKey });
  const running = sandbox.shell.run('echo once >> /tmp/ran; sleep 7006');
  const lost = assert.rejects(running, (error) => error instanceof ServerUnavailable && /the server stops a command/.test(error.message));
  const direct = await Sandbox.connect(sandbox.id);
  await until(() => runs(direct, '7006'));
  proxy.cut();
  await lost;
  await until(async () => !(await runs(direct, '7006')));
  assert.equal(await sandbox.files.read('/tmp/ran'), 'once\n');
});

test('a file that breaks off is an error, not a short file', async () => {
  await using proxy = new Proxy();
  await using sandbox = await Sandbox.create({ url: await proxy.listen(), apiKey });
  await sandbox.shell.run('head -c 50000000 /dev/zero > /tmp/big');
  const stream = await sandbox.files.read('/tmp/big', 'stream');
  await stream.next();
  proxy.cut();
  await assert.rejects(async () => {
    for await (const _ of stream);
  }, ServerUnavailable);
});

test('a server that listens again is found again, whatever was asked', async () => {
  await using proxy = new Proxy();
  let failures = 0;
  const counting: typeof fetch = (input, init) =>
    fetch(input, init).catch((error) => {
      failures += 1;
      throw error;
    });
  await using sandbox = await Sandbox.create({ url: await proxy.listen(), apiKey, fetch: counting });
  await proxy.stop();
  const running = sandbox.shell.run('echo once >> ran; cat ran'); // nothing was sent: it may be tried again
  await until(() => failures > 1);
  await proxy.listen();
  assert.equal((await running).stdout, 'once\n');
});

test('a server that is killed leaves boxes and background programs to the next', async () => {
  const sandbox = await Sandbox.create();
  await sandbox.shell.run('export KEPT=yes');
  const program = await sandbox.commands.run('sleep 7007; echo ended', { background: true });
  const lost = assert.rejects(sandbox.shell.run('sleep 7008'), ServerUnavailable);
  await until(() => runs(sandbox, '7008'));
  await control('crash');
  await lost;
  await control('start');
  assert.equal((await sandbox.refresh()).status, 'running');
  assert.equal((await sandbox.shell.run('echo $KEPT')).stdout, 'yes\n');
  await program.kill();
  assert.equal((await program.wait()).exitCode, 137);
  await sandbox.close();
  await assert.rejects(sandbox.shell.run('true'), BoxLost);
});

test('a server that is not there is told, and whom to ask', async () => {
  const proxy = new Proxy();
  const nowhere = await proxy.listen();
  await proxy.stop();
  await assert.rejects(Sandbox.list({ url: nowhere }), /Does `hutch serve` run there/);
  await assert.rejects(Sandbox.list({ url, fetch: async () => new Response('<html>', { status: 502 }) }), ServerUnavailable);
  await assert.rejects(Sandbox.list({ url, fetch: async () => new Response('<html>') }), ServerUnavailable);
});
