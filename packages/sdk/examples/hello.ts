/** A shell, Python, files and a stream, in one box. */
import { Chunk, Sandbox } from 'hutch';

await using sandbox = await Sandbox.create({ ttl: 600 });

const { stdout } = await sandbox.shell.run('echo hello from $(uname -s)');
console.log(stdout.trim());

await sandbox.files.write('numbers.txt', '1\n2\n3\n');
const execution = await sandbox.runCode('sum(int(line) for line in open("numbers.txt"))');
console.log('sum:', execution.text);

for await (const item of sandbox.shell.stream('for i in 1 2 3; do echo step $i; done')) {
  if (item instanceof Chunk) process.stdout.write(item.text);
  else console.log('exit code', item.exitCode);
}
