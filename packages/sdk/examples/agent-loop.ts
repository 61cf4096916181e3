/** The tools of a box in a loop of your own. `model` stands for a call to your provider. */
import { Sandbox, type Tool } from 'hutch';

interface Call {
  name: string;
  arguments: string;
}

const script: Call[] = [
  { name: 'write', arguments: '{"path": "app.py", "content": "print(6 * 7)\\n"}' },
  { name: 'bash', arguments: '{"command": "python3 app.py"}' },
];

/** What a provider wants to know of a tool; most take this form, or nearly so. */
const describe = ({ name, description, parameters }: Tool) => ({ type: 'function', name, description, parameters });

async function model(_messages: object[], _tools: object[]): Promise<Call | undefined> {
  return script.shift();
}

await using sandbox = await Sandbox.create();
const tools = await sandbox.tools.list();
const messages: object[] = [{ role: 'user', content: 'Write a program, and run it.' }];
for (let call; (call = await model(messages, tools.map(describe))); ) {
  const answer = await sandbox.tools.call(call.name, call.arguments);
  console.log(`${call.name}: ${answer.text.trim()}`);
  messages.push({ role: 'tool', content: answer.text });
}
