/** Who did what: the server's audit log, as it is written. */
import type { Schemas } from 'hutch';
import { useMemo, useState } from 'preact/hooks';
import { server } from '../server.js';
import { at, ago, Badge, Dialog, EmptyState, ErrorBox, Icon, reason, safeText, Table, useNow, useWhileShown, type Column } from '../ui/index.js';

type AuditEntry = Schemas['AuditEntry'];

const EVENTS = ['', 'request', 'denied', 'auth_failed', 'server_started', 'server_stopped', 'dropped'];
const SPANS = [['1h', 'Last hour'], ['24h', 'Last day'], ['7d', 'Last week'], ['', 'All']] as const;
const MOST = 20000;
const GATHER = 200; // milliseconds
const AGAIN = 2000;

export function Audit() {
  const [event, setEvent] = useState('');
  const [since, setSince] = useState<string>('24h');
  const [text, setText] = useState('');
  const [entries, setEntries] = useState<AuditEntry[]>([]);
  const [error, setError] = useState<unknown>();
  const [open, setOpen] = useState<AuditEntry | undefined>();
  const now = useNow(5000);

  useWhileShown(async (signal) => {
    let waiting: AuditEntry[] = [];
    let timer: ReturnType<typeof setTimeout> | undefined;
    let after = 0;
    const show = () => {
      timer = undefined;
      const fresh = waiting.reverse();
      waiting = [];
      if (!signal.aborted) setEntries((old) => [...fresh, ...old].slice(0, MOST));
    };
    setEntries([]);
    while (!signal.aborted) {
      try {
        for await (const entry of server().followAudit({ after, since: after ? undefined : since, event, signal })) {
          after = entry.number;
          waiting.push(entry);
          timer ??= setTimeout(show, GATHER);
        }
        setError(undefined);
      } catch (failure) {
        if (signal.aborted) return;
        setError(failure);
      }
      await new Promise((resolve) => setTimeout(resolve, AGAIN));
    }
  }, [event, since]);

  const rows = useMemo(() => {
    const words = text.toLowerCase();
    if (!words) return entries;
    return entries.filter((entry) => `${entry.owner} ${entry.key} ${entry.operation} ${entry.target} ${entry.outcome} ${entry.peer}`.toLowerCase().includes(words));
  }, [entries, text]);
  const columns: Column<AuditEntry>[] = [
    { id: 'when', label: 'When', width: '150px', cell: (entry) => <time title={at(entry.happenedAt)} dateTime={entry.happenedAt.toISOString()}>{ago(entry.happenedAt, now)}</time> },
    { id: 'event', label: 'Event', width: '110px', isExtra: true, cell: (entry) => entry.event },
    { id: 'operation', label: 'Operation', width: 'minmax(120px, 1fr)', cell: (entry) => entry.operation || entry.event },
    { id: 'outcome', label: 'Outcome', width: '140px', cell: (entry) => <Badge kind={/^(ok|started|)$/.test(entry.outcome) ? 'neutral' : 'bad'}>{entry.outcome || '–'}</Badge> },
    { id: 'owner', label: 'Owner', width: 'minmax(80px, .7fr)', isExtra: true, cell: (entry) => safeText(entry.owner) || '–' },
    { id: 'key', label: 'Key', width: '100px', isExtra: true, cell: (entry) => <span class="mono">{entry.key || '–'}</span> },
    { id: 'target', label: 'Target', width: 'minmax(100px, 1fr)', isExtra: true, cell: (entry) => <span class="mono">{safeText(entry.target) || '–'}</span> },
    { id: 'peer', label: 'From', width: '120px', isExtra: true, cell: (entry) => entry.peer || '–' },
  ];
  return (
    <>
      <div class="page-head">
        <h1>Audit</h1>
        <span class="quiet">Who did what. Each line has the hash of the one before: <code>hutch audit --verify</code> tells if one was changed.</span>
      </div>
      <div class="row filters">
        <div class="search"><Icon name="search" /><input type="search" aria-label="Search the audit log" placeholder="Owner, key, operation, address" value={text} onInput={(change) => setText(change.currentTarget.value)} /></div>
        <select class="state" aria-label="Time" value={since} onChange={(change) => setSince(change.currentTarget.value)}>
          {SPANS.map(([id, words]) => <option key={id} value={id}>{words}</option>)}
        </select>
        <select class="state" aria-label="Event" value={event} onChange={(change) => setEvent(change.currentTarget.value)}>
          {EVENTS.map((each) => <option key={each} value={each}>{each || 'All events'}</option>)}
        </select>
      </div>
      {error ? <ErrorBox error={new Error(`The audit log is not live: ${reason(error)}. It is tried again by itself.`)} /> : null}
      <Table
        label="Audit log"
        columns={columns}
        rows={rows}
        keyOf={(entry) => String(entry.number)}
        onOpen={setOpen}
        empty={<EmptyState icon="clock" title="No line matches">Choose a longer time, or other words.</EmptyState>}
      />
      {open && (
        <Dialog title={`Line ${open.number}`} isWide onClose={() => setOpen(undefined)}>
          <table class="plain">
            <tbody>
              {Object.entries({
                When: at(open.happenedAt), Event: open.event, Operation: open.operation, Outcome: open.outcome, Owner: open.owner, Key: open.key,
                Target: open.target, From: open.peer, Request: open.request, ...open.detail, 'Hash of the line before': open.previous,
              }).filter(([, value]) => value).map(([name, value]) => <tr key={name}><th>{name}</th><td class="mono">{safeText(String(value))}</td></tr>)}
            </tbody>
          </table>
        </Dialog>
      )}
    </>
  );
}
