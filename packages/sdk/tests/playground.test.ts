/** The TypeScript that the dashboard's playground writes: compiled as strictly as can be, and run. */
import assert from 'node:assert/strict';
import { execFile } from 'node:child_process';
import { mkdir, readFile, rm, writeFile } from 'node:fs/promises';
import { test } from 'node:test';
import { fileURLToPath } from 'node:url';
import { promisify } from 'node:util';
import ts from 'typescript';
import { Sandbox } from 'hutch';

const run = promisify(execFile);
const folder = fileURLToPath(new URL('../playground/', import.meta.url)); // from where 'hutch' is found
const HOSTILE = [
  "it's", '"', '`', '${HOME}', '${`${1}`}', '\\', 'a\\', '\\u0041', "\\'", 'a\nb', '\n', 'a\r\nb', '\t', '\u0000', '\u001b[31m',
  '\u2028\u2029', 'x\u2028\ny', '\u202eevil', 'é ü 漢字 😀', '*/ // #', '</script><!--', 'await sandbox.close();',
];

test('what the playground shows as TypeScript compiles, and does what was done', async () => {
  const source = await readFile(process.env.HUTCH_CODEGEN!, 'utf8');
  const { outputText } = ts.transpileModule(source, {
    compilerOptions: { module: ts.ModuleKind.ESNext, target: ts.ScriptTarget.ES2022 },
  });
  const { generate } = await import(`data:text/javascript;base64,${Buffer.from(outputText).toString('base64')}`);
  const program: string = generate('typescript', [
    {
      do: 'create', image: 'host', memory: '512m', cpus: 0.5, pids: 64, disk: '256m', ttl: 600, idle: 300, onIdle: 'hibernate',
      network: 'none', labels: { 'of-playground': "it's", 'a/b-c': 'x' }, env: { WORD: 'a`b' },
    },
    { do: 'shell', command: 'echo "$WORD" && cd /tmp && mkdir site && echo served > site/index.html' },
    { do: 'shell', command: '(python3 -m http.server --directory site 8000 & until echo > /dev/tcp/127.0.0.1/8000; do sleep 0.1; done) >/dev/null 2>&1' },
    { do: 'fetch', port: 8000, path: '/index.html', method: 'GET' },
    { do: 'fetch', port: 8000, path: '/', method: 'POST', body: 'x`y' },
    { do: 'code', code: 'print("six")\n6 * 7' },
    { do: 'code', code: '1 / 0', context: 'other' },
    ...HOSTILE.flatMap((text) => [{ do: 'write', path: `/tmp/${text.length} f`, text }, { do: 'read', path: `/tmp/${text.length} f` }]),
    { do: 'shell', command: 'pkill -f http.server; true' },
    { do: 'extend', ttl: 1200 }, { do: 'hibernate' }, { do: 'wake' },
  ], 'http://127.0.0.1:8080');
  await mkdir(folder, { recursive: true });
  try {
    await writeFile(`${folder}program.mts`, program);
    const compiler = fileURLToPath(new URL('../../node_modules/typescript/bin/tsc', import.meta.url));
    await run('node', [compiler, '--strict', '--noUnusedParameters', '--target', 'es2022', '--module', 'nodenext', '--types', 'node', `${folder}program.mts`])
      .catch(({ stdout }) => assert.fail(`${stdout}\n${program}`));
    const { stdout } = await run('node', [`${folder}program.mjs`], { maxBuffer: 1e8 });
    const inOrder = ['a`b\n', '200 served\n', '501 ', 'six\n 42 null', 'ZeroDivisionError', ...HOSTILE.map((text) => `${text}\n`)];
    let at = 0;
    for (const part of inOrder) {
      const found = stdout.indexOf(part, at);
      assert.ok(found >= at, `${JSON.stringify(part)} is not in ${JSON.stringify(stdout.slice(at, at + 300))}`);
      at = found + part.length;
    }
  } finally {
    await rm(folder, { recursive: true });
  }
  const [made, ...more] = await Sandbox.list({ label: "of-playground=it's" });
  assert.deepEqual(more, []);
  assert.equal(made!.limits.memory, 512 * 1024 ** 2);
  assert.equal(made!.limits.cpus, 0.5);
  assert.ok(made!.expiresAt!.getTime() - made!.createdAt.getTime() > 1_100_000);
  await (await Sandbox.connect(made!.id)).close();
});
