/** Commands in the kept shell of a box, one after the other. */
import { signal, type Signal } from '@preact/signals';
import { useEffect, useRef, useState } from 'preact/hooks';
import { Chunk, Result, type Sandbox } from 'hutch';
import { Badge, brief, Button, ErrorBox, reason, safeText } from '../ui/index.js';
import { useSession } from './context.js';
import { Output } from './output.js';

interface Command {
  id: number;
  command: string;
  text: string;
  result?: Result;
  failure?: string;
}

const logs = new Map<string, Signal<Command[]>>();
let last = 0;

function logOf({ id }: Sandbox): Signal<Command[]> {
  let found = logs.get(id);
  if (!found) logs.set(id, (found = signal([])));
  return found;
}

const MOST_TEXT = 500_000;

export function ShellPane() {
  const { sandbox, note } = useSession();
  const log = logOf(sandbox);
  const [command, setCommand] = useState('');
  const [cwd, setCwd] = useState('');
  const [running, setRunning] = useState<AbortController>();
  const [back, setBack] = useState(0); // how far the arrow keys went into what was run before
  const end = useRef<HTMLDivElement>(null);
  useEffect(() => end.current?.scrollIntoView({ block: 'nearest' }), [log.value]);

  const run = async (text: string) => {
    if (!text.trim() || running) return;
    const control = new AbortController();
    const entry: Command = { id: ++last, command: text, text: '' };
    const show = () => (log.value = log.value.map((each) => (each.id === entry.id ? { ...entry } : each)));
    let timer: ReturnType<typeof setTimeout> | undefined;
    log.value = [...log.value, entry];
    setRunning(control);
    setCommand('');
    setBack(0);
    try {
      for await (const item of sandbox.shell.stream(text, { keep: true, signal: control.signal })) {
        if (item instanceof Chunk) {
          entry.text = (entry.text + item.text).slice(-MOST_TEXT);
          timer ??= setTimeout(() => ((timer = undefined), show()), 60);
        } else if (item instanceof Result) {
          entry.result = item;
          if (item.cwd) setCwd(item.cwd);
        }
      }
      note({ do: 'shell', command: text });
    } catch (error) {
      entry.failure = control.signal.aborted ? 'stopped' : reason(error);
    } finally {
      clearTimeout(timer);
      show();
      setRunning(undefined);
    }
  };
  const recall = (step: number) => {
    const before = log.value.map((each) => each.command).reverse();
    const next = Math.max(0, Math.min(before.length, back + step));
    setBack(next);
    setCommand(next ? before[next - 1]! : '');
  };
  return (
    <div class="shell-pane">
      <div class="shell-log">
        {!log.value.length && (
          <p class="quiet">
            Type a command, for example{' '}
            {['uname -a', 'python3 --version', 'df -h /workspace'].map((each) => (
              <button key={each} type="button" class="suggestion" onClick={() => void run(each)}>{each}</button>
            ))}
          </p>
        )}
        {log.value.map((each) => (
          <div key={each.id} class="shell-command">
            <div class="shell-line"><span aria-hidden="true">$</span><pre>{safeText(each.command)}</pre></div>
            <Output text={each.text} label={`Output of ${safeText(each.command.slice(0, 40))}`} />
            {each.failure && (each.failure === 'stopped' ? <Badge kind="warning">stopped</Badge> : <ErrorBox error={new Error(each.failure)} />)}
            {each.result && (each.result.exitCode !== 0 || each.result.durationMs > 500) && (
              <span class="row">
                {each.result.exitCode !== 0 && <Badge kind="bad">exit {each.result.exitCode}</Badge>}
                {each.result.timedOut && <Badge kind="bad">timed out</Badge>}
                <span class="quiet">{brief(each.result.durationMs / 1000)}</span>
              </span>
            )}
          </div>
        ))}
        <div ref={end} />
      </div>
      <form
        class="shell-form"
        onSubmit={(event) => {
          event.preventDefault();
          void run(command);
        }}
      >
        <span class="mono quiet ellipsis">{safeText(cwd || sandbox.info.workdir)} $</span>
        <input
          class="mono" value={command} aria-label="Command" autocomplete="off" autocapitalize="off" spellcheck={false} autofocus
          placeholder="echo hello"
          onInput={(event) => setCommand(event.currentTarget.value)}
          onKeyDown={(event) => {
            if (event.key === 'ArrowUp') recall(1);
            else if (event.key === 'ArrowDown') recall(-1);
            else if (event.key === 'c' && event.ctrlKey && running && !getSelection()?.toString()) running.abort();
            else return;
            event.preventDefault();
          }}
        />
        {running
          ? <Button kind="danger" icon="stop" onClick={() => running.abort()}>Stop</Button>
          : <Button type="submit" kind="primary" isDisabled={!command.trim()}>Run</Button>}
      </form>
    </div>
  );
}
