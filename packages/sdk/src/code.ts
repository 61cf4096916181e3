/** Python in a box: cells, the contexts that they run in, and functions that they can call. */
import { HutchError, InvalidRequest } from './errors.js';
import { CellResult, Chunk, Execution, type Schemas } from './results.js';
import { Stream } from './stream.js';
import type { Abortable, Transport } from './transport.js';

export type Context = Schemas['Context'];

/**
 * What code in the box can call by name. Keyword arguments come as one object, last. Arguments and
 * answers are what JSON has; what a function throws is raised in the cell.
 */
export type Functions = Record<string, (...args: any[]) => unknown>;

export interface CodeOptions extends Abortable {
  /** Which kernel; "main" without one. */
  context?: string | Context;
  /** Seconds. */
  timeout?: number;
  keep?: boolean;
  functions?: Functions;
  /** In the code, the functions are awaited. */
  awaitable?: boolean;
}

export interface RunCodeOptions extends CodeOptions {
  onStdout?: (text: string) => void;
  onStderr?: (text: string) => void;
  onResult?: (result: CellResult) => void;
  /** Throw CommandFailed or TimedOut. */
  check?: boolean;
}

const MAX_MESSAGE = 10_000;

export const contextOf = (context?: string | Context): string =>
  typeof context === 'object' ? context.id : (context ?? 'main');

export async function runCode(
  transport: Transport,
  session: string,
  code: string,
  options: RunCodeOptions,
): Promise<Execution> {
  const { onStdout, onStderr, onResult, check } = options;
  const stream = streamCode(transport, session, code, options);
  const execution = await transport.result(stream, Execution, (item) => {
    if (item instanceof CellResult) onResult?.(item);
    else if (item instanceof Chunk) (item.stream === 'stderr' ? onStderr : onStdout)?.(item.text);
  });
  return check ? execution.check() : execution;
}

type Item = Chunk | CellResult | Execution;

export function streamCode(
  transport: Transport,
  session: string,
  code: string,
  { context, timeout, keep, functions = {}, awaitable, signal }: CodeOptions,
): Stream<Item> {
  const names = Object.keys(functions);
  const source = transport.stream(
    'RunCode',
    { session, context: contextOf(context), code, timeout, keep, awaitable, functions: names },
    { signal },
  );
  return new Stream(answered(source, transport, session, functions), () => void source.close());
}

/** The items of a cell without its calls: those are answered here, each by itself. */
async function* answered(
  source: Stream<Item | Schemas['Call']>,
  transport: Transport,
  session: string,
  functions: Functions,
): AsyncGenerator<Item, void, undefined> {
  for await (const item of source) {
    if (item instanceof Chunk || item instanceof CellResult || item instanceof Execution) {
      yield item;
    } else {
      void answer(transport, session, item, functions);
    }
  }
}

async function answer(
  transport: Transport,
  session: string,
  call: Schemas['Call'],
  functions: Functions,
): Promise<void> {
  const fields = { session, call: call.id, ...(await outcome(call, functions)) };
  try {
    await transport.perform('AnswerCall', fields);
  } catch (error) {
    if (!(error instanceof InvalidRequest)) return; // the cell is over: who reads it is told
    const value = `${call.name} gave an answer that cannot be sent: ${error.message}`;
    const refused = { session, call: call.id, error: { name: 'ValueError', value } };
    await transport.perform('AnswerCall', refused).catch(() => {});
  }
}

async function outcome(
  call: Schemas['Call'],
  functions: Functions,
): Promise<{ value?: unknown; error?: Schemas['CellErrorInput'] }> {
  try {
    // Not what every object has: "constructor" was not given.
    const found = Object.hasOwn(functions, call.name) ? functions[call.name] : undefined;
    if (!found) {
      return { error: { name: 'NameError', value: `no function '${call.name}' was given to this cell` } };
    }
    const keywords = Object.keys(call.kwargs ?? {}).length ? [call.kwargs] : [];
    const value = await found(...call.args, ...keywords);
    return { value: JSON.parse(JSON.stringify(value ?? null)) };
  } catch (error) {
    const isError = error instanceof Error;
    // Of ours, the class; of JavaScript's, what Python calls the same.
    const name = error instanceof HutchError ? error.name : isError ? pythonName(error.name) : 'Exception';
    const message = messageOf(error);
    return { error: { name, value: message.slice(0, MAX_MESSAGE).replaceAll('\0', '\ufffd') } };
  }
}

function messageOf(error: unknown): string {
  try {
    return String(error instanceof Error ? error.message : error);
  } catch {
    return '(the message cannot be read)'; // an object without a prototype, say
  }
}

const PYTHON: Record<string, string> = {
  Error: 'Exception', RangeError: 'ValueError', ReferenceError: 'NameError',
};
const pythonName = (name: string): string => PYTHON[name] ?? name.slice(0, 200);
