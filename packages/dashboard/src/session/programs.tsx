/** Programs in the background: what they print as they print it, their input, and signals. */
import { useEffect, useRef, useState } from 'preact/hooks';
import type { Handle, Schemas } from 'hutch';
import {
  ago, Badge, Button, EmptyState, ErrorBox, Field, Loading, reason, safeText, toast, useLoaded, useNow,
} from '../ui/index.js';
import { Attachment } from './attach.js';
import { useSession } from './context.js';
import { LongOutput, Output } from './output.js';

type Process = Schemas['Process'];
const SIGNALS: [number, string][] = [
  [2, 'SIGINT (2), like Ctrl-C'], [15, 'SIGTERM (15), please end'], [1, 'SIGHUP (1)'], [3, 'SIGQUIT (3)'],
  [10, 'SIGUSR1 (10)'], [12, 'SIGUSR2 (12)'], [19, 'SIGSTOP (19), pause'], [18, 'SIGCONT (18), go on'],
];
const MOST_TEXT = 500_000;

const commandOf = ({ argv }: Process): string => {
  const [shell, option, script] = argv;
  return safeText(shell === '/bin/sh' && option === '-c' && argv.length === 3 ? script! : argv.join(' '));
};

export function ProgramsView() {
  const { sandbox } = useSession();
  const [chosen, choose] = useState<string>();
  const [command, setCommand] = useState('');
  const [isStarting, setStarting] = useState(false);
  const now = useNow(10_000);
  const found = useLoaded((signal) => sandbox.commands.list({ signal }), [sandbox]);
  const programs = [...(found.value ?? [])].reverse();
  const shown = programs.find(({ id }) => id === chosen);

  const start = async (event: Event) => {
    event.preventDefault();
    if (!command.trim()) return;
    setStarting(true);
    try {
      const handle = await sandbox.commands.run(command, { background: true });
      setCommand('');
      choose(handle.id);
      found.reload();
    } catch (error) {
      toast(reason(error), { kind: 'error' });
    } finally {
      setStarting(false);
    }
  };
  return (
    <div class="programs">
      <form class="program-start" onSubmit={(event) => void start(event)}>
        <input
          class="mono" value={command} aria-label="Command to start in the background" spellcheck={false} autocomplete="off"
          placeholder="python3 -m http.server 8000"
          onInput={(event) => setCommand(event.currentTarget.value)}
        />
        <Button type="submit" kind="primary" icon="play" isBusy={isStarting} isDisabled={!command.trim()}>Start</Button>
        <Button icon="refresh" onClick={found.reload}>Load again</Button>
      </form>
      {found.error !== undefined && <ErrorBox error={found.error} retry={found.reload} />}
      {found.isLoading && !found.value && <Loading what="Loading the programs" retry={found.reload} />}
      {found.value && !programs.length && (
        <EmptyState title="No program was started" icon="play">
          Programs that are started here go on by themselves, also when you leave. What they print is kept.
        </EmptyState>
      )}
      <div class={`program-panes ${shown ? 'has-open' : ''}`}>
        {programs.length > 0 && (
          <ul class="program-list" aria-label="Programs">
            {programs.map((each) => (
              <li key={each.id}>
                <button type="button" aria-pressed={each.id === chosen} onClick={() => choose(each.id)}>
                  <code class="ellipsis">{commandOf(each)}</code>
                  <span class="row">
                    {each.exitCode === null ? <Badge kind="good">runs</Badge> : <Badge kind={each.exitCode === 0 ? 'neutral' : 'bad'}>exit {each.exitCode}</Badge>}
                    {each.tty && <Badge>terminal</Badge>}
                    <span class="quiet">pid {each.pid} · {ago(each.startedAt, now)}</span>
                  </span>
                </button>
              </li>
            ))}
          </ul>
        )}
        {shown && <ProgramView key={shown.id} program={shown} onEnd={found.reload} />}
      </div>
    </div>
  );
}

function ProgramView({ program, onEnd }: { program: Process; onEnd: () => void }) {
  const { sandbox } = useSession();
  const [handle, setHandle] = useState<Handle>();
  const [text, setText] = useState('');
  const [isCut, setCut] = useState(false);
  const [state, setState] = useState<'live' | 'lost' | 'ended'>('live');
  const [failure, setFailure] = useState('');
  const [input, setInput] = useState('');
  const [signalNumber, setSignal] = useState(15);
  const attachment = useRef<Attachment | undefined>(undefined);
  const end = useRef<HTMLDivElement>(null);

  useEffect(() => {
    let isGone = false;
    const decoder = new TextDecoder();
    let whole = '';
    let timer: ReturnType<typeof setTimeout> | undefined;
    const show = () => {
      timer = undefined;
      setText(whole);
    };
    void sandbox.commands.connect(program.id).then(
      (found) => {
        if (isGone) return;
        setHandle(found);
        attachment.current = new Attachment(found, {
          onData: (data, done) => {
            whole += decoder.decode(data, { stream: true });
            if (whole.length > MOST_TEXT * 1.5) {
              whole = whole.slice(-MOST_TEXT);
              setCut(true);
            }
            timer ??= setTimeout(show, 80);
            done();
          },
          onLost: () => setState('lost'),
          onReconnect: () => setState('live'),
          onExit: () => {
            setState('ended');
            if (program.exitCode === null) onEnd();
          },
          onError: (message) => {
            setState('ended');
            setFailure(message);
          },
        });
      },
      (error: unknown) => isGone || setFailure(reason(error)),
    );
    return () => {
      isGone = true;
      clearTimeout(timer);
      attachment.current?.close();
    };
  }, [program.id]);

  useEffect(() => {
    const pane = end.current?.previousElementSibling;
    // Follow the end, unless the user reads further up.
    if (pane && pane.scrollHeight - pane.scrollTop - pane.clientHeight < 200) pane.scrollTop = pane.scrollHeight;
  }, [text]);

  const perform = async (work: () => Promise<unknown>, what: string) => {
    try {
      await work();
      toast(what);
    } catch (error) {
      toast(reason(error), { kind: 'error' });
    }
  };
  const runs = program.exitCode === null && state !== 'ended';
  return (
    <section class="program" aria-label={`Program ${commandOf(program)}`}>
      <header class="row">
        {runs ? <Badge kind={state === 'lost' ? 'warning' : 'good'}>{state === 'lost' ? 'connecting again' : 'live'}</Badge> : <Badge>ended</Badge>}
        <code class="program-argv">{safeText(program.argv.join(' '))}</code>
      </header>
      {failure && <ErrorBox error={new Error(failure)} />}
      {isCut && handle && (
        <LongOutput label="All of its output" read={(offset, length) => handle.logs(offset, length)} />
      )}
      {text ? <Output text={text} label="Output" /> : <p class="quiet">Nothing was printed so far.</p>}
      <div ref={end} />
      {runs && handle && (
        <div class="program-controls">
          {!program.tty && (
            <form
              class="row"
              onSubmit={(event) => {
                event.preventDefault();
                attachment.current?.send(`${input}\n`);
                setInput('');
              }}
            >
              <input class="mono" value={input} aria-label="Line of input" placeholder="A line of input" autocomplete="off" spellcheck={false} onInput={(event) => setInput(event.currentTarget.value)} />
              <Button isSmall type="submit">Send</Button>
              <Button isSmall title="The program reads end-of-file" onClick={() => void perform(() => handle.closeStdin(), 'Its input is closed.')}>End of input</Button>
            </form>
          )}
          <div class="row">
            <Field label="Signal">
              <select value={signalNumber} onChange={(event) => setSignal(Number(event.currentTarget.value))}>
                {SIGNALS.map(([number, name]) => <option key={number} value={number}>{name}</option>)}
              </select>
            </Field>
            <Button isSmall onClick={() => void perform(() => handle.signal(signalNumber), `Signal ${signalNumber} was sent.`)}>Send signal</Button>
            <Button isSmall kind="danger" icon="stop" onClick={() => void perform(() => handle.kill(), 'The program and all that it started were ended.').then(onEnd)}>Kill</Button>
          </div>
        </div>
      )}
    </section>
  );
}
