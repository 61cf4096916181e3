/** `attach`: over WebSockets, and over HTTP where there are none. */
import assert from 'node:assert/strict';
import { createServer } from 'node:http';
import type { AddressInfo } from 'node:net';
import { after, before, test } from 'node:test';
import {
  BoxLost, Conflict, Sandbox, ServerUnavailable, type Attachment, type Handle, type ServerOptions,
} from 'hutch';
import { control, Proxy, until, url } from './setup.js';

const apiKey = process.env.HUTCH_API_KEY!;
const MiB = 1024 * 1024;
let opened = 0;

/** The runtime's own, which counts. */
class Counted extends WebSocket {
  constructor(address: string | URL, protocols?: string | string[]) {
    super(address, protocols);
    opened += 1;
  }
}
globalThis.WebSocket = Counted;
const ways: Record<string, (to: string) => ServerOptions> = {
  'over a WebSocket': (to) => ({ url: to, apiKey }),
  'over HTTP': (to) => ({ url: to, apiKey, fetch: (input, init) => fetch(input, init) }),
};

let sandbox: Sandbox;
before(async () => {
  sandbox = await Sandbox.create();
});
after(() => sandbox.close());

async function text(attachment: Attachment, wanted = ''): Promise<string> {
  const decoder = new TextDecoder();
  let seen = '';
  while (!wanted || !seen.includes(wanted)) {
    const { done, value } = await attachment.next();
    if (done) break;
    seen += decoder.decode(value, { stream: true });
  }
  return seen;
}

/** The same program, over a connection of another kind. */
async function other(way: ServerOptions, handle: Handle): Promise<Handle> {
  return (await Sandbox.connect(sandbox.id, way)).commands.connect(handle.id);
}

for (const [name, wayTo] of Object.entries(ways)) {
  const isSocket = name.includes('WebSocket');

  test(`a terminal is read, typed into, and left alone, ${name}`, async () => {
    const box = await Sandbox.connect(sandbox.id, wayTo(url));
    opened = 0;
    const terminal = await box.pty.open(['sh'], { columns: 100, rows: 30 });
    {
      await using attachment = await terminal.attach();
      await attachment.write('stty size\n');
      assert.match(await text(attachment, '30 100'), /30 100/);
      await terminal.resize(70, 20);
      await attachment.write('stty size\n');
      await text(attachment, '20 70');
    }
    const again = await terminal.attach({ offset: 0 });
    assert.match(await text(again, '20 70'), /30 100/);
    await again.write('exit 7\n');
    await text(again);
    assert.equal(again.exitCode, 7);
    assert.equal(again.offset, (await terminal.logs()).total);
    await again.write('for nobody'); // as everywhere, input for a program that has ended is dropped
    assert.equal(opened, isSocket ? 2 : 0);
  });

  test(`a lost connection goes on at the same byte, ${name}`, async () => {
    await using proxy = new Proxy();
    const cat = await sandbox.commands.run(['cat'], { background: true });
    const handle = await other(wayTo(await proxy.listen()), cat);
    const seen: string[] = [];
    await using attachment = await handle.attach({
      onLost: () => seen.push('lost'),
      onReconnect: () => seen.push('reconnected'),
    });
    let all = '';
    for (const word of ['one\n', 'two\n', 'three\n']) {
      await attachment.write(word);
      all += await text(attachment, word);
      proxy.cut();
      const lost = (seen.length + 2) / 2;
      await until(() => seen.length === 2 * lost);
    }
    await attachment.write('four\n');
    all += await text(attachment, 'four\n');
    assert.equal(all, 'one\ntwo\nthree\nfour\n');
    assert.deepEqual(seen.slice(0, 2), ['lost', 'reconnected']);
    await cat.kill();
  });

  test(`a program waits for its reader, and no byte is lost, ${name}`, async () => {
    const total = 64 * MiB;
    const write = `
import os
input()
for i in range(1024):
    os.write(1, bytes([i % 256]) * 65536)
    open("/tmp/written", "w").write(str(i + 1))`;
    const program = await sandbox.commands.run(['python3', '-c', write], { background: true });
    await using attachment = await (await other(wayTo(url), program)).attach();
    const written = async () => Number(await sandbox.files.read('/tmp/written').catch(() => 0));
    await attachment.write('\n');
    await attachment.next();
    let last = -1;
    await until(async () => {
      const was = last;
      last = await written();
      await new Promise((resolve) => setTimeout(resolve, 500));
      return was === last && last > 0;
    });
    assert.ok(last < 512, `${last} of 1024 were written without a reader`);
    const start = attachment.offset;
    let size = start;
    for await (const piece of attachment) {
      assert.equal(piece[0], Math.floor(size / 65536) % 256);
      size += piece.length;
    }
    assert.equal(size, total);
    assert.equal(attachment.exitCode, 0);
    await sandbox.files.remove('/tmp/written');
  });

  test(`input goes in while output comes out, however much, ${name}`, async () => {
    const cat = await sandbox.commands.run(['cat'], { background: true });
    await using attachment = await (await other(wayTo(url), cat)).attach();
    const given = new Uint8Array(8 * MiB).map((_, index) => (index * 7) % 251);
    const wrote = attachment.write(given);
    let size = 0;
    for await (const piece of attachment) {
      for (const byte of piece) assert.ok(byte === given[size++]);
      if (size === given.length) break;
    }
    await wrote;
    await cat.kill();
  });

  test(`what cannot be done is told, ${name}`, async () => {
    const cat = await sandbox.commands.run('read x; sleep 7201', { background: true });
    const handle = await other(wayTo(url), cat);
    const attachment = await handle.attach();
    await handle.closeStdin();
    await assert.rejects(attachment.write('late'), Conflict);
    const controller = new AbortController();
    const aborted = await handle.attach({ signal: controller.signal });
    const reading = aborted.next();
    controller.abort(new Error('mine'));
    await assert.rejects(reading, /mine/);
    await assert.rejects(aborted.write('x'), /mine/);
    const closed = attachment.next();
    await attachment.close();
    assert.deepEqual(await closed, { done: true, value: undefined });
    assert.equal((await sandbox.commands.list()).find(({ id }) => id === cat.id)!.exitCode, null);
    await cat.kill();
    const box = await Sandbox.create(wayTo(url));
    const sleep = await box.commands.run('sleep 7202', { background: true });
    const last = await sleep.attach();
    const ended = assert.rejects(last.next(), BoxLost);
    await box.close();
    await ended;
    await assert.rejects(sleep.attach(), BoxLost);
  });

  test(`a server that is killed while it is read goes on with the next, ${name}`, async () => {
    const program = await sandbox.commands.run(
      'seq 1 300000; read x; echo end', { background: true },
    );
    const lost: string[] = [];
    const attachment = await (await other(wayTo(url), program)).attach({ patience: 60, onLost: () => lost.push('lost') });
    let seen = await text(attachment, '\n1000\n');
    await control('crash');
    const more = text(attachment, '\n300000\n').then((rest) => (seen += rest));
    await until(() => lost.length);
    await control('start');
    await more;
    await attachment.write('\n');
    seen += await text(attachment);
    const expected = Array.from({ length: 300_000 }, (_, index) => `${index + 1}\n`).join('');
    assert.equal(seen, `${expected}end\n`);
  });

  test(`a server that stays away is told in the end, ${name}`, async () => {
    await using proxy = new Proxy();
    const way = wayTo(await proxy.listen());
    const sleep = await sandbox.commands.run('sleep 7203', { background: true });
    const attachment = await (await other(way, sleep)).attach({ patience: 1 });
    const reading = assert.rejects(attachment.next(), ServerUnavailable);
    await proxy.stop();
    const waiting = assert.rejects(attachment.write('x'), ServerUnavailable);
    await reading;
    await waiting;
    await sleep.kill();
  });
}

test('behind something that lets no WebSocket through, HTTP is used', async () => {
  let refused = 0;
  const gate = createServer(async (request, response) => {
    const chunks: Buffer[] = [];
    for await (const chunk of request) chunks.push(chunk);
    const { host: _, connection: __, ...headers } = request.headers;
    const init = { method: request.method, headers: headers as Record<string, string>, body: chunks.length ? Buffer.concat(chunks) : undefined };
    const answer = await fetch(url + request.url, init);
    response.writeHead(answer.status, { 'Content-Type': answer.headers.get('Content-Type') ?? 'text/plain' });
    for await (const piece of answer.body ?? []) response.write(piece);
    response.end();
  });
  gate.on('upgrade', (_, socket) => {
    refused += 1;
    socket.end('HTTP/1.1 400 Bad Request\r\nConnection: close\r\n\r\n');
  });
  await new Promise<void>((resolve) => gate.listen(0, '127.0.0.1', resolve));
  try {
    const way = { url: `http://127.0.0.1:${(gate.address() as AddressInfo).port}`, apiKey };
    const cat = await sandbox.commands.run(['cat'], { background: true });
    await using attachment = await (await other(way, cat)).attach();
    await attachment.write('through\n');
    assert.equal(await text(attachment, '\n'), 'through\n');
    assert.equal(refused, 2);
    await cat.kill();
  } finally {
    gate.closeAllConnections();
    gate.close();
  }
});
