import assert from 'node:assert/strict';
import { after, before, test } from 'node:test';
import {
  CellResult, Chunk, CommandFailed, Conflict, Execution, InvalidRequest, NoSession, NotFound, NotPermitted,
  Result, Sandbox, Server, SessionEnded, TimedOut, Unauthorized, Workspace,
} from 'hutch';
import { until, url } from './setup.js';

let sandbox: Sandbox;
before(async () => {
  sandbox = await Sandbox.create({ ttl: 600, memory: '512m', labels: { made_by: 'tests' } });
});
after(() => sandbox.close());

test('a sandbox tells what it is, with times as dates and labels as given', async () => {
  assert.equal(sandbox.info.limits.memory, 512 * 1024 ** 2);
  assert.ok(sandbox.info.createdAt instanceof Date);
  assert.deepEqual(sandbox.info.labels, { made_by: 'tests' });
  const listed = await Sandbox.list({ label: 'made_by=tests' });
  assert.deepEqual(listed.map(({ id }) => id), [sandbox.id]);
  const later = await sandbox.extend(1200);
  assert.ok(later.expiresAt! > later.createdAt);
  assert.equal((await sandbox.refresh()).status, 'running');
  assert.equal(typeof (await sandbox.stats()).memory, 'number');
});

test('leaving the block closes a box, but not one that was connected to', async () => {
  let id: string;
  {
    await using own = await Sandbox.create();
    id = own.id;
    {
      await using same = await Sandbox.connect(id);
      assert.equal(same.id, id);
    }
    assert.equal((await own.shell.run('echo still')).stdout, 'still\n');
  }
  await assert.rejects(Sandbox.connect(id), SessionEnded);
  await assert.rejects(Sandbox.connect('00000000-000'), NoSession);
});

test('a shell keeps its state, and its output is heard as it comes', async () => {
  await sandbox.shell.run('cd /tmp && export WORD=kept');
  const heard: string[] = [];
  const result = await sandbox.shell.run('echo $WORD; pwd; echo oops >&2; exit 3', {
    onStdout: (text) => heard.push(text),
    onStderr: (text) => heard.push(`!${text}`),
  });
  assert.equal(result.exitCode, 3);
  assert.equal(result.stdout, 'kept\n/tmp\n');
  assert.equal(result.cwd, '/tmp');
  assert.ok(!result.ok);
  assert.match(heard.join(''), /kept\n\/tmp\n/);
  assert.ok(heard.some((text) => text.startsWith('!oops')));
  await assert.rejects(sandbox.shell.run('false', { check: true }), (error: CommandFailed) => {
    return error instanceof CommandFailed && error.result?.exitCode === 1;
  });
  const other = await sandbox.shell.open('other', { cwd: '/', env: { A: 'b' } });
  assert.equal((await other.run('echo $A$PWD')).stdout, 'b/\n');
  await other.close();
});

test('a timeout is a result, or an error with the result', async () => {
  const result = await sandbox.shell.run('echo begun; sleep 1000', { timeout: 0.5 });
  assert.ok(result.timedOut && result.stdout === 'begun\n');
  await assert.rejects(sandbox.commands.run(['sleep', '1000'], { timeout: 0.1, check: true }), TimedOut);
});

test('a program gets arguments, input and bytes that are no text', async () => {
  const done = await sandbox.commands.run(['cat'], { stdin: Uint8Array.of(0, 255, 10) });
  assert.deepEqual([...done.stdoutBytes], [0, 255, 10]);
  assert.equal((await sandbox.commands.run(['printf', '%s', "a b'c"])).stdout, "a b'c");
  const items = [];
  for await (const item of sandbox.commands.stream(['printf', '\\377'])) items.push(item);
  assert.ok(items[0] instanceof Chunk && items[0].data[0] === 255);
  assert.ok(items.at(-1) instanceof Result);
  await assert.rejects(sandbox.commands.run(['no-such-program']), NotFound);
  await assert.rejects(async () => sandbox.commands.run(''), InvalidRequest);
});

test('what was kept can be read again', async () => {
  const { kept } = await sandbox.shell.run('seq 1000', { keep: true });
  const piece = await sandbox.readOutput(kept!, 2, 4);
  assert.equal(piece.text, '2\n3\n');
  assert.equal(piece.start, 2);
});

test('a program in the background is fed, watched, waited for and killed', async () => {
  const cat = await sandbox.commands.run(['cat'], { background: true });
  // In order, also without waiting for each other.
  await Promise.all(['one ', 'two ', 'three'].map((word) => cat.sendStdin(word)));
  await until(async () => (await cat.stdout()) === 'one two three');
  assert.equal((await cat.logs(4, 3)).text, 'two');
  await cat.closeStdin();
  assert.equal((await cat.wait()).exitCode, 0);
  const sleep = await sandbox.commands.run('sleep 1000', { background: true });
  await assert.rejects(sleep.wait({ timeout: 0.1 }), TimedOut);
  assert.ok((await sandbox.commands.list()).some(({ id, exitCode }) => id === sleep.id && exitCode === null));
  const limited = await sandbox.commands.run('sleep 1000', { background: true, timeout: 0.2 });
  await assert.rejects(limited.wait({ check: true }), TimedOut); // its own timeout, not that of the wait
  const same = await sandbox.commands.connect(sleep.id);
  await same.kill();
  assert.equal((await sleep.wait()).exitCode, 137);
  await assert.rejects(sandbox.commands.connect('no-such'), NotFound);
});

test('a terminal takes what is typed, and has a size', async () => {
  const terminal = await sandbox.pty.open(['sh'], { columns: 100, rows: 30 });
  await terminal.send('stty size\n');
  await until(async () => (await terminal.stdout()).includes('30 100'));
  await terminal.resize(70, 20);
  await terminal.send('stty size; exit 4\n');
  let screen = '';
  for await (const item of terminal.stream()) {
    if (item instanceof Chunk) screen += item.text;
    else assert.equal(item.exitCode, 4);
  }
  assert.match(screen, /20 70/);
});

test('Python keeps its variables, and shows results, errors and charts', async () => {
  const shown: CellResult[] = [];
  const execution = await sandbox.runCode('x = 6\nprint("hi")\nx * 7', {
    onResult: (result) => shown.push(result),
  });
  assert.equal(execution.text, '42');
  assert.equal(execution.logs.stdout, 'hi\n');
  assert.ok(execution.results[0] instanceof CellResult && execution.results[0].isMain);
  assert.deepEqual(shown.map(({ text }) => text), ['42']);
  const failed = await sandbox.runCode('1 / 0');
  assert.equal(failed.error?.name, 'ZeroDivisionError');
  assert.match(failed.error!.traceback, /1 \/ 0/);
  await assert.rejects(sandbox.runCode('1 / 0', { check: true }), CommandFailed);
  const picture = await sandbox.runCode(`
class P:
    def _repr_mimebundle_(self, **_):
        return {"image/png": "aGVsbG8=", "text/plain": "p", "application/json": {"some_key": 1}}
P()`);
  assert.equal(new TextDecoder().decode(picture.results[0]!.bytesOf('png')), 'hello');
  assert.deepEqual(picture.results[0]!.json, { some_key: 1 });
  assert.ok((await sandbox.variables()).some(({ name, preview }) => name === 'x' && preview === '6'));
});

test('contexts are apart, and cells can be interrupted', async () => {
  const context = await sandbox.createCodeContext('other', { cwd: '/tmp' });
  assert.equal((await sandbox.runCode('"x" in dir()', { context })).text, 'False');
  const items = [];
  for await (const item of sandbox.streamCode('print("on", flush=True)\nimport time; time.sleep(1000)', { context })) {
    if (item instanceof Chunk) await sandbox.interrupt(context);
    items.push(item);
  }
  const last = items.at(-1);
  assert.ok(last instanceof Execution && last.interrupted);
  await sandbox.restartCodeContext(context);
  assert.deepEqual((await sandbox.listCodeContexts()).map(({ id }) => id).sort(), ['main', 'other']);
  await sandbox.removeCodeContext(context);
});

test('code in the box calls functions of this process', async () => {
  const functions = {
    add: (a: number, b: number) => a + b,
    greet: async ({ name }: { name: string }) => ({ text_of: `hello ${name}` }),
    fail: () => {
      throw new RangeError('too far');
    },
  };
  const code = `
try: fail()
except ValueError as exc: print(exc)
add(1, 2), greet(name="you")`;
  const done = await sandbox.runCode(code, { functions, check: true });
  assert.equal(done.logs.stdout, 'too far\n');
  assert.equal(done.text, "(3, {'text_of': 'hello you'})");
});

test('files are read and written as text, bytes and streams', async () => {
  const { files } = sandbox;
  assert.equal(await files.write('/tmp/a/b.txt', 'héllo'), 6);
  assert.equal(await files.read('/tmp/a/b.txt'), 'héllo');
  assert.deepEqual([...(await files.read('/tmp/a/b.txt', 'bytes', { offset: 1, length: 2 }))], [195, 169]);
  const pieces = async function* () {
    for (let i = 0; i < 64; i++) yield new Uint8Array(65536).fill(i);
  };
  assert.equal(await files.write('/tmp/big', pieces()), 64 * 65536);
  let size = 0;
  for await (const piece of await files.read('/tmp/big', 'stream')) size += piece.length;
  assert.equal(size, 64 * 65536);
  await assert.rejects(files.read('/tmp/none', 'stream'), NotFound);
  await assert.rejects(files.write('/tmp/a/b.txt', 'x', { expect: '' }), Conflict);
  await files.writeFiles({ '/tmp/w/1': 'one', '/tmp/w/2': new Blob(['two']) });
  assert.deepEqual((await files.list('/tmp/w')).map(({ path }) => path), ['/tmp/w/1', '/tmp/w/2']);
  assert.equal(await files.edit('/tmp/w/1', 'one', 'two'), 1);
  assert.equal(await files.diff('/tmp/w/1', '/tmp/w/2'), '');
  assert.deepEqual(await files.glob('*', '/tmp/w'), ['/tmp/w/1', '/tmp/w/2']);
  const [match] = await files.search('tw.', '/tmp/w', { limit: 1 });
  assert.deepEqual([match!.path, match!.line, match!.text], ['/tmp/w/1', 1, 'two']);
  await files.move('/tmp/w/1', '/tmp/w/3');
  assert.equal(await files.makeDir('/tmp/w'), false);
  assert.equal((await files.stat('/tmp/w/3')).kind, 'file');
  const tar = await files.pack('/tmp/w');
  await files.makeDir('/tmp/copy');
  assert.equal(await files.unpack('/tmp/copy', tar), 2);
  await files.remove('/tmp/w', { recursive: true });
  assert.ok(!(await files.exists('/tmp/w')) && (await files.exists('/tmp/copy/3')));
});

test('any byte in the name of a file survives', async () => {
  await sandbox.shell.run("mkdir /tmp/odd; touch $'/tmp/odd/\\377 %&?é'");
  const [entry] = await sandbox.files.list('/tmp/odd');
  assert.equal((await sandbox.files.stat(entry!.path)).size, 0);
  await sandbox.files.remove(entry!.path);
  assert.deepEqual(await sandbox.files.list('/tmp/odd'), []);
});

test('changes of files are seen from the moment that watch resolves', async () => {
  await using changes = await sandbox.files.watch('/tmp');
  await sandbox.files.write('/tmp/watched', 'x');
  for await (const { path } of changes) if (path.includes('watched')) break;
});

test('a box sleeps and wakes with what is in it', async () => {
  await using box = await Sandbox.create();
  await box.runCode('kept = 41');
  assert.ok((await box.hibernate()).size > 0);
  assert.equal((await box.refresh()).status, 'asleep');
  assert.ok(await box.wake());
  assert.equal(await box.wake(), null);
  assert.equal((await box.runCode('kept + 1')).text, '42');
});

test('the journal tells what happened, also as it happens', async () => {
  await using box = await Sandbox.create();
  await box.shell.run('echo noted');
  const entries = await box.journal();
  assert.ok(entries.length && entries[0]!.happenedAt instanceof Date);
  for await (const entry of box.followJournal()) {
    if (JSON.stringify(entry.body).includes('echo noted')) break;
  }
  let recording = '';
  for await (const piece of await box.exportJournal()) recording += new TextDecoder().decode(piece);
  assert.match(recording, /noted/);
});

test('what listens in a box can be asked over HTTP', async () => {
  await sandbox.files.write('/tmp/site/index.html', 'hello from a port');
  const server = await sandbox.commands.run(['python3', '-m', 'http.server', '8123'], { cwd: '/tmp/site', background: true });
  await until(async () => (await sandbox.ports()).some(({ port }) => port === 8123));
  assert.equal(await (await sandbox.fetch(8123, '/index.html')).text(), 'hello from a port');
  assert.equal((await sandbox.fetch(8123, '/none')).status, 404);
  await sandbox.files.makeDir('/tmp/site/sub');
  assert.equal((await sandbox.fetch(8123, '/sub')).status, 301);
  await assert.rejects(sandbox.fetch(8124), (error) => error instanceof Error && 'code' in error);
  const preview = await sandbox.preview(8123);
  assert.ok(preview.expiresAt > new Date());
  const page = await fetch(url + preview.path + 'index.html'); // without a key
  assert.equal(await page.text(), 'hello from a port');
  assert.match(page.headers.get('content-security-policy')!, /^sandbox allow-scripts allow-forms;/);
  await assert.rejects(sandbox.preview(0), InvalidRequest);
  await server.kill();
});

test('a workspace outlives sessions', async () => {
  const workspace = new Workspace('thesis');
  await workspace.create({ labels: { topic: 'hutch' } });
  await workspace.files.write('notes.txt', 'one');
  await using changes = await workspace.files.watch();
  await workspace.files.edit('notes.txt', 'one', 'two');
  for await (const { path } of changes) if (path.endsWith('notes.txt')) break;
  const { files } = workspace;
  assert.equal((await files.stat('notes.txt')).size, 3);
  assert.equal((await files.glob('*.txt')).length, 1);
  assert.equal((await files.search('two')).length, 1);
  await files.makeDir('folder');
  await files.move('notes.txt', 'folder/notes.txt');
  assert.equal(await files.diff('folder/notes.txt', 'folder/notes.txt'), '');
  {
    await using box = await Sandbox.create({ workspaceId: 'thesis' });
    assert.equal((await box.shell.run('cat /workspace/folder/notes.txt')).stdout, 'two');
    await assert.rejects(workspace.remove(), Conflict);
  }
  const copy = new Workspace('copy');
  assert.equal(await copy.import(await workspace.export()), 1);
  assert.equal(await copy.files.read('folder/notes.txt'), 'two');
  await copy.files.remove('folder', { recursive: true });
  assert.deepEqual(await copy.files.list(), []);
  assert.deepEqual((await Workspace.list()).map(({ id }) => id), ['copy', 'thesis']);
  assert.deepEqual((await workspace.info()).labels, { topic: 'hutch' });
  await workspace.remove();
  await copy.remove();
});

test('an admin works with the files of another owner', async () => {
  const server = new Server();
  const key = await server.makeKey('zoe');
  const hers = new Workspace('drafts', { apiKey: key.key! });
  await hers.files.write('plan.txt', 'one');
  const seen = new Workspace('drafts', { owner: 'zoe' });
  assert.equal(await seen.files.read('plan.txt'), 'one');
  await seen.files.write('plan.txt', 'two');
  assert.equal(await hers.files.read('plan.txt'), 'two');
  await assert.rejects(new Workspace('drafts').files.read('plan.txt'), NotFound);
  await assert.rejects(new Workspace('drafts', { apiKey: key.key!, owner: 'me' }).files.list(), NotPermitted);
  await seen.remove();
  await server.revokeKey(key.id);
});

test('an operator sees and sets what the server has', async () => {
  const server = new Server();
  assert.equal((await server.health()).status, 'ok');
  await server.ready();
  assert.ok((await server.info()).startedAt instanceof Date);
  assert.ok((await server.report()).layers.length);
  assert.match(await server.metrics(), /hutch_/);
  assert.ok((await server.images()).some(({ name }) => name === 'host'));
  await assert.rejects(server.removeImage('no-such-image'), NotFound);
  await assert.rejects(async () => {
    for await (const _ of server.buildImage('../bad')) assert.fail('it began');
  }, InvalidRequest);
  await assert.rejects(async () => {
    for await (const _ of server.pullImage('Not/A/Name')) assert.fail('it began');
  }, InvalidRequest);
  const { id, key } = await server.makeKey('someone', { scope: 'run', expires: '1h' });
  assert.deepEqual(await Sandbox.list({ apiKey: key! }), []);
  const rotated = await server.rotateKey(id, { overlap: '1m' });
  await server.extendKey(rotated.id, '2h');
  await server.revokeKey(rotated.id);
  await assert.rejects(Sandbox.list({ apiKey: rotated.key! }), Unauthorized);
  assert.ok((await server.keys()).some((found) => found.id === rotated.id && found.revokedAt));
  await server.setQuota('someone', { sessions: 3 });
  assert.equal((await server.quota('someone')).quota.sessions, 3);
  await new Workspace('limited').create();
  assert.equal((await server.setWorkspaceQuota('limited', 1e9)).quota, 1e9);
  assert.equal((await server.setWorkspaceQuota('limited', null)).quota, null);
  await new Workspace('limited').remove();
  await server.sizePool('host', 0);
  await server.pool();
  assert.ok((await server.sessions({ status: 'live' })).length);
  const [entry] = await server.audit({ limit: 1 });
  for await (const line of server.followAudit()) {
    assert.deepEqual(line, entry);
    break;
  }
});

test('sessions are followed, with those that are there first', async () => {
  const server = new Server();
  const seen: string[] = [];
  let made: Sandbox | undefined;
  for await (const info of server.followSessions({ current: true })) {
    if (!info) {
      assert.ok(seen.includes(sandbox.id));
      made = await Sandbox.create({ labels: { followed: 'yes' } });
    } else if (!made) {
      seen.push(info.id);
    } else if (info.id === made.id) {
      assert.ok(info.createdAt instanceof Date);
      assert.deepEqual(info.labels, { followed: 'yes' });
      if (info.status === 'running') await made.close();
      if (info.status === 'destroyed') break;
    }
  }
});

test('an operator looks at what a server did, its settings and its log', async () => {
  const server = new Server();
  await sandbox.shell.run('true');
  const [own] = await server.stats([sandbox.id, '00000000-000']);
  assert.equal(own!.session, sandbox.id);
  assert.ok('memory' in own!.stats);
  await assert.rejects(Sandbox.create({ image: 'no-such-image' }));
  const [failure] = await server.failures();
  assert.equal(failure!.image, 'no-such-image');
  assert.ok(failure!.happenedAt instanceof Date && failure!.why);
  await until(async () => (await server.history({ period: 'hour' })).some((sample) => sample.commands > 0));
  assert.ok((await server.history())[0]!.takenAt instanceof Date);
  const report = await server.settings();
  const most = report.settings.find(({ key }) => key === 'max_sessions')!;
  assert.equal(most.kind, 'number');
  const check = await server.checkSettings({ max_sessions: 7, 'pool.images': { host: 1 }, nothing: 1 });
  assert.deepEqual(Object.keys(check.problems), ['nothing']);
  const right = await server.checkSettings({ max_sessions: 7 });
  assert.match(right.diff, /\+max_sessions = 7/);
  await assert.rejects(server.changeSettings({ max_sessions: 7 }, right.digest), NotPermitted);
  const [first] = await server.log({ limit: 1000 });
  for await (const record of server.followLog()) {
    assert.deepEqual(record, first);
    break;
  }
});

test('what a caller did wrong is told before anything is sent', async () => {
  await assert.rejects(Sandbox.create({ network: 'full' as 'none' }), InvalidRequest);
  await assert.rejects(Sandbox.create({ memory: 'lots' }), InvalidRequest);
  await assert.rejects(Sandbox.create({ mounts: ['/only'] }), InvalidRequest);
  await assert.rejects(Sandbox.list({ url: 'ftp://x' }), InvalidRequest);
  await assert.rejects(Sandbox.list({ url: 'http://key@x' }), InvalidRequest);
  await assert.rejects(Sandbox.list({ apiKey: 'two words' }), InvalidRequest);
  await assert.rejects(Sandbox.list({ apiKey: 'wrong-key' }), Unauthorized);
  // The key of the environment is for the server of the environment.
  await assert.rejects(Sandbox.list({ url: `${url}/` }), /needs a key/);
});
