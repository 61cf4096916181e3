import './session.css';
import { useEffect, useRef, useState } from 'preact/hooks';
import { Conflict, NoSession, Sandbox, type BoxInfo } from 'hutch';
import { note as noteLive, sessions } from '../live.js';
import { go, link, route } from '../route.js';
import { connection, mayRun, options, reconnects } from '../server.js';
import {
  Badge, Button, confirm, CopyButton, Dialog, EmptyState, ErrorBox, Icon, Loading, reason, safeText, sentence, Tabs, toast, until,
  useLatest, useNow, useShortcuts, at, type IconName,
} from '../ui/index.js';
import { StateBadge } from '../sessions.js';
import type { Action } from './codegen.js';
import { hasEnded, SessionContext, sleeps, type Session } from './context.js';
import { FilesView } from './files.js';
import { InfoView } from './info.js';
import { JournalView } from './journal.js';
import { NotebookView } from './notebook.js';
import { PortsView } from './ports.js';
import { ProgramsView } from './programs.js';
import { Terminals } from './terminals.js';

const TABS = [
  { id: 'terminal', label: 'Terminal', icon: 'terminal', needsBox: true, runs: true },
  { id: 'notebook', label: 'Notebook', icon: 'edit', needsBox: true, runs: true },
  { id: 'files', label: 'Files', icon: 'folder', needsBox: true, runs: false },
  { id: 'programs', label: 'Programs', icon: 'play', needsBox: true, runs: false },
  { id: 'ports', label: 'Ports', icon: 'arrow', needsBox: true, runs: false },
  { id: 'journal', label: 'Journal', icon: 'list', needsBox: false, runs: false },
  { id: 'info', label: 'Info', icon: 'chart', needsBox: false, runs: false },
] as const satisfies { id: string; label: string; icon: IconName; needsBox: boolean; runs: boolean }[];
type TabId = (typeof TABS)[number]['id'];

const SETTLING = ['starting', 'saving', 'waking', 'destroying'];

export interface OneSession {
  sandbox: Sandbox | undefined;
  info: BoxInfo | undefined;
  error: unknown;
  reload: () => void;
  accept: (info: BoxInfo) => void;
}

/** A session by its id, and its record as it changes. */
export function useOneSession(id: string): OneSession {
  const [sandbox, setSandbox] = useState<Sandbox>();
  const [info, setInfo] = useState<BoxInfo>();
  const [error, setError] = useState<unknown>();
  const [round, setRound] = useState(0);
  useEffect(() => {
    const control = new AbortController();
    Sandbox.connect(id, { ...options(), ended: true, signal: control.signal }).then(
      (found) => {
        // After a reconnect it is the same session: what is open of it stays open.
        setSandbox((old) => (old?.id === found.id ? old : found));
        setInfo(found.info);
        setError(undefined);
      },
      (failure: unknown) => control.signal.aborted || setError(failure),
    );
    return () => control.abort();
  }, [id, round, reconnects.value]);
  const live = sessions.value.get(id);
  const wasLive = useRef(false);
  useEffect(() => {
    if (live) setInfo(live);
    else if (wasLive.current) setRound((old) => old + 1); // it has left the list: how did it end?
    wasLive.current = live !== undefined;
  }, [live]);
  useEffect(() => {
    if (!info || !SETTLING.includes(info.status)) return;
    const timer = setTimeout(() => setRound((old) => old + 1), 1000);
    return () => clearTimeout(timer);
  }, [info]);
  const current = info?.id === id || sandbox?.id === info?.id ? info : undefined;
  return {
    sandbox, info: current, error,
    reload: () => setRound((old) => old + 1),
    accept: (changed) => (setInfo(changed), noteLive(changed)),
  };
}

export function SessionPage({ id }: { id: string }) {
  const one = useOneSession(id);
  if (one.error !== undefined && !one.info) {
    if (one.error instanceof NoSession) {
      return (
        <EmptyState title="There is no such sandbox" icon="search" action={<a class="button primary" href={link('sandboxes')}>Go to the sandboxes</a>}>
          It never existed, belongs to someone else, or ended so long ago that it is forgotten.
        </EmptyState>
      );
    }
    return <div class="page"><ErrorBox error={one.error} retry={one.reload} title="This sandbox cannot be shown" /></div>;
  }
  if (!one.sandbox || !one.info) return <Loading what="Loading the sandbox" retry={one.reload} />;
  return <Known key={one.sandbox.id} sandbox={one.sandbox} info={one.info} accept={one.accept} reload={one.reload} />;
}

interface KnownProps {
  sandbox: Sandbox;
  info: BoxInfo;
  accept: (info: BoxInfo) => void;
  reload: () => void;
}

function Known({ sandbox, info, accept, reload }: KnownProps) {
  const rests = hasEnded(info) || sleeps(info);
  const asked = TABS.find((tab) => tab.id === route.value[2])?.id;
  // It stays when the sandbox falls asleep or wakes: the user must not end up in another part.
  const [first] = useState<TabId>(rests || !mayRun.value ? 'journal' : 'terminal');
  const tab = asked ?? first;
  // A part that was opened stays as it is while another is shown.
  const [opened, setOpened] = useState<ReadonlySet<TabId>>(new Set());
  useEffect(() => {
    if (!opened.has(tab)) setOpened(new Set([...opened, tab]));
  }, [tab]);
  const [isLetGo, letGo] = useState(false);
  const select = (next: TabId) => go('sandboxes', sandbox.id, next);
  useShortcuts(TABS.map(({ id, label }, index) => ({ keys: String(index + 1), does: label, run: () => select(id) })));
  useEffect(() => {
    const before = document.title;
    document.title = `${sandbox.id} · Hutch`;
    return () => {
      document.title = before;
    };
  }, [sandbox]);

  const session: Session = {
    sandbox, info,
    refresh: async () => accept(await sandbox.refresh()),
    note: (_action: Action) => {},
  };
  return (
    <SessionContext.Provider value={session}>
      <div class="page session-page">
        <Head info={info} accept={accept} reload={reload} sandbox={sandbox} letGo={letGo} />
        <Tabs label="Parts of this sandbox" tabs={[...TABS]} current={tab} onChange={select} />
        {TABS.map(({ id, label, needsBox, runs }) => (
          (id === tab || opened.has(id)) && (
            <div key={id} class={`session-part part-${id}`} role="tabpanel" aria-label={label} hidden={id !== tab}>
              {runs && !mayRun.value ? <LooksOnly /> : needsBox && isLetGo ? <Loading what="Putting it to sleep" /> : needsBox && rests ? <Resting info={info} sandbox={sandbox} accept={accept} /> : <Part id={id} isShown={id === tab} />}
            </div>
          )
        ))}
      </div>
    </SessionContext.Provider>
  );
}

function Part({ id, isShown }: { id: TabId; isShown: boolean }) {
  switch (id) {
    case 'terminal': return <Terminals isShown={isShown} />;
    case 'notebook': return <NotebookView isShown={isShown} />;
    case 'files': return <FilesView />;
    case 'programs': return isShown ? <ProgramsView /> : null;
    case 'ports': return isShown ? <PortsView /> : null;
    case 'journal': return isShown ? <JournalView /> : null;
    case 'info': return <InfoView isShown={isShown} />;
  }
}

/** In place of what a key with the scope "read" may not do. */
function LooksOnly() {
  return <EmptyState title="Your key may only look" icon="shield">To run something here, log in with a key of the scope “run”.</EmptyState>;
}

/** In place of what would need a box. */
function Resting({ info, sandbox, accept }: { info: BoxInfo; sandbox: Sandbox; accept: (info: BoxInfo) => void }) {
  const [isBusy, setBusy] = useState(false);
  if (hasEnded(info)) {
    return (
      <EmptyState title="This sandbox has ended" icon="stop" action={<a class="button primary" href={link('sandboxes', info.id, 'journal')}>Read its journal</a>}>
        {info.why ? `${sentence(safeText(info.why))}. ` : ''}What was in the sandbox is gone; what happened in it is in the journal.
      </EmptyState>
    );
  }
  const wake = async () => {
    setBusy(true);
    await act(async () => {
      await sandbox.wake();
      accept(await sandbox.refresh());
    });
    setBusy(false);
  };
  return (
    <EmptyState title="This sandbox is asleep" icon="moon" action={<Button kind="primary" icon="sun" isBusy={isBusy} onClick={() => void wake()}>Wake it</Button>}>
      Its files, shells and variables are kept on disk. Nothing on this page wakes it unless you ask.
    </EmptyState>
  );
}

async function act(work: () => Promise<unknown>): Promise<boolean> {
  try {
    await work();
    return true;
  } catch (error) {
    toast(reason(error), { kind: 'error' });
    return false;
  }
}

/** Sleep. The server notices a little later that this page has let go. */
async function asleep(sandbox: Sandbox) {
  for (let attempt = 0; ; attempt++) {
    await new Promise((resolve) => setTimeout(resolve, 400));
    try {
      return await sandbox.hibernate();
    } catch (error) {
      if (!(error instanceof Conflict) || attempt >= 4) throw error;
    }
  }
}

const TIMES: [number, string][] = [[900, '15 minutes'], [3600, '1 hour'], [14400, '4 hours'], [86400, '1 day']];

function Head({ info, accept, reload, sandbox, letGo }: KnownProps & { letGo: (isLetGo: boolean) => void }) {
  const now = useNow();
  const [extends_, setExtends] = useState(false);
  const [isBusy, setBusy] = useState(false);
  const latest = useLatest(info);
  const rests = hasEnded(info);
  const left = info.expiresAt ? (info.expiresAt.getTime() - now) / 1000 : undefined;
  const perform = async (work: () => Promise<unknown>, said: string) => {
    setBusy(true);
    if (await act(work)) toast(said);
    setBusy(false);
    await sandbox.refresh().then(accept, () => reload());
  };
  const sleep = async () => {
    // A terminal that is attached to is a call that runs: a box does not sleep under it.
    letGo(true);
    await perform(async () => {
      const { lost } = await asleep(sandbox);
      if (lost.length) toast(`Not saved: ${lost.map(([what]) => safeText(what)).join(', ')}`);
    }, 'The sandbox is asleep.');
    letGo(false);
  };
  const end = async () => {
    const isMeant = await confirm({
      title: 'End this sandbox?',
      body: <>Everything in <code>{safeText(sandbox.id)}</code> is removed{latest.current.workspaceId ? ', but not the files of its workspace' : ''}. Its journal stays.</>,
      action: 'End sandbox',
      isDangerous: true,
    });
    if (isMeant) await perform(() => sandbox.close(), 'The sandbox has ended.');
  };
  const extend = (seconds: number) => {
    setExtends(false);
    const before = info.expiresAt?.getTime();
    void perform(async () => {
      const changed = await sandbox.extend(seconds);
      accept(changed);
      if (changed.expiresAt?.getTime() === before) throw new Conflict('its deadline is later than that already');
    }, 'The deadline was moved.');
  };
  return (
    <header class="session-head">
      <a href={link('sandboxes')} class="quiet">Sandboxes</a>
      <Icon name="chevron" size={12} />
      <h1 class="mono">{safeText(info.id)}</h1>
      <CopyButton text={info.id} label="Copy the id" />
      <StateBadge state={info.status} />
      <span class="quiet">{safeText(info.image)}{info.labels.name ? ` · ${safeText(info.labels.name)}` : ''}</span>
      {connection.value === 'lost' && <Badge kind="warning">connecting again</Badge>}
      {!rests && info.expiresAt && (
        <span class={left !== undefined && left < 120 ? 'bad-text' : 'quiet'} title={at(info.expiresAt)}>ends {until(info.expiresAt, now)}</span>
      )}
      {rests && info.endedAt && <span class="quiet">{at(info.endedAt)}</span>}
      {!rests && mayRun.value && (
        <span class="end">
          <Button isSmall icon="clock" isDisabled={isBusy} onClick={() => setExtends(true)}>Extend</Button>
          {info.status === 'running' && <Button isSmall icon="moon" isDisabled={isBusy} onClick={() => void sleep()}>Sleep</Button>}
          {info.status === 'asleep' && <Button isSmall icon="sun" isDisabled={isBusy} onClick={() => void perform(() => sandbox.wake(), 'The sandbox is awake.')}>Wake</Button>}
          <Button isSmall kind="danger" icon="stop" isDisabled={isBusy} onClick={() => void end()}>End</Button>
        </span>
      )}
      {extends_ && (
        <Dialog title="Extend this sandbox" onClose={() => setExtends(false)}>
          <p class="dialog-text">{info.expiresAt ? `It ends ${until(info.expiresAt, now)}. ` : ''}New lifetime from now:</p>
          <div class="row">{TIMES.map(([seconds, name]) => <Button key={seconds} onClick={() => extend(seconds)}>{name}</Button>)}</div>
        </Dialog>
      )}
    </header>
  );
}

