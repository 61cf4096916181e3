/** The cells of a notebook. They stay while this page is open, wherever the user goes in it. */
import { signal, type Signal } from '@preact/signals';
import { CellResult, Chunk, Execution, type Sandbox } from 'hutch';
import { reason } from '../ui/index.js';
import { textOf } from './plain.js';

export interface Cell {
  id: number;
  kind: 'code' | 'text';
  source: Signal<string>;
  run: Signal<Run | undefined>;
}

export interface Run {
  state: 'waiting' | 'running' | 'done';
  /** In order of arrival; what follows each other in one stream is one piece. */
  parts: ({ kind: 'stdout' | 'stderr'; text: string } | { kind: 'result'; result: CellResult })[];
  execution?: Execution;
  /** Of the connection or the server, not of the code. */
  failure?: string;
  startedAt: number;
  code: string;
  context: string;
}

export interface Notebook {
  cells: Signal<Cell[]>;
  context: Signal<string>;
  /** The cell that runs or waits, by its place in the queue. */
  queue: Promise<void>;
}

const MOST_TEXT = 2_000_000; // letters of one stream of one cell
const notebooks = new Map<string, Notebook>();
let last = 0;

export function newCell(source = '', kind: Cell['kind'] = 'code'): Cell {
  return { id: ++last, kind, source: signal(source), run: signal(undefined) };
}

export function notebookOf(session: string): Notebook {
  let found = notebooks.get(session);
  if (!found) {
    found = { cells: signal([newCell()]), context: signal('main'), queue: Promise.resolve() };
    notebooks.set(session, found);
  }
  return found;
}

/** Run a cell after those that were asked for before it. */
export function runCell(notebook: Notebook, cell: Cell, sandbox: Sandbox, whenDone: (run: Run) => void): void {
  const code = cell.source.value;
  if (cell.run.value && cell.run.value.state !== 'done') return;
  if (!code.trim()) return;
  const context = notebook.context.value;
  cell.run.value = { state: 'waiting', parts: [], startedAt: Date.now(), code, context };
  notebook.queue = notebook.queue.then(async () => {
    if (cell.run.value?.state !== 'waiting') return; // it was taken back
    await stream(cell, sandbox, code, context);
    whenDone(cell.run.value!);
  });
}

async function stream(cell: Cell, sandbox: Sandbox, code: string, context: string): Promise<void> {
  const run: Run = { state: 'running', parts: [], startedAt: Date.now(), code, context };
  let isDue = false;
  // A cell that prints much would otherwise draw the page for each line.
  const show = () => {
    if (isDue) return;
    isDue = true;
    setTimeout(() => {
      isDue = false;
      if (run.state === 'running') cell.run.value = { ...run, parts: [...run.parts] };
    }, 60);
  };
  cell.run.value = { ...run };
  try {
    for await (const item of sandbox.streamCode(code, { context, keep: true })) {
      if (item instanceof Chunk) add(run, item.stream, item.text);
      else if (item instanceof CellResult) run.parts.push({ kind: 'result', result: item });
      else if (item instanceof Execution) run.execution = item;
      show();
    }
  } catch (error) {
    run.failure = reason(error);
  }
  run.state = 'done';
  cell.run.value = { ...run, parts: [...run.parts] };
}

function add(run: Run, kind: 'stdout' | 'stderr', text: string): void {
  const before = run.parts.at(-1);
  if (before?.kind !== kind) {
    run.parts.push({ kind, text });
  } else {
    const whole = before.text + text;
    // A new object: what is drawn compares it with the old one.
    run.parts[run.parts.length - 1] = { kind, text: whole.length > MOST_TEXT ? whole.slice(-MOST_TEXT) : whole };
  }
}

/** As Jupyter reads it. */
export function toIpynb(cells: Cell[]): string {
  const lines = (text: string) => text.split(/(?<=\n)/);
  const mime: [keyof CellResult, string][] = [
    ['text', 'text/plain'], ['html', 'text/html'], ['markdown', 'text/markdown'], ['svg', 'image/svg+xml'],
    ['png', 'image/png'], ['jpeg', 'image/jpeg'], ['latex', 'text/latex'], ['json', 'application/json'],
    ['javascript', 'application/javascript'],
  ];
  const outputs = (run: Run) => [
    ...run.parts.map((part) => {
      if (part.kind !== 'result') return { output_type: 'stream', name: part.kind, text: lines(part.text) };
      const data = Object.fromEntries(
        mime.filter(([name]) => part.result[name] !== null && part.result[name] !== undefined)
          .map(([name, type]) => [type, part.result[name]]),
      );
      return part.result.isMain
        ? { output_type: 'execute_result', data, metadata: {}, execution_count: run.execution?.executionCount ?? null }
        : { output_type: 'display_data', data, metadata: {} };
    }),
    ...(run.execution?.error
      ? [{
          output_type: 'error',
          ename: run.execution.error.name,
          evalue: run.execution.error.value,
          traceback: run.execution.error.traceback.split('\n'),
        }]
      : []),
  ];
  return JSON.stringify({
    cells: cells.map((cell) => {
      const run = cell.run.value;
      const common = { id: `cell-${cell.id}`, metadata: {}, source: lines(cell.source.value) };
      return cell.kind === 'text'
        ? { ...common, cell_type: 'markdown' }
        : { ...common, cell_type: 'code', execution_count: run?.execution?.executionCount ?? null, outputs: run ? outputs(run) : [] };
    }),
    metadata: {
      kernelspec: { display_name: 'Python 3', language: 'python', name: 'python3' },
      language_info: { name: 'python' },
    },
    nbformat: 4,
    nbformat_minor: 5,
  }, null, 1);
}

export function fromIpynb(text: string): Cell[] {
  const { cells } = JSON.parse(text) as { cells?: unknown };
  if (!Array.isArray(cells)) throw new Error('this file is not a notebook: it has no cells');
  return cells.map((each: { cell_type?: unknown; source?: unknown }) => {
    const source = Array.isArray(each.source) ? each.source.map(textOf).join('') : textOf(each.source);
    return newCell(source, each.cell_type === 'code' ? 'code' : 'text');
  });
}
