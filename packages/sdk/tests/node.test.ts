import assert from 'node:assert/strict';
import { mkdir, mkdtemp, readFile, rm, stat, symlink, writeFile } from 'node:fs/promises';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { after, before, test } from 'node:test';
import { LimitReached, Sandbox, ServerUnavailable } from 'hutch';
import { download, unixFetch, upload } from 'hutch/node';

let folder: string;
let sandbox: Sandbox;
before(async () => {
  folder = await mkdtemp(join(tmpdir(), 'hutch-sdk-'));
  sandbox = await Sandbox.create();
});
after(async () => {
  await sandbox.close();
  await rm(folder, { recursive: true });
});

test('a folder goes into the box and comes back', async () => {
  await mkdir(join(folder, 'in/deep'), { recursive: true });
  await writeFile(join(folder, 'in/run.sh'), 'echo hi\n', { mode: 0o755 });
  await writeFile(join(folder, 'in/deep/data'), new Uint8Array(200_000).fill(7));
  await symlink('/etc/passwd', join(folder, 'in/link'));
  assert.equal(await upload(sandbox.files, join(folder, 'in'), 'project'), 2);
  assert.equal((await sandbox.shell.run('cd project && ./run.sh; ls')).stdout, 'hi\ndeep\nrun.sh\n');
  assert.equal(await download(sandbox.files, 'project', join(folder, 'out')), 2);
  assert.equal((await stat(join(folder, 'out/run.sh'))).mode & 0o777, 0o755);
  assert.equal((await readFile(join(folder, 'out/deep/data'))).length, 200_000);
});

test('a box cannot write outside, nor without end', async () => {
  await sandbox.shell.run('mkdir -p /tmp/evil && ln -s /etc /tmp/evil/link && echo x > /tmp/evil/file && mkdir /tmp/evil/sub && echo y > /tmp/evil/sub/f');
  await mkdir(join(folder, 'evil'));
  await mkdir(join(folder, 'victim'));
  await symlink(join(folder, 'victim'), join(folder, 'evil/sub'));
  await assert.rejects(download(sandbox.files, '/tmp/evil', join(folder, 'evil')), { code: 'EEXIST' });
  await assert.rejects(stat(join(folder, 'victim/f')), { code: 'ENOENT' });
  await assert.rejects(download(sandbox.files, '/dev/null', join(folder, 'null')), /neither a file nor a folder/);
  await sandbox.shell.run('head -c 100000 /dev/zero > /tmp/big');
  await assert.rejects(download(sandbox.files, '/tmp/big', join(folder, 'big'), { limit: 1000 }), LimitReached);
  await assert.rejects(stat(join(folder, 'big')), { code: 'ENOENT' });
});

test('the user of the server needs no key at its socket', async () => {
  const way = { url: 'http://localhost', fetch: unixFetch(process.env.HUTCH_TEST_SOCKET!) };
  await using box = await Sandbox.create(way);
  const heard: string[] = [];
  await box.shell.run('echo one; echo two', { onStdout: (text) => heard.push(text) });
  assert.equal(heard.join(''), 'one\ntwo\n');
  await box.files.write('big', new Uint8Array(1_000_000));
  assert.equal((await box.files.read('big', 'bytes')).length, 1_000_000);
  const nowhere = { url: 'http://localhost', fetch: unixFetch(join(folder, 'none.sock')) };
  await assert.rejects(Sandbox.list(nowhere), (error) => error instanceof ServerUnavailable && /no such socket/.test(error.message));
});
