/** What a hostile server, box or model can try. No server is needed: each test is one. */
import assert from 'node:assert/strict';
import { getEventListeners } from 'node:events';
import { mkdtemp, readdir, rm, writeFile } from 'node:fs/promises';
import { createServer, type RequestListener } from 'node:http';
import type { AddressInfo, ListenOptions } from 'node:net';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { test, type TestContext } from 'node:test';
import { CellResult, HutchError, InvalidRequest, LimitReached, Sandbox, ServerUnavailable, Workspace } from 'hutch';
import { download, unixFetch, upload } from 'hutch/node';
import { until } from './setup.js';

const INFO = '{"id": "s", "status": "running"}';

/** The targets of all requests, and a box at a server that answers like this. */
async function boxAt(t: TestContext, answer: RequestListener): Promise<{ box: Sandbox; asked: string[]; url: string }> {
  const asked: string[] = [];
  const url = await serve(t, (request, response) => {
    asked.push(`${request.method} ${request.url} ${request.headers.authorization}`);
    if (request.url === '/v1/sessions/s') response.end(INFO);
    else answer(request, response);
  });
  const box = await Sandbox.connect('s', { url, apiKey: 'k' });
  asked.length = 0;
  return { box, asked, url };
}

async function serve(t: TestContext, answer: RequestListener, at: ListenOptions = { port: 0, host: '127.0.0.1' }): Promise<string> {
  const server = createServer(answer);
  await new Promise<void>((resolve) => server.listen(at, resolve));
  t.after(() => {
    server.closeAllConnections();
    server.close();
  });
  return `http://127.0.0.1:${(server.address() as AddressInfo).port}`;
}

async function folderOf(t: TestContext): Promise<string> {
  const folder = await mkdtemp(join(tmpdir(), 'hutch-sdk-'));
  t.after(() => rm(folder, { recursive: true }));
  return folder;
}

/** A box whose guest answers as it likes. */
function liar(answers: (operation: string, path: string) => unknown): Promise<Sandbox> {
  const fake: typeof fetch = async (input) => {
    const { pathname, searchParams } = new URL(String(input));
    if (pathname.endsWith('/s')) return new Response(INFO);
    const answer = answers(pathname.slice(pathname.lastIndexOf('/') + 1), searchParams.get('path') ?? '');
    return new Response(typeof answer === 'string' ? answer : JSON.stringify(answer));
  };
  return Sandbox.connect('s', { url: 'http://localhost', apiKey: 'k', fetch: fake });
}

test('a redirect is not followed, of the server or of a box', async (t) => {
  const { box, asked, url } = await boxAt(t, (request, response) => {
    const ofBox = request.url!.includes('/ports/');
    if (ofBox) response.setHeader('Content-Security-Policy', 'sandbox');
    response.writeHead(307, { Location: '/v1/keys' }).end();
  });
  const response = await box.fetch(80, '/x', { method: 'POST', body: '{}', redirect: 'follow' });
  assert.deepEqual([response.status, response.headers.get('Location')], [307, '/v1/keys']);
  await assert.rejects(box.stats(), (error) => error instanceof ServerUnavailable && /redirect/.test(error.message));
  await assert.rejects(Sandbox.list({ url, apiKey: 'k' }), ServerUnavailable);
  assert.ok(!asked.some((line) => line.includes('/v1/keys')), asked.join('\n'));
});

test('no name and no path leads to another part of the API', async (t) => {
  const { box, asked, url } = await boxAt(t, (_, response) => response.end('{}'));
  for (const path of ['/../../../../../keys', '..\\..\\..\\..\\keys', '/%2e%2e/%2E./x']) {
    await assert.rejects(box.fetch(80, path), InvalidRequest);
  }
  await assert.rejects(Sandbox.connect('..', { url, apiKey: 'k' }), InvalidRequest);
  await assert.rejects(new Workspace('..', { url, apiKey: 'k' }).remove(), InvalidRequest);
  await assert.rejects(box.removeCodeContext('.'), InvalidRequest);
  assert.deepEqual(asked, []);
  await box.fetch(80, '//host/a/../b?c=..');
  assert.deepEqual(asked, ['GET /v1/sessions/s/ports/80/http//host/b?c=.. Bearer k']);
});

test('a box cannot forge an error of the server', async (t) => {
  const { box } = await boxAt(t, (_, response) => {
    response.writeHead(410, { 'Content-Security-Policy': 'sandbox' }).end('{"code": "session_expired", "message": "gone"}');
  });
  assert.equal((await box.fetch(80)).status, 410);
});

test('an answer that is not one of Hutch, or has no end, is the fault of the server', async (t) => {
  const endless = Buffer.alloc(1024 * 1024, 'x');
  const { box } = await boxAt(t, (request, response) => {
    if (request.url!.endsWith('/stats')) {
      const more = (): void => void response.write(endless, more);
      more();
    } else if (request.url!.endsWith('/run')) {
      response.end('event: done\ndata: {"results": 7}\n\n');
    } else {
      response.end('{"data": "no base64!", "start": 0}');
    }
  });
  await assert.rejects(box.stats(), /more than 67108864 bytes/);
  await assert.rejects(box.runCode('1'), /not one of Hutch/);
  await assert.rejects(box.readOutput('x'), /not one of Hutch/);
  const picture = new CellResult({ png: 'no base64!', extra: {} } as unknown as CellResult);
  assert.throws(() => picture.bytesOf('png'), InvalidRequest);
});

test('a name of a tool that no header can have is no such tool, and a reason to abort is kept', async (t) => {
  const { box, asked } = await boxAt(t, () => {}); // it never answers
  await assert.rejects(box.tools.call('ba\nsh', {}), InvalidRequest);
  await assert.rejects(box.tools.call('bäsh', {}), InvalidRequest);
  assert.deepEqual(asked, []);
  await assert.rejects(box.tools.call('bash', {}, { signal: AbortSignal.timeout(50) }), { name: 'TimeoutError' });
  const controller = new AbortController();
  const waiting = box.fetch(80, '/', { signal: controller.signal });
  controller.abort(new Error('mine'));
  await assert.rejects(waiting, /mine/);
});

test('what the data itself throws is thrown, over TCP and over a socket', async (t) => {
  const answer: RequestListener = (request, response) => {
    request.on('error', () => {}).resume().on('end', () => response.end('{"value": 1}'));
  };
  const { box } = await boxAt(t, answer);
  const socket = join(await folderOf(t), 's');
  await serve(t, (request, response) => {
    if (request.url === '/v1/sessions/s') response.end(INFO);
    else if (request.method === 'DELETE') response.socket!.end('HTTP/1.1 999 Odd\r\nContent-Length: 0\r\n\r\n');
    else answer(request, response);
  }, { path: socket });
  const local = await Sandbox.connect('s', { url: 'http://localhost', fetch: unixFetch(socket) });
  for (const { files } of [box, local]) {
    const broken = async function* () {
      yield Uint8Array.of(1);
      throw Object.assign(new Error('mine'), { code: 'ENOENT' });
    };
    await assert.rejects(files.write('x', broken()), /^Error: mine$/);
    await assert.rejects(files.write('x', ['text'] as unknown as Uint8Array[]), InvalidRequest);
    const stream = new ReadableStream<Uint8Array>({ pull: (controller) => controller.error(new Error('mine')) });
    await assert.rejects(files.write('x', stream), /^Error: mine$/);
  }
  await assert.rejects(local.commands.run('x', { background: true, timeout: NaN }), InvalidRequest);
  await assert.rejects(local.files.remove('x'), ServerUnavailable); // and the process lives on
});

test('a folder that a box made up is not followed out of it, nor without end', async (t) => {
  const folder = await folderOf(t);
  const dir = (path: string) => ({ path, kind: 'dir', mode: 0o755, size: 0 });
  for (const path of ['/etc/passwd', '/top/..', '/top/', '/top/a/b', '/top/a\0b', '/topmost']) {
    const box = await liar((operation) => (operation === 'stat' ? dir('/top') : [{ ...dir(path), kind: 'file' }]));
    await assert.rejects(download(box.files, '/top', folder), InvalidRequest, path);
  }
  const deep = await liar((operation, path) => (operation === 'stat' ? dir('/top') : [dir(`${path}/d`)]));
  await assert.rejects(download(deep.files, '/top', folder), LimitReached);
  await rm(join(folder, 'd'), { recursive: true });
  // As long as a name can be, and twice at once.
  const name = '名'.repeat(85);
  const box = await liar((operation, path) => (operation === 'stat' ? { ...dir(path), kind: 'file' } : 'content'));
  const target = join(folder, name);
  assert.deepEqual(await Promise.all([download(box.files, '/f', target), download(box.files, '/f', target)]), [1, 1]);
  assert.deepEqual(await readdir(folder), [name]);
});

test('a stream that is never read, or has ended, leaves no listener at the signal', async () => {
  const box = await liar(() => 'event: done\ndata: {"exit_code": 0}\n\n');
  const { signal } = new AbortController();
  box.shell.stream('true', { signal });
  assert.equal(getEventListeners(signal, 'abort').length, 0);
  assert.equal((await box.shell.run('true', { signal })).exitCode, 0);
  await box.files.read('x', 'text', { signal });
  assert.equal(getEventListeners(signal, 'abort').length, 0);
});

test('the source of an upload that fails is closed', async (t) => {
  const { box } = await boxAt(t, (_, response) => {
    response.writeHead(409).end('{"code": "conflict", "message": "no"}');
  });
  let closed = false;
  const endless = async function* () {
    try {
      for (;;) yield new Uint8Array(65536);
    } finally {
      closed = true;
    }
  };
  await assert.rejects(box.files.write('x', endless()), HutchError);
  await until(() => closed);
});

test('a file is closed when its upload fails', async (t) => {
  const folder = await folderOf(t);
  await writeFile(join(folder, 'a'), 'x');
  const open = async () => (await readdir('/proc/self/fd')).length;
  const box = await liar(() => ({}));
  await upload(box.files, folder, 'x');
  const gone = await Sandbox.connect('s', {
    url: 'http://localhost',
    fetch: async (input) => {
      if (String(input).endsWith('/s')) return new Response(INFO);
      throw Object.assign(new TypeError('fetch failed'), { cause: { code: 'ECONNREFUSED' } });
    },
  });
  const before = await open();
  for (let i = 0; i < 20; i++) await assert.rejects(upload(gone.files, join(folder, 'a'), 'x'), ServerUnavailable);
  assert.ok((await open()) < before + 10);
});
