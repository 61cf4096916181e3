import assert from 'node:assert/strict';
import { after, before, test } from 'node:test';
import { generateText, stepCountIs } from 'ai';
import { MockLanguageModelV3 } from 'ai/test';
import { BoxLost, InvalidRequest, Sandbox } from 'hutch';
import { aiTools } from 'hutch/ai';
import { until } from './setup.js';

let sandbox: Sandbox;
before(async () => {
  sandbox = await Sandbox.create();
});
after(() => sandbox.close());

test('tools have names, descriptions and schemas, and work in this box', async () => {
  const tools = await sandbox.tools.list();
  const names = tools.map(({ name }) => name);
  for (const name of ['bash', 'read', 'write', 'edit', 'grep', 'python', 'recall']) {
    assert.ok(names.includes(name), name);
  }
  assert.ok(!names.includes('create_box'));
  const read = tools.find(({ name }) => name === 'read')!;
  assert.deepEqual(Object.keys(read.parameters.properties as object), ['path', 'offset', 'limit']);
  assert.ok(read.onlyReads && read.description);
  const wrote = await sandbox.tools.call('write', { path: 'app.py', content: 'VALUE = 1\n' });
  assert.equal(wrote.text, 'Wrote app.py: 1 line, 10 bytes');
  assert.equal((await read.execute('{"path": "app.py"}')).text, '1\tVALUE = 1');
  assert.equal(await sandbox.files.read('app.py'), 'VALUE = 1\n');
});

test('what a model can put right is an answer', async () => {
  const missing = await sandbox.tools.call('read', { path: 'ap.py' });
  assert.ok(missing.failed && missing.exitCode === 1 && /Did you mean app.py/.test(missing.text));
  assert.ok((await sandbox.tools.call('bash', 'no json')).failed);
  const failed = await sandbox.tools.call('bash', { command: 'exit 3' });
  assert.ok(!failed.failed && failed.exitCode === 3);
  await assert.rejects(sandbox.tools.call('no_such_tool', {}), InvalidRequest);
});

test('long output is condensed unless condensing is turned off', async () => {
  const command = 'for i in $(seq 3000); do echo "same line"; done';
  const short = await sandbox.tools.call('bash', { command });
  const long = await sandbox.tools.with({ condense: false }).call('bash', { command });
  assert.ok(short.text.length * 10 < long.text.length, `${short.text.length} ${long.text.length}`);
  const only = await sandbox.tools.with({ only: ['read', 'grep'] }).list();
  assert.deepEqual(only.map(({ name }) => name).sort(), ['grep', 'read']);
});

test('aborting a call stops its command, and a box that is gone is thrown', async () => {
  const controller = new AbortController();
  const running = sandbox.tools.call('bash', { command: 'touch /tmp/on; sleep 7101' }, { signal: controller.signal });
  await until(() => sandbox.files.exists('/tmp/on'));
  controller.abort();
  await assert.rejects(running, { name: 'AbortError' });
  // The shell runs one command at a time: the next gets its turn once that one is gone.
  assert.equal((await sandbox.tools.call('bash', { command: 'echo free' })).text.trim(), 'free');
  const other = await Sandbox.create();
  await other.close();
  await assert.rejects(other.tools.call('bash', { command: 'true' }), BoxLost);
});

test('a model of the Vercel AI SDK uses them', async () => {
  const usage = {
    inputTokens: { total: 1, noCache: 1, cacheRead: 0, cacheWrite: 0 },
    outputTokens: { total: 1, text: 1, reasoning: 0 },
  };
  const call = (toolName: string, input: object) => ({
    content: [{ type: 'tool-call' as const, toolCallId: toolName, toolName, input: JSON.stringify(input) }],
    finishReason: { unified: 'tool-calls' as const, raw: undefined },
    usage,
    warnings: [],
  });
  const script = [
    call('write', { path: 'hello.py', content: 'print(6 * 7)\n' }),
    call('bash', { command: 'python3 hello.py' }),
    {
      content: [{ type: 'text' as const, text: 'it prints 42' }],
      finishReason: { unified: 'stop' as const, raw: undefined },
      usage,
      warnings: [],
    },
  ];
  const model = new MockLanguageModelV3({ doGenerate: async () => script.shift()! });
  const { text } = await generateText({
    model,
    tools: await aiTools(sandbox, { only: ['write', 'bash'] }),
    prompt: 'Write a program, and run it.',
    stopWhen: stepCountIs(5),
  });
  assert.equal(text, 'it prints 42');
  const told = JSON.stringify(model.doGenerateCalls.at(-1)!.prompt);
  assert.match(told, /Wrote hello.py/);
  assert.match(told, /42/);
  assert.equal(await sandbox.files.read('hello.py'), 'print(6 * 7)\n');
});
