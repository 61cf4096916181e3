/** Terminals of a session: each is a program that goes on when its tab is closed. */
import { useEffect, useRef, useState } from 'preact/hooks';
import type { Handle } from 'hutch';
import { isDark, Button, confirm, EmptyState, ErrorBox, Icon, Loading, reason, safeText, toast, useLoaded } from '../ui/index.js';
import { Attachment } from './attach.js';
import { useSession } from './context.js';
import type { Screen } from './xterm.js';

const LOGIN = 'if [ -x /bin/bash ]; then exec /bin/bash -l; fi; exec /bin/sh -l';
const ENVIRONMENT = { TERM: 'xterm-256color', COLORTERM: 'truecolor' };

interface Open {
  handle: Handle;
  name: string;
  exitCode?: number | null;
  hasEnded: boolean;
}

export function Terminals({ isShown }: { isShown: boolean }) {
  const { sandbox } = useSession();
  const [open, setOpen] = useState<Open[]>([]);
  const [current, setCurrent] = useState<string>();
  const [isStarting, setStarting] = useState(false);
  const [error, setError] = useState<unknown>();
  const counter = useRef(0);

  const nameOf = (handle: Handle): string => {
    const { argv } = handle.process;
    counter.current += 1;
    const program = argv[0] === '/bin/sh' && argv[2] === LOGIN ? 'shell' : safeText((argv.at(-1) ?? '').slice(0, 24));
    return `${counter.current} ${program}`;
  };
  const add = (handles: Handle[]) => {
    setOpen((old) => [
      ...old,
      ...handles.filter(({ id }) => !old.some((each) => each.handle.id === id))
        .map((handle) => ({ handle, name: nameOf(handle), hasEnded: false })),
    ]);
    if (handles.length) setCurrent(handles.at(-1)!.id);
  };
  const start = async () => {
    setStarting(true);
    setError(undefined);
    try {
      add([await sandbox.pty.open(LOGIN, { env: ENVIRONMENT })]);
    } catch (failure) {
      setError(failure);
    } finally {
      setStarting(false);
    }
  };
  // Those that run already, of this page before or of another client; without one, a first one.
  const found = useLoaded(async (signal) => {
    const running = (await sandbox.commands.list({ signal })).filter((each) => each.tty && each.exitCode === null);
    const handles = await Promise.all(running.slice(-8).map(({ id }) => sandbox.commands.connect(id, { signal })));
    if (signal.aborted) return 0;
    if (handles.length) add(handles);
    else if (!open.length) await start();
    return handles.length;
  }, [sandbox]);

  const close = async (one: Open) => {
    if (!one.hasEnded) {
      const isMeant = await confirm({
        title: 'End this terminal?',
        body: 'Its shell and everything that it still runs are ended.',
        action: 'End terminal',
        isDangerous: true,
      });
      if (!isMeant) return;
      try {
        await one.handle.kill();
      } catch (failure) {
        toast(reason(failure), { kind: 'error' });
      }
    }
    const rest = open.filter((each) => each !== one);
    setOpen(rest);
    setCurrent((id) => (id === one.handle.id ? rest.at(-1)?.handle.id : id));
  };

  const shown = open.find((each) => each.handle.id === current);
  return (
    <div class="terminals">
      <div class="terminal-bar" role="toolbar" aria-label="Terminals">
        {open.map((one) => (
          <span key={one.handle.id} class={`terminal-tab ${one === shown ? 'current' : ''}`}>
            <button type="button" aria-pressed={one === shown} onClick={() => setCurrent(one.handle.id)}>
              <Icon name="terminal" size={14} />{one.name}{one.hasEnded ? ' · ended' : ''}
            </button>
            <button type="button" aria-label={`Close terminal ${one.name}`} title="Close" onClick={() => void close(one)}>
              <Icon name="close" size={12} />
            </button>
          </span>
        ))}
        <Button isSmall kind="ghost" icon="plus" isBusy={isStarting} onClick={() => void start()}>New terminal</Button>
        <span class="terminal-help">Ctrl+Shift+C copies, Ctrl+Shift+V pastes, Ctrl+Shift+Esc leaves</span>
      </div>
      {error !== undefined && <ErrorBox error={error} retry={() => void start()} title="The terminal could not be opened" />}
      {found.error !== undefined && <ErrorBox error={found.error} retry={found.reload} />}
      {(found.isLoading || isStarting) && !open.length && <Loading what="Opening a terminal" />}
      {!found.isLoading && !isStarting && !open.length && error === undefined && (
        <EmptyState title="No terminal is open" icon="terminal" action={<Button kind="primary" onClick={() => void start()}>Open a terminal</Button>}>
          A terminal runs a login shell in the sandbox. It goes on when you leave this page.
        </EmptyState>
      )}
      {open.map((one) => (
        <TerminalView
          key={one.handle.id}
          one={one}
          isShown={isShown && one === shown}
          onEnd={(exitCode) =>
            setOpen((old) => old.map((each) => (each.handle.id === one.handle.id ? { ...each, exitCode, hasEnded: true } : each)))}
        />
      ))}
    </div>
  );
}

function TerminalView({ one, isShown, onEnd }: { one: Open; isShown: boolean; onEnd: (exitCode: number | null) => void }) {
  const parent = useRef<HTMLDivElement>(null);
  const screen = useRef<Screen | undefined>(undefined);

  useEffect(() => {
    let isGone = false;
    let attachment: Attachment | undefined;
    void (async () => {
      const [{ Screen }, before] = await Promise.all([
        import('./xterm.js'),
        // What was printed before this page came: no answers are typed to that.
        one.handle.logs(0, 1).then(({ total }) => total, () => 0),
      ]);
      if (isGone || !parent.current) return;
      let received = 0;
      const view = new Screen(parent.current, {
        isDark: isDark.value,
        onInput: (data) => attachment?.send(data),
        onSize: (columns, rows) => attachment?.resize(columns, rows),
      });
      screen.current = view;
      view.isReplaying = before > 0;
      attachment = new Attachment(one.handle, {
        onData: (data, done) => {
          received += data.length;
          const isLast = received >= before;
          view.write(data, () => {
            if (isLast) view.isReplaying = false;
            done();
          });
        },
        onLost: () => view.say('the connection was lost; the program goes on'),
        onReconnect: () => view.say(`connected again to the running program (pid ${one.handle.pid})`),
        onExit: (exitCode) => {
          view.isReplaying = true; // what is typed goes nowhere
          view.say(exitCode === null ? 'the program has ended' : `the program has ended with exit code ${exitCode}`);
          onEnd(exitCode);
        },
        onError: (message) => {
          view.say(safeText(message));
          onEnd(null);
        },
      });
      attachment.resize(view.size.columns, view.size.rows);
      view.focus();
    })();
    const stop = isDark.subscribe((value) => {
      if (screen.current) screen.current.isDark = value;
    });
    return () => {
      isGone = true;
      stop();
      attachment?.close();
      screen.current?.dispose();
      screen.current = undefined;
    };
  }, [one.handle]);

  useEffect(() => {
    if (!isShown) return;
    screen.current?.fit();
    screen.current?.focus();
  }, [isShown]);
  return <div class="terminal-view" ref={parent} hidden={!isShown} />;
}
