/** What happened in a session, as it happens. Each line opens with all that is kept of it. */
import { useEffect, useRef, useState } from 'preact/hooks';
import { Handle, type Schemas } from 'hutch';
import {
  Badge, brief, Button, CopyButton, EmptyState, ErrorBox, Guard, Icon, Loading, safeText, toast, reason, type IconName,
} from '../ui/index.js';
import { stateWords } from '../sessions.js';
import { hasEnded, sleeps, useSession } from './context.js';
import { saveAs } from './download.js';
import { LongOutput, Output } from './output.js';
import { safeTextOf, textOf } from './plain.js';
import { ResultView, type Forms } from './results.js';

export type Entry = Schemas['JournalEntry'];
type Body = Record<string, unknown>;

const GROUPS: { id: string; label: string; kinds: string[] }[] = [
  { id: 'commands', label: 'Commands', kinds: ['command', 'broken_off'] },
  { id: 'cells', label: 'Cells', kinds: ['cell'] },
  { id: 'programs', label: 'Programs', kinds: ['program'] },
  { id: 'files', label: 'Files', kinds: ['file'] },
  { id: 'security', label: 'Refused', kinds: ['denied', 'limit'] },
];
const ICONS: Record<string, IconName> = {
  start: 'play', command: 'terminal', cell: 'edit', broken_off: 'alert', program: 'box', file: 'file', hibernate: 'moon',
  wake: 'sun', not_woken: 'alert', not_saved: 'alert', extend: 'clock', adopt: 'refresh', reconnected: 'refresh',
  limit: 'alert', denied: 'shield', deadline: 'clock', end: 'stop', dropped: 'more',
};

const text = (value: unknown): string => (typeof value === 'string' ? value : '');
const oneLine = (value: unknown): string => {
  const [first = '', ...rest] = text(value).trim().split('\n');
  return safeText(first.slice(0, 200)) + (rest.length || first.length > 200 ? ' …' : '');
};

function title({ kind, body }: { kind: string; body: Body }): string {
  switch (kind) {
    case 'start': return `opened with ${safeText(text(body.image))}`;
    case 'command': return oneLine(body.command);
    case 'broken_off': return oneLine(body.command ?? body.code);
    case 'cell': return oneLine(body.code);
    case 'program': return Array.isArray(body.argv) ? oneLine(body.argv.map(textOf).join(' ')) : '';
    case 'file': return `${safeText(text(body.do))} ${safeText(text(body.path))}${body.to ? ` → ${safeText(text(body.to))}` : ''}`;
    case 'hibernate': return 'went to sleep';
    case 'wake': return 'woke up';
    case 'adopt': return 'a server that was started took it over';
    case 'reconnected': return `connected again after ${Number(body.seconds)} s: ${safeText(text(body.why))}`;
    case 'extend': return `deadline moved to ${body.expires_at ? new Date(text(body.expires_at) || Number(body.expires_at) * 1000).toLocaleString() : 'never'}`;
    case 'denied': return `${safeText(text(body.program))} was refused ${safeText(text(body.call))}${Number(body.count) > 1 ? `, ${Number(body.count)} times` : ''}`;
    case 'end': return `${safeText(stateWords(text(body.status)))}${body.why ? `: ${safeText(text(body.why))}` : ''}`;
    case 'dropped': return `${Number(body.entries)} earlier lines are not kept`;
    default: return safeText(text(body.why));
  }
}

const MOST = 5000;

export function JournalView() {
  const { sandbox, info } = useSession();
  const [entries, setEntries] = useState<Entry[]>();
  const [error, setError] = useState<unknown>();
  const [round, setRound] = useState(0);
  const [group, setGroup] = useState('');
  const [words, setWords] = useState('');
  const [most, setMost] = useState(200);
  const [isLive, setLive] = useState(false);
  const isOver = hasEnded(info);

  useEffect(() => {
    const control = new AbortController();
    const { signal } = control;
    const all: Entry[] = [];
    let timer: ReturnType<typeof setTimeout> | undefined;
    const add = (more: Entry[]) => {
      const last = all.at(-1)?.number ?? 0;
      all.push(...more.filter(({ number }) => number > last));
      if (all.length > MOST) all.splice(0, all.length - MOST);
      timer ??= setTimeout(() => {
        timer = undefined;
        if (!signal.aborted) setEntries([...all]);
      }, 60);
    };
    const run = async () => {
      for (;;) {
        const page = await sandbox.journal(all.at(-1)?.number ?? 0, { signal });
        add(page);
        if (page.length < 1000) break;
      }
      if (!all.length) setEntries([]);
      setError(undefined);
      if (isOver) return;
      setLive(true);
      for await (const entry of sandbox.followJournal(all.at(-1)?.number ?? 0, { signal })) add([entry]);
    };
    let pause = 1000;
    const keep = async () => {
      while (!signal.aborted) {
        const begun = Date.now();
        try {
          await run();
          if (isOver || !signal.aborted) return setLive(false); // the session has ended
        } catch (failure) {
          if (signal.aborted) return;
          setLive(false);
          setError(failure);
        }
        if (Date.now() - begun > 30_000) pause = 1000;
        await new Promise((resolve) => setTimeout(resolve, pause));
        pause = Math.min(15_000, pause * 2);
      }
    };
    void keep();
    return () => {
      control.abort();
      clearTimeout(timer);
    };
  }, [sandbox, round, isOver]);

  const kinds = GROUPS.find(({ id }) => id === group)?.kinds;
  const wanted = words.trim().toLowerCase();
  const shown = (entries ?? [])
    .filter((entry) => !kinds || kinds.includes(entry.kind))
    .filter((entry) => !wanted || JSON.stringify(entry.body).toLowerCase().includes(wanted))
    .reverse();
  const save = async (format: 'asciicast' | 'lines') => {
    try {
      if (format === 'lines') {
        return saveAs(`${sandbox.id}.jsonl`, (entries ?? []).map((entry) => JSON.stringify(entry)).join('\n'), 'application/jsonl');
      }
      const pieces: BlobPart[] = [];
      for await (const piece of await sandbox.exportJournal()) pieces.push(piece as BlobPart);
      saveAs(`${sandbox.id}.cast`, pieces);
    } catch (failure) {
      toast(reason(failure), { kind: 'error' });
    }
  };
  return (
    <div class="journal">
      <div class="row journal-bar">
        <div class="result-views" role="group" aria-label="What is shown">
          <button type="button" aria-pressed={!group} onClick={() => setGroup('')}>All</button>
          {GROUPS.map(({ id, label }) => <button key={id} type="button" aria-pressed={group === id} onClick={() => setGroup(id)}>{label}</button>)}
        </div>
        <div class="search"><Icon name="search" /><input type="search" value={words} placeholder="Search" aria-label="Search the journal" onInput={(event) => setWords(event.currentTarget.value)} /></div>
        {isLive && !isOver && <Badge kind="good">live</Badge>}
        <Button isSmall kind="ghost" icon="download" onClick={() => void save('asciicast')}>Recording</Button>
        <Button isSmall kind="ghost" icon="download" onClick={() => void save('lines')}>JSON</Button>
      </div>
      {error !== undefined && !isLive && <ErrorBox error={error} retry={() => setRound(round + 1)} />}
      {!entries && error === undefined && <Loading what="Loading the journal" retry={() => setRound(round + 1)} />}
      {entries && !shown.length && (
        <EmptyState title={entries.length ? 'Nothing matches' : 'Nothing happened yet'} icon="list">
          {entries.length ? 'Show all, or search for something else.' : 'Each command, cell, program and file is a line here.'}
        </EmptyState>
      )}
      <ol class="timeline">
        {shown.slice(0, most).map((entry) => (
          <Guard key={entry.number} instead={() => <li class="entry"><p class="quiet">Line {entry.number} cannot be shown.</p></li>}>
            <EntryView entry={entry} />
          </Guard>
        ))}
      </ol>
      {shown.length > most && <Button onClick={() => setMost(most + 500)}>{shown.length - most} earlier lines</Button>}
      {(entries?.length ?? 0) >= MOST && <p class="quiet">The last {MOST} lines are shown.</p>}
    </div>
  );
}

const OPENS = ['command', 'cell', 'program', 'broken_off', 'start', 'denied'];

function EntryView({ entry }: { entry: Entry }) {
  const { kind, body } = entry as { kind: string; body: Body };
  const [isOpen, setOpen] = useState(false);
  const opens = OPENS.includes(kind);
  const cellError = body.error as { name?: unknown } | null | undefined;
  const milliseconds = typeof body.duration_ms === 'number' ? body.duration_ms : undefined;
  const head = (
    <>
      <Icon name={ICONS[kind] ?? 'more'} size={14} />
      <span class="entry-kind">{safeText(kind.replaceAll('_', ' '))}</span>
      <span class={`entry-title ${opens && kind !== 'start' ? 'mono' : ''}`}>{title({ kind, body })}</span>
      <span class="entry-end">
        {kind === 'command' && body.exit_code !== 0 && <Badge kind="bad">exit {Number(body.exit_code)}</Badge>}
        {cellError && <Badge kind="bad">{safeText(text(cellError.name))}</Badge>}
        {body.timed_out === true && <Badge kind="warning">timed out</Badge>}
        {kind === 'broken_off' && <Badge kind="warning">broken off</Badge>}
        {body.terminal === true && <Badge>terminal</Badge>}
        {milliseconds !== undefined && <span class="quiet nowrap">{brief(milliseconds / 1000)}</span>}
        <time dateTime={entry.happenedAt.toISOString()} title={entry.happenedAt.toLocaleString()}>{entry.happenedAt.toLocaleTimeString()}</time>
      </span>
    </>
  );
  return (
    <li class={`entry kind-${/^[a-z_]+$/.test(kind) ? kind : 'other'}`}>
      {opens ? <button type="button" class="entry-head" aria-expanded={isOpen} onClick={() => setOpen(!isOpen)}>{head}</button> : <div class="entry-head">{head}</div>}
      {isOpen && <EntryBody kind={kind} body={body} />}
    </li>
  );
}

function EntryBody({ kind, body }: { kind: string; body: Body }) {
  const { sandbox, info } = useSession();
  const source = text(body.command) || text(body.code) || (Array.isArray(body.argv) ? body.argv.map(textOf).join(' ') : '');
  // Those of a box that sleeps or has ended cannot be read: asking would wake it.
  const canRead = !hasEnded(info) && !sleeps(info);
  const kept = text(body.kept);
  const outputs = [text(body.output), text(body.stdout)].filter(Boolean);
  return (
    <div class="entry-body">
      {source && <div class="entry-source"><pre>{safeText(source).replaceAll('\\x0a', '\n').replaceAll('\\x09', '\t')}</pre><CopyButton text={source} /></div>}
      {kind === 'start' && <dl class="fact-list">{Object.entries(body).filter(([, value]) => value !== null && value !== '').map(([name, value]) => <div key={name}><dt>{safeText(name.replaceAll('_', ' '))}</dt><dd>{safeTextOf(value)}</dd></div>)}</dl>}
      {outputs.map((each, index) => <Output key={index} text={each} label="Output" />)}
      {text(body.stderr) && <Output text={text(body.stderr)} isError label="Errors" />}
      {body.truncated === true && !kept && <p class="quiet">The beginning and the end are here: the whole output of this was not kept.</p>}
      {kept && canRead && <LongOutput label="Whole output" read={(offset, length) => sandbox.readOutput(kept, offset, length)} />}
      {kept && !canRead && <p class="quiet">The whole output can be read while the sandbox is awake.</p>}
      {kind === 'program' && text(body.id) && <ProgramOutput id={text(body.id)} canRead={canRead} />}
      {Array.isArray(body.results) && body.results.map((result, index) => <ResultView key={index} forms={formsOf(result)} label={`Result ${index + 1}`} />)}
      {Boolean(body.error) && <Output text={text((body.error as Body).traceback) || text((body.error as Body).value)} isError label="Traceback" />}
      {kind === 'denied' && <dl class="fact-list">{Object.entries(body).map(([name, value]) => <div key={name}><dt>{safeText(name.replaceAll('_', ' '))}</dt><dd>{safeTextOf(value)}</dd></div>)}</dl>}
    </div>
  );
}

function ProgramOutput({ id, canRead }: { id: string; canRead: boolean }) {
  const { sandbox } = useSession();
  const handle = useRef<Promise<Handle> | undefined>(undefined);
  if (!canRead) return <p class="quiet">What it printed can be read while the sandbox is awake.</p>;
  const read = async (offset: number, length: number) => {
    handle.current ??= sandbox.commands.connect(id);
    return (await handle.current).logs(offset, length);
  };
  return <LongOutput label="Output" read={read} />;
}

const MIME: Record<string, keyof Forms> = {
  'text/plain': 'text', 'text/html': 'html', 'text/markdown': 'markdown', 'image/svg+xml': 'svg', 'image/png': 'png',
  'image/jpeg': 'jpeg', 'application/pdf': 'pdf', 'text/latex': 'latex', 'application/json': 'json',
  'application/javascript': 'javascript', data: 'data', chart: 'chart',
};

/** A result as the journal has it: forms by MIME type. */
function formsOf(result: unknown): Forms {
  const forms = ((result as Body | null)?.forms ?? {}) as Body;
  const made: Body = { extra: {}, files: {} };
  for (const [mime, value] of Object.entries(forms)) {
    const name = MIME[mime] ?? (Object.values(MIME).includes(mime as keyof Forms) ? (mime as keyof Forms) : undefined);
    if (!name) (made.extra as Body)[mime] = value;
    else if (['json', 'data', 'chart'].includes(name) || typeof value === 'string') made[name] = value;
  }
  return made as unknown as Forms;
}

