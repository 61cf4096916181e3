/** What needs no server. */
import assert from 'node:assert/strict';
import { mkdtemp, readdir, readFile, rm } from 'node:fs/promises';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { test } from 'node:test';
import { fileURLToPath } from 'node:url';
import { gzipSync } from 'node:zlib';
import { build } from 'esbuild';
import ts from 'typescript';
import * as hutch from 'hutch';

const root = fileURLToPath(new URL('../..', import.meta.url));
const internal = (name: string) => import(new URL(`../../dist/${name}.js`, import.meta.url).href);

// Operations that this SDK does not use, and why.
const SANDKASTEN = 'a route of Sandkasten, for its own clients; ours says the same otherwise';
const NOT_USED: Record<string, string> = {
  exec: SANDKASTEN, execStream: SANDKASTEN, readOfSession: SANDKASTEN, uploadOfSession: SANDKASTEN,
  writeOfSession: SANDKASTEN, listOfWorkspace: SANDKASTEN, readOfWorkspace: SANDKASTEN,
  uploadOfWorkspace: SANDKASTEN, writeOfWorkspace: SANDKASTEN,
};

test('every operation of openapi.json is used, and none that is not there', async () => {
  const document = JSON.parse(await readFile(process.env.HUTCH_OPENAPI ?? join(root, '../../openapi.json'), 'utf8'));
  const known = Object.values<Record<string, { operationId: string }>>(document.paths)
    .flatMap((verbs) => Object.values(verbs).map(({ operationId }) => operationId));
  const used = new Set<string>();
  for (const name of await readdir(join(root, 'src'))) {
    if (name === 'api.ts') continue;
    const source = await readFile(join(root, 'src', name), 'utf8');
    const inFiles = name === 'files.ts';
    const calls = /\.(?:perform|stream|bytes|#perform)(?:<[^>]*>)?\(\s*'(\w+)'/g;
    for (const [, operation] of source.matchAll(calls)) {
      used.add(operation!);
      // What `Files` does in a box, it does in a workspace with the operation of this name.
      if (inFiles && !/^(Un)?[Pp]ackFolder$/.test(operation!)) used.add(`${operation}OfWorkspace`);
    }
    if (inFiles) for (const [, operation] of source.matchAll(/ \? '(\w+)' : '\w+OfWorkspace'/g)) {
      used.add(operation!).add(`${operation}OfWorkspace`);
    }
  }
  assert.deepEqual(known.filter((name) => !used.has(name) && !NOT_USED[name]), [], 'not used');
  assert.deepEqual([...used].filter((name) => !known.includes(name)), [], 'not there');
  assert.deepEqual(Object.keys(NOT_USED).filter((name) => !known.includes(name) || used.has(name)), [], 'listed for nothing');
});

test('the error classes are those of the Python SDK', { skip: !process.env.HUTCH_ERRORS }, () => {
  const ours: Record<string, [string, string]> = {};
  for (const [name, found] of Object.entries(hutch)) {
    if (typeof found !== 'function' || !(found === hutch.HutchError || found.prototype instanceof hutch.HutchError)) continue;
    ours[name] = [(found as typeof hutch.HutchError).code, Object.getPrototypeOf(found).name];
  }
  (ours.HutchError as [string, string])[1] = 'Exception';
  assert.deepEqual(ours, JSON.parse(process.env.HUTCH_ERRORS!));
  const error = new hutch.SessionEnded('gone');
  assert.ok(error instanceof hutch.BoxLost);
  assert.deepEqual([error.name, error.code, error.message], ['SessionEnded', 'session_expired', 'gone']);
});

// What has another name here, or no place; each is in the guide.
const ELSEWHERE: Record<string, string> = {
  'Sandbox.create.workspace': 'a folder of the server: mounts; browsers have no folders',
  'Files.upload': 'a function of hutch/node',
  'Files.download': 'a function of hutch/node',
  'Files.edit.new': 'named replacement: new is a word of the language',
  'Workspace.export.to': 'gives a stream',
  'Workspace.import_': 'import',
  'Toolbox.box': 'each tool is of its sandbox', 'Toolbox.tools': 'list', 'Toolbox.call.arguments': 'args',
  'Toolbox.context': 'each tool is of its sandbox',
};

test('what the Python SDK has is here, under the same name', { skip: !process.env.HUTCH_NAMES }, () => {
  const python: Record<string, Record<string, string[]>> = JSON.parse(process.env.HUTCH_NAMES!);
  const entry = join(root, 'dist/index.d.ts');
  const program = ts.createProgram([entry], { strict: true, module: ts.ModuleKind.NodeNext, target: ts.ScriptTarget.ES2022 });
  const checker = program.getTypeChecker();
  const exported = new Map(checker.getExportsOfModule(checker.getSymbolAtLocation(program.getSourceFile(entry)!)!).map((symbol) => {
    return [symbol.name, symbol.flags & ts.SymbolFlags.Alias ? checker.getAliasedSymbol(symbol) : symbol];
  }));
  const camel = (name: string) => name.replace(/_([a-z])/g, (_, letter: string) => letter.toUpperCase());
  /** Names of parameters, and of the options in them. */
  const takes = (type: ts.Type): Set<string> => {
    const names = new Set<string>();
    for (const signature of checker.getSignaturesOfType(type, ts.SignatureKind.Call)) {
      for (const parameter of signature.getParameters()) {
        names.add(parameter.name);
        const options = checker.getTypeOfSymbol(parameter);
        for (const option of checker.getNonNullableType(options).getProperties()) names.add(option.name);
      }
    }
    return names;
  };
  const missing: string[] = [];
  const used = new Set<string>();
  const note = (name: string) => (name in ELSEWHERE ? used.add(name) : missing.push(name));
  for (const [name, members] of Object.entries(python)) {
    const symbol = exported.get(name)!;
    assert.ok(symbol, name);
    const own = checker.getDeclaredTypeOfSymbol(symbol);
    const shared = checker.getTypeOfSymbol(symbol);
    for (const [member, parameters] of Object.entries(members)) {
      const found = own.getProperty(camel(member)) ?? shared.getProperty(camel(member));
      if (!found) {
        note(`${name}.${member}`);
        continue;
      }
      const known = takes(checker.getTypeOfSymbol(found));
      for (const parameter of parameters) if (!known.has(camel(parameter))) note(`${name}.${member}.${parameter}`);
    }
  }
  assert.deepEqual(missing, []);
  assert.deepEqual(Object.keys(ELSEWHERE).filter((name) => !used.has(name)), [], 'listed for nothing');
});

test('all of it is at most 20 kB, and what is not used is left out', async () => {
  const sizeOf = async (contents: string) => {
    const { outputFiles } = await build({
      stdin: { contents, resolveDir: root },
      bundle: true, minify: true, format: 'esm', platform: 'browser', write: false, logLevel: 'error',
    });
    return gzipSync(outputFiles[0]!.contents, { level: 9 }).length;
  };
  const all = await sizeOf("export * from 'hutch'");
  assert.ok(all <= 20_000, `${all} bytes`);
  assert.ok((await sizeOf("export { Workspace } from 'hutch'")) < all);
  assert.ok((await sizeOf("export { TimedOut } from 'hutch'")) < 1000); // measured: 204
  assert.ok((await sizeOf("import 'hutch'")) < 100);
});

test('events survive any cut of the bytes that they come in', async () => {
  const { EventParser } = await internal('events');
  const text = ': heartbeat\n\nevent: chunk\r\ndata: {"é":1}\r\n\r\ndata: a\ndata: b\n\n';
  const bytes = new TextEncoder().encode(text);
  for (let size = 1; size <= bytes.length; size++) {
    const parser = new EventParser();
    const events = [];
    for (let start = 0; start < bytes.length; start += size) {
      events.push(...parser.feed(bytes.subarray(start, start + size)));
    }
    assert.deepEqual(events, [['chunk', '{"é":1}'], ['message', 'a\nb']]);
  }
});

test('names become camelCase, times dates and base64 bytes; keys of users stay', async () => {
  const { fromJson, toJson, quote } = await internal('convert');
  const answer = {
    exit_code: 1, started_at: '2026-01-02T03:04:05.678Z', stdout_bytes: '//8=',
    labels: { some_key: 'x', made_at: 'now' }, limits: { open_files: 1 },
  };
  assert.deepEqual(fromJson(answer), {
    exitCode: 1, startedAt: new Date('2026-01-02T03:04:05.678Z'), stdoutBytes: Uint8Array.of(255, 255),
    labels: { some_key: 'x', made_at: 'now' }, limits: { openFiles: 1 },
  });
  assert.deepEqual(toJson({ ttlSeconds: 1, env: { myName: 'x' }, mounts: [{ readOnly: true }], stdin: Uint8Array.of(1) }), {
    ttl_seconds: 1, env: { myName: 'x' }, mounts: [{ read_only: true }], stdin: 'AQ==',
  });
  const marked = Uint8Array.of(0xef, 0xbb, 0xbf, 65);
  assert.equal(new hutch.Chunk('stdout', marked).text, '\ufeffA');
  const odd = fromJson(JSON.parse('{"__proto__": {"admin": 1}, "labels": {"__proto__": {"admin": 1}}}'));
  assert.deepEqual([odd.admin, odd.labels.admin, ({} as { admin?: 1 }).admin], [undefined, undefined, undefined]);
  assert.equal(Object.getPrototypeOf(toJson(JSON.parse('{"__proto__": {"admin": 1}}'))), Object.prototype);
  assert.equal(quote('a/b é\udcff😀\ud800'), 'a%2Fb%20%C3%A9%ff%F0%9F%98%80%EF%BF%BD');
});

test('only what cannot be done twice by that is sent again', async () => {
  const { Attempts } = await internal('retry');
  const refused = Object.assign(new TypeError('fetch failed'), { cause: { code: 'ECONNREFUSED' } });
  const reset = Object.assign(new TypeError('fetch failed'), { cause: { code: 'ECONNRESET' } });
  const of = (operation: string, verb: string) => new Attempts(operation, 'http://x', verb, true);
  assert.equal(of('RunShell', 'POST').afterFailure(refused), 50);
  assert.throws(() => of('RunShell', 'POST').afterFailure(reset), /the server stops a command whose client is gone/);
  assert.throws(() => of('WriteFile', 'PUT').afterFailure(reset), /it is not known whether WriteFile was done/);
  assert.equal(of('OpenSession', 'POST').afterFailure(reset), 50);
  assert.equal(of('GetInfo', 'GET').afterFailure(reset), 50);
  // Deno's messages have the URL, and so the name of a file.
  const named = new TypeError('error sending request for url (http://x/v1?path=ECONNREFUSED): connection reset');
  assert.throws(() => of('RunShell', 'POST').afterFailure(named), hutch.ServerUnavailable);
  const busy = new hutch.ServerBusy('later');
  assert.equal(of('OpenSession', 'POST').afterRefusal(busy, 7), 7000);
  assert.equal(busy.retryAfter, 7);
  assert.throws(() => of('RunShell', 'POST').afterRefusal(busy, 7), hutch.ServerBusy);
  assert.throws(() => of('GetInfo', 'GET').afterRefusal(new hutch.NotFound('no'), null), hutch.NotFound);
});

test('importing it writes nothing and needs nothing but itself', async () => {
  const folder = await mkdtemp(join(tmpdir(), 'hutch-sdk-'));
  try {
    const { metafile } = await build({
      stdin: { contents: "export * from 'hutch'", resolveDir: root },
      bundle: true, format: 'esm', platform: 'neutral', outdir: folder, metafile: true, write: false,
    });
    const outside = Object.keys(metafile.inputs).filter((path) => path.includes('node_modules'));
    assert.deepEqual(outside, []);
  } finally {
    await rm(folder, { recursive: true });
  }
});
