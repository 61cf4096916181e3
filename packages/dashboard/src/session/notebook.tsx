/** Cells of Python, in a kernel that stays. */
import { useEffect, useRef, useState } from 'preact/hooks';
import type { Context } from 'hutch';
import {
  ask, Badge, brief, Button, confirm, EmptyState, ErrorBox, Icon, IconButton, Loading, reason, safeText, size, toast,
  useLoaded,
} from '../ui/index.js';
import { useSession } from './context.js';
import { saveAs } from './download.js';
import { CodeEditor, type Editor } from './editor.js';
import { Frame } from './frame.js';
import { fromIpynb, newCell, notebookOf, runCell, toIpynb, type Cell, type Notebook, type Run } from './notebook-state.js';
import { LongOutput, Output } from './output.js';
import { htmlOfMarkdown, ResultView } from './results.js';

export function NotebookView({ isShown = true }: { isShown?: boolean }) {
  const session = useSession();
  const { sandbox } = session;
  const notebook = notebookOf(sandbox.id);
  const editors = useRef(new Map<number, Editor>());
  const [showsVariables, showVariables] = useState(false);
  const [round, setRound] = useState(0);
  const cells = notebook.cells.value;
  const running = cells.filter((cell) => cell.run.value && cell.run.value.state !== 'done');

  const insert = (after: number, cell = newCell()) => {
    notebook.cells.value = [...cells.slice(0, after + 1), cell, ...cells.slice(after + 1)];
    return cell;
  };
  const focusCell = (cell: Cell | undefined) => cell && requestAnimationFrame(() => editors.current.get(cell.id)?.focus());
  const run = (cell: Cell, stays: boolean) => {
    runCell(notebook, cell, sandbox, (done) => {
      session.note({ do: 'code', code: done.code, ...(done.context !== 'main' && { context: done.context }) });
      setRound((old) => old + 1);
    });
    if (stays) return;
    const index = notebook.cells.value.indexOf(cell);
    focusCell(notebook.cells.value[index + 1] ?? insert(index));
  };
  const interrupt = async () => {
    // Those that wait would begin when this one has ended.
    for (const cell of cells) {
      if (cell.run.value?.state === 'waiting') cell.run.value = undefined;
    }
    try {
      if (!(await sandbox.interrupt(notebook.context.value))) toast('No cell is running.');
    } catch (error) {
      toast(reason(error), { kind: 'error' });
    }
  };
  const restart = async () => {
    const isMeant = await confirm({
      title: 'Restart Python?',
      body: 'All variables of this kernel are lost. The cells and what they printed stay here.',
      action: 'Restart',
      isDangerous: true,
    });
    if (!isMeant) return;
    try {
      await sandbox.restartCodeContext(notebook.context.value);
      toast('Python was restarted.');
      setRound((old) => old + 1);
    } catch (error) {
      toast(reason(error), { kind: 'error' });
    }
  };
  const remove = (cell: Cell) => {
    const index = cells.indexOf(cell);
    const rest = cells.filter((each) => each !== cell);
    notebook.cells.value = rest.length ? rest : [newCell()];
    if (cell.source.value.trim()) {
      toast('The cell was removed.', {
        undo: () => {
          const now = notebook.cells.value;
          notebook.cells.value = [...now.slice(0, index), cell, ...now.slice(index)];
        },
      });
    }
  };
  const move = (cell: Cell, step: -1 | 1) => {
    const from = cells.indexOf(cell);
    const rest = cells.filter((each) => each !== cell);
    rest.splice(Math.max(0, from + step), 0, cell);
    notebook.cells.value = rest;
  };
  const open = async (files: FileList | null) => {
    const file = files?.[0];
    if (!file) return;
    try {
      notebook.cells.value = fromIpynb(await file.text());
    } catch (error) {
      toast(`${safeText(file.name)} cannot be opened: ${reason(error)}`, { kind: 'error' });
    }
  };

  return (
    <div class="notebook">
      <div class="notebook-bar" role="toolbar" aria-label="Notebook">
        <Button isSmall icon="play" onClick={() => cells.filter(({ kind }) => kind === 'code').forEach((cell) => run(cell, true))}>Run all</Button>
        <Button isSmall icon="stop" isDisabled={!running.length} onClick={() => void interrupt()}>Interrupt</Button>
        <Button isSmall icon="refresh" onClick={() => void restart()}>Restart</Button>
        <Contexts notebook={notebook} round={round} />
        <span class="grow" />
        <Button isSmall kind="ghost" icon="list" onClick={() => showVariables(!showsVariables)}>{showsVariables ? 'Hide variables' : 'Variables'}</Button>
        <label class="button ghost small file-button">
          <Icon name="upload" />Open .ipynb
          <input type="file" accept=".ipynb" onChange={(event) => void open(event.currentTarget.files)} />
        </label>
        <Button isSmall kind="ghost" icon="download" onClick={() => saveAs(`${sandbox.id}.ipynb`, toIpynb(cells), 'application/x-ipynb+json')}>Save .ipynb</Button>
      </div>
      <div class={`notebook-body ${showsVariables ? 'with-variables' : ''}`}>
        <div class="cells">
          {cells.map((cell, index) => (
            <CellView
              key={cell.id}
              cell={cell}
              number={index + 1}
              takesFocus={isShown && cells.length === 1}
              onReady={(editor) => editors.current.set(cell.id, editor)}
              onRun={(stays) => run(cell, stays)}
              onRemove={() => remove(cell)}
              onMove={(step) => move(cell, step)}
              onArrowOut={(step) => focusCell(cells[index + step])}
            />
          ))}
          <div class="row">
            <Button isSmall kind="ghost" icon="plus" onClick={() => focusCell(insert(cells.length - 1))}>Code</Button>
            <Button isSmall kind="ghost" icon="plus" onClick={() => insert(cells.length - 1, newCell('', 'text'))}>Text</Button>
            <span class="quiet">Shift+Enter runs a cell, Ctrl+Enter runs it and stays, Esc leaves the editor</span>
          </div>
        </div>
        {showsVariables && <Variables notebook={notebook} round={round} isBusy={running.length > 0} />}
      </div>
    </div>
  );
}

function Contexts({ notebook, round }: { notebook: Notebook; round: number }) {
  const { sandbox } = useSession();
  const found = useLoaded((signal) => sandbox.listCodeContexts({ signal }), [sandbox, round]);
  const known: Pick<Context, 'id'>[] = found.value ?? [];
  const names = [...new Set(['main', notebook.context.value, ...known.map(({ id }) => id)])];
  const add = async () => {
    const name = await ask({ title: 'A second Python', body: 'Its variables are independent of the others.', field: 'Name', value: `python-${names.length + 1}`, action: 'Start' });
    if (!name) return;
    try {
      notebook.context.value = (await sandbox.createCodeContext(name)).id;
      found.reload();
    } catch (error) {
      toast(reason(error), { kind: 'error' });
    }
  };
  const remove = async () => {
    const name = notebook.context.value;
    if (!(await confirm({ title: `End ${safeText(name)}?`, body: 'Its variables are lost.', action: 'End it', isDangerous: true }))) return;
    try {
      await sandbox.removeCodeContext(name);
      notebook.context.value = 'main';
      found.reload();
    } catch (error) {
      toast(reason(error), { kind: 'error' });
    }
  };
  return (
    <span class="row contexts">
      <select aria-label="Kernel" value={notebook.context.value} onChange={(event) => (notebook.context.value = event.currentTarget.value)}>
        {names.map((name) => <option key={name} value={name}>{safeText(name)}</option>)}
      </select>
      <IconButton icon="plus" label="Start another kernel" onClick={() => void add()} />
      {notebook.context.value !== 'main' && <IconButton icon="trash" label="End this kernel" onClick={() => void remove()} />}
    </span>
  );
}

interface CellProps {
  cell: Cell;
  number: number;
  takesFocus: boolean;
  onReady: (editor: Editor) => void;
  onRun: (stays: boolean) => void;
  onRemove: () => void;
  onMove: (step: -1 | 1) => void;
  onArrowOut: (step: -1 | 1) => void;
}

function CellView({ cell, number, takesFocus, onReady, onRun, onRemove, onMove, onArrowOut }: CellProps) {
  const run = cell.run.value;
  const editor = useRef<Editor | undefined>(undefined);
  const [isEdited, setEdited] = useState(cell.kind === 'code' || !cell.source.value);
  const count = run?.execution?.executionCount;
  const isFirst = number === 1;
  const label = `${cell.kind === 'text' ? 'Text' : 'Code'} cell ${number}`;
  return (
    <section class={`cell ${run ? run.state : ''} ${run?.execution && !run.execution.ok ? 'failed' : ''}`} aria-label={label}>
      <div class="cell-side">
        {cell.kind === 'code' && (
          <IconButton icon={run && run.state !== 'done' ? 'clock' : 'play'} label="Run this cell (Shift+Enter)" isDisabled={run !== undefined && run.state !== 'done'} onClick={() => onRun(true)} />
        )}
        <span class="cell-count">{run?.state === 'running' ? '[*]' : run?.state === 'waiting' ? '[…]' : count ? `[${count}]` : ''}</span>
      </div>
      <div class="cell-main">
        {isEdited ? (
          <CodeEditor
            text={cell.source.value}
            label={label}
            name={cell.kind === 'text' ? 'cell.md' : 'cell.py'}
            hint={cell.kind === 'text' ? 'Markdown' : isFirst ? 'Python: 6 * 7, then Shift+Enter' : ''}
            takesFocus={takesFocus}
            onChange={(text) => (cell.source.value = text)}
            onRun={(stays) => (cell.kind === 'text' ? setEdited(false) : onRun(stays))}
            onEscape={() => (document.activeElement as HTMLElement | null)?.blur()}
            onArrowOut={onArrowOut}
            onReady={(ready) => {
              editor.current = ready;
              onReady(ready);
            }}
          />
        ) : (
          <TextCell source={cell.source.value} onEdit={() => setEdited(true)} />
        )}
        {run && <RunView run={run} goTo={(line) => editor.current?.goTo(line)} />}
      </div>
      <div class="cell-tools">
        <IconButton icon="trash" label="Remove this cell" onClick={onRemove} />
        {!isFirst && <button type="button" class="icon-button up" aria-label="Move this cell up" title="Move up" onClick={() => onMove(-1)}><Icon name="chevron" /></button>}
        <button type="button" class="icon-button down" aria-label="Move this cell down" title="Move down" onClick={() => onMove(1)}><Icon name="chevron" /></button>
      </div>
    </section>
  );
}

function TextCell({ source, onEdit }: { source: string; onEdit: () => void }) {
  const [html, setHtml] = useState<string>();
  useEffect(() => void htmlOfMarkdown(source).then(setHtml), [source]);
  return (
    <div class="text-cell">
      {html !== undefined && <Frame html={html} label="Text" />}
      <Button isSmall kind="ghost" icon="edit" onClick={onEdit}>Edit</Button>
    </div>
  );
}

export function RunView({ run, goTo }: { run: Run; goTo?: (line: number) => void }) {
  const { sandbox } = useSession();
  const { execution } = run;
  const seconds = execution ? execution.durationMs / 1000 : 0;
  const kept = execution?.kept;
  return (
    <div class="run" aria-live="polite" aria-busy={run.state !== 'done'}>
      {run.parts.map((part, index) =>
        part.kind === 'result'
          ? <ResultView key={index} forms={part.result} label={`Result ${index + 1}`} />
          : <Output key={index} text={part.text} isError={part.kind === 'stderr'} label={part.kind} />)}
      {execution?.error && <CellErrorView error={execution.error} goTo={goTo} />}
      {execution?.truncated && kept && (
        <LongOutput label="The whole output" read={(offset, length) => sandbox.readOutput(kept, offset, length)} />
      )}
      {run.failure && <ErrorBox error={new Error(run.failure)} />}
      <div class="run-foot">
        {run.state === 'waiting' && <Badge>waits</Badge>}
        {run.state === 'running' && <Badge kind="info"><span class="spinner" />runs</Badge>}
        {execution?.timedOut && <Badge kind="bad">timed out</Badge>}
        {execution?.interrupted && <Badge kind="warning">interrupted</Badge>}
        {execution?.oom && <Badge kind="bad">out of memory</Badge>}
        {execution?.died && <Badge kind="bad">{safeText(execution.died)}</Badge>}
        {execution?.restarted && <Badge kind="warning">a fresh Python: earlier variables are gone</Badge>}
        {execution?.woke && <Badge kind="asleep">the sandbox was woken for this</Badge>}
        {execution && seconds >= 0.05 && <span class="quiet">{brief(seconds)}</span>}
      </div>
    </div>
  );
}

/** The last line of the cell that a traceback names. */
export function lineOf(traceback: string): number | undefined {
  const plain = traceback.replace(/\u001b\[[0-9;]*m/g, '');
  const found = [...plain.matchAll(/(?:<cell[^>]*>|<ipython-input[^>]*>|Cell In\[\d+\]|File "<[^"]*>")[^\n]*?,? line (\d+)/g)];
  const last = found.at(-1);
  return last ? Number(last[1]) : undefined;
}

function CellErrorView({ error, goTo }: { error: { name: string; value: string; traceback: string }; goTo?: (line: number) => void }) {
  const line = lineOf(error.traceback);
  return (
    <div class="cell-error" role="alert">
      <div class="cell-error-head">
        <strong>{safeText(error.name)}</strong>
        {line !== undefined && goTo && <Button isSmall kind="ghost" icon="arrow" onClick={() => goTo(line)}>Go to line {line}</Button>}
      </div>
      {error.traceback ? <Output text={error.traceback} label="Traceback" /> : <Output text={error.value} label="Error" />}
    </div>
  );
}

function Variables({ notebook, round, isBusy }: { notebook: Notebook; round: number; isBusy: boolean }) {
  const { sandbox } = useSession();
  const context = notebook.context.value;
  const found = useLoaded(
    async (signal) => {
      // Asking for them would start a kernel, and wait for a cell that runs.
      if (isBusy) return undefined;
      const known = await sandbox.listCodeContexts({ signal });
      return known.some(({ id }) => id === context) ? sandbox.variables(context, { signal }) : [];
    },
    [sandbox, context, round, isBusy],
  );
  return (
    <aside class="variables" aria-label="Variables">
      <div class="row"><h2>Variables</h2><IconButton icon="refresh" label="Load again" onClick={found.reload} /></div>
      {isBusy && <p class="quiet">They are shown when no cell runs.</p>}
      {found.error !== undefined && <ErrorBox error={found.error} retry={found.reload} />}
      {found.isLoading && !found.value && <Loading what="Loading variables" />}
      {found.value?.length === 0 && <EmptyState title="No variables" icon="list">Run a cell such as <code>x = 1</code>.</EmptyState>}
      <ul>
        {found.value?.map((each) => (
          <li key={each.name}>
            <div><strong class="mono">{safeText(each.name)}</strong> <span class="quiet">{safeText(each.type)}{each.shape ? ` ${each.shape.join(' × ')}` : each.length !== null ? ` of ${each.length}` : ''}{each.bytes !== null && ` · ${size(each.bytes)}`}{each.asleep && ' · on disk'}</span></div>
            <code title={safeText(each.preview)}>{safeText(each.preview).slice(0, 200)}</code>
          </li>
        ))}
      </ul>
    </aside>
  );
}
