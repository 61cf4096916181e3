// The code beside the playground does what was done, whatever was typed.
import assert from 'node:assert/strict';
import { execFileSync } from 'node:child_process';
import { readFileSync } from 'node:fs';
import test from 'node:test';
import ts from 'typescript';

const source = readFileSync(new URL('../src/session/codegen.ts', import.meta.url), 'utf8');
const options = { module: ts.ModuleKind.ESNext, target: ts.ScriptTarget.ES2022 };
const { outputText } = ts.transpileModule(source, { compilerOptions: options });
const { generate, pythonText, shellWord, typescriptText } = await import(
  `data:text/javascript;base64,${Buffer.from(outputText).toString('base64')}`
);

const HOSTILE = [
  '', ' ', "it's", '"', "'", '"""', '""""', "'''", '\\', '\\\\', '\\n', 'a\\', '"\\', '`', '`id`', '${HOME}', '$HOME $(id)',
  '${`${1}`}', '!history !!', '%s %d {} {{x}}', 'a\nb', '\n', 'a\n', '\na', 'a\n"', 'a\n""', 'a\n\\', 'x\n"""\nimport os\n"""', 'x\n`${1}`',
  'a\r\nb', 'a\rb', '\t', 'a\tb\nc', '\u0000', 'a\u0000\nb', '\u001b[31m', '\u0007', '\u007f', '\u0085', '\u2028\u2029', 'x\u2028\ny',
  '\u202eevil\u202c', '\u200b\ufeff', '\u00ad', 'é ü 漢字 😀', '😀\n😀', '\u{e0041}', '*/ // #', '</script><!--', '-x', '--', '@file', ';rm -rf /',
  'N{SNOWMAN} \\N{SNOWMAN}', '\\u0041 \\x41 \\101', 'EOF\nEOF', '~', '*', 'a=b',
];
const LONE = ['\ud800', 'a\udc80b', '\udfff\n'];

const python = (code, input = '') => execFileSync('python3', ['-c', code], { input, encoding: 'utf8' });

test('a text in Python is the text that was given', () => {
  const all = [...HOSTILE, ...LONE];
  const literals = all.map(pythonText);
  const code = 'import ast, json, sys\n'
    + 'print(json.dumps([ast.literal_eval(text) for text in json.load(sys.stdin)]))';
  assert.deepEqual(JSON.parse(python(code, JSON.stringify(literals))), all);
});

test('a text in TypeScript is the text that was given', () => {
  for (const text of [...HOSTILE, ...LONE]) {
    assert.equal(new Function(`return ${typescriptText(text)}`)(), text);
  }
});

test('a word of bash is the text that was given', () => {
  for (const text of HOSTILE.filter((each) => !each.includes('\0'))) {
    const printed = execFileSync('bash', ['-c', `printf %s ${shellWord(text)}`], { encoding: 'utf8' });
    assert.equal(printed, text);
  }
});

test('nothing that hides or turns text is left in the code', () => {
  const hidden = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u00ad\u200b-\u200f\u2028-\u202e\u2066-\u2069\ufeff]/;
  for (const text of HOSTILE) {
    assert.doesNotMatch(pythonText(text), hidden);
    assert.doesNotMatch(typescriptText(text), hidden);
    assert.doesNotMatch(shellWord(text), hidden);
  }
});

const everything = (text) => [
  {
    do: 'create', image: text, memory: '512m', cpus: 0.5, pids: 64, disk: '1g', relax: ['network'], ttl: 600, idle: 60, onIdle: 'hibernate',
    workspaceId: text, labels: { [text]: text, __proto__2: '1' }, env: { A: text },
  },
  { do: 'shell', command: text }, { do: 'shell', command: `${text} again` },
  { do: 'code', code: text }, { do: 'code', code: text, context: text || 'other' },
  { do: 'write', path: text, text }, { do: 'read', path: text },
  { do: 'fetch', port: 8000, path: text, method: 'GET' },
  { do: 'fetch', port: 8000, path: text, method: 'POST', body: text },
  { do: 'extend', ttl: 60 }, { do: 'hibernate' }, { do: 'wake' }, { do: 'close' },
];

test('all of the Python can be parsed', () => {
  const programs = HOSTILE.map((text) => generate('python', everything(text), 'http://127.0.0.1:8080'));
  python('import ast, json, sys\nfor text in json.load(sys.stdin): ast.parse(text)', JSON.stringify(programs));
});

test('all of the TypeScript can be parsed, and names no variable twice', () => {
  for (const text of HOSTILE) {
    const program = generate('typescript', everything(text), 'http://127.0.0.1:8080');
    const { diagnostics } = ts.transpileModule(program, { compilerOptions: options, reportDiagnostics: true });
    assert.deepEqual(diagnostics.map(({ messageText }) => messageText), []);
    const names = [...program.matchAll(/^const (\w+) =/gm)].map(([, name]) => name);
    assert.equal(new Set(names).size, names.length);
  }
});

test('all of the curl commands can be parsed, and send what was typed', () => {
  for (const text of HOSTILE) {
    const script = generate('curl', everything(text), 'http://127.0.0.1:8080');
    execFileSync('bash', ['-n'], { input: script });
    // A curl that prints the bodies that it is given, and the content that comes over its stdin.
    const fake = 'HUTCH_API_KEY=k; jq() { cat >/dev/null; echo 1; }; curl() { while [ $# -gt 0 ]; do '
      + 'case $1 in -d) printf "%s\\0" "$2" >&3; shift;; -T) base64 -w0 >&3; printf "\\0" >&3; shift;; esac; shift; done; echo {}; }\n';
    const printed = execFileSync('bash', ['-c', `exec 3>&1 >/dev/null\n${fake}${script}`], { encoding: 'utf8' });
    const sent = printed.split('\0').slice(0, -1);
    const [create, first, , cell, kernel, , content] = sent;
    assert.equal(JSON.parse(create).labels[text], text);
    assert.equal(JSON.parse(create).limits.memory, 512 * 1024 ** 2);
    assert.equal(JSON.parse(create).ttl_seconds, 600);
    assert.deepEqual(JSON.parse(create).relax, ['network']);
    assert.deepEqual(JSON.parse(first), { command: text });
    assert.deepEqual(JSON.parse(cell), { code: text });
    assert.deepEqual(JSON.parse(kernel), { context: text || 'other' });
    assert.equal(Buffer.from(content, 'base64').toString(), text);
  }
});

test('a key is in no code', () => {
  for (const language of ['python', 'typescript', 'curl']) {
    const code = generate(language, everything('x'), 'http://127.0.0.1:8080');
    assert.match(code, /HUTCH_API_KEY/);
    assert.doesNotMatch(code, /hutch_[a-z0-9]{8}/);
  }
});

test('a kernel of its own is made once, before it is used', () => {
  const cells = ['main', 'other', 'other'].map((context) => ({ do: 'code', code: '1', ...(context !== 'main' && { context }) }));
  const made = { python: /create_code_context\("other"\)/g, typescript: /createCodeContext\('other'\)/g, curl: /\/contexts" -d '\{"context":"other"\}'/g };
  for (const [language, pattern] of Object.entries(made)) {
    const code = generate(language, [{ do: 'create' }, ...cells], 'http://127.0.0.1:8080');
    assert.equal(code.match(pattern)?.length, 1, code);
    assert.ok(code.search(pattern) < code.search(/context=|context: |contexts\/other/), code);
  }
});

test('what was left out of the hardening is a list in every language', () => {
  const lists = { python: 'relax=["network"]', typescript: "relax: ['network']", curl: '"relax":["network"]' };
  for (const [language, list] of Object.entries(lists)) {
    const code = generate(language, [{ do: 'create', relax: ['network'] }], 'http://127.0.0.1:8080');
    assert.ok(code.includes(list), code);
  }
});

test('nothing done yet is how a sandbox is made', () => {
  assert.match(generate('python', [], 'http://127.0.0.1:8080'), /^sandbox = Sandbox\.create\(\)$/m);
  assert.match(generate('typescript', [], 'http://127.0.0.1:8080'), /^const sandbox = await Sandbox\.create\(\);$/m);
});
