/** What a session is, may use, and uses now. */
import { useEffect, useRef, useState } from 'preact/hooks';
import type { Schemas } from 'hutch';
import { ago, at, Badge, CopyButton, ErrorBox, Meter, safeText, size, until, useNow, duration, percent } from '../ui/index.js';
import { hasEnded, sleeps, useSession } from './context.js';

interface Sample {
  at: number;
  memory: number | null;
  cpus: number | null;
  pids: number | null;
}

const EVERY = 2000; // milliseconds
const MOST = 150; // samples: five minutes

export function InfoView({ isShown }: { isShown: boolean }) {
  const { info } = useSession();
  const now = useNow(5000);
  const rests = hasEnded(info) || sleeps(info);
  const facts: [string, preact.ComponentChildren][] = [
    ['Sandbox', <span class="mono">{safeText(info.id)} <CopyButton text={info.id} label="Copy the id" /></span>],
    ['Image', <>{safeText(info.image)}{info.digest && <span class="quiet mono"> {safeText(info.digest.slice(0, 19))}…</span>}</>],
    ['Owner', safeText(info.owner)],
    ['Opened', `${at(info.createdAt)} (${ago(info.createdAt, now)})`],
    ['Deadline', info.expiresAt ? `${at(info.expiresAt)} (${until(info.expiresAt, now)})` : 'none'],
    ['When idle', info.idle === null ? 'nothing' : `${info.onIdle === 'hibernate' ? 'sleeps' : 'ends'} after ${duration(info.idle)}`],
    ['Last used', ago(info.lastUsedAt, now)],
    ['Working folder', <code>{safeText(info.workdir)}</code>],
    ['User in the sandbox', safeText(info.user)],
    ['Workspace', info.workspaceId ? safeText(info.workspaceId) : 'none'],
    ['Labels', Object.keys(info.labels).length ? Object.entries(info.labels).map(([name, value]) => <Badge key={name}>{safeText(name)}={safeText(value)}</Badge>) : 'none'],
    ['Sandbox source', safeText(info.acquireSource) || '–'],
  ];
  if (info.endedAt) facts.splice(5, 0, ['Ended', `${at(info.endedAt)} (${ago(info.endedAt, now)})${info.why ? `: ${safeText(info.why)}` : ''}`]);
  return (
    <div class="info-view">
      {rests
        ? <p class="notice">{hasEnded(info) ? 'This sandbox has ended: it uses nothing.' : 'This sandbox is asleep: it uses no memory and no processor.'}</p>
        : isShown && <Live limits={info.limits} />}
      <div class="info-cards">
        <section class="card"><h2>Sandbox</h2><dl class="fact-list">{facts.map(([name, value]) => <div key={name}><dt>{name}</dt><dd>{value}</dd></div>)}</dl></section>
        <section class="card">
          <h2>Limits</h2>
          <dl class="fact-list">
            <div><dt>Memory</dt><dd>{size(info.limits.memory)}</dd></div>
            <div><dt>Processors</dt><dd>{info.limits.cpus}</dd></div>
            <div><dt>Processes</dt><dd>{info.limits.pids}</dd></div>
            <div><dt>Disk</dt><dd>{info.limits.disk === null ? 'half of the memory' : size(info.limits.disk)}</dd></div>
            <div><dt>Open files</dt><dd>{info.limits.openFiles.toLocaleString('en')}</dd></div>
            <div><dt>Output kept</dt><dd>{size(info.limits.output)}</dd></div>
          </dl>
        </section>
        <section class="card">
          <h2>Isolation</h2>
          <dl class="fact-list">
            <div><dt>Grade</dt><dd><Badge kind="info">{safeText(info.isolation)}</Badge></dd></div>
            <div><dt>Backend</dt><dd>{safeText(info.backend)}{info.runtime && ` with ${safeText(info.runtime)}`}</dd></div>
            <div><dt>Degraded isolation</dt><dd>{info.degraded.length ? <ul>{info.degraded.map((each) => <li key={each}>{safeText(each)}</li>)}</ul> : 'nothing'}</dd></div>
            {info.relaxed.length > 0 && <div><dt>Left out on request</dt><dd>{info.relaxed.map((each) => <Badge key={each} kind="warning">{safeText(each)}</Badge>)}</dd></div>}
            <div><dt>Network</dt><dd>{info.relaxed.includes('network') ? 'that of the engine' : 'none'}</dd></div>
          </dl>
        </section>
      </div>
    </div>
  );
}

function Live({ limits }: { limits: Schemas['Limits'] }) {
  const { sandbox } = useSession();
  const [samples, setSamples] = useState<Sample[]>([]);
  const [kills, setKills] = useState(0);
  const [error, setError] = useState<unknown>();
  const last = useRef<{ at: number; cpu: number | null }>(undefined);
  useEffect(() => {
    const control = new AbortController();
    let timer: ReturnType<typeof setTimeout>;
    const ask = async () => {
      try {
        if (!document.hidden) {
          const stats = await sandbox.stats({ signal: control.signal });
          const now = performance.now();
          const before = last.current;
          const cpus = before && before.cpu !== null && stats.cpuSeconds !== null
            ? Math.max(0, (stats.cpuSeconds - before.cpu) / ((now - before.at) / 1000))
            : null;
          last.current = { at: now, cpu: stats.cpuSeconds };
          setSamples((old) => [...old.slice(1 - MOST), { at: now, memory: stats.memory, cpus, pids: stats.pids }]);
          setKills(stats.oomKills ?? 0);
          setError(undefined);
        }
      } catch (failure) {
        if (control.signal.aborted) return;
        setError(failure);
      }
      if (!control.signal.aborted) timer = setTimeout(() => void ask(), EVERY);
    };
    void ask();
    return () => {
      control.abort();
      clearTimeout(timer);
    };
  }, [sandbox]);
  const latest = samples.at(-1);
  return (
    <>
      {error !== undefined && <ErrorBox error={error} />}
      <div class="live">
        <Gauge label="Memory" value={latest ? size(latest.memory) : '…'} of={size(limits.memory)} values={samples.map(({ memory }) => memory)} top={limits.memory} now={latest?.memory ?? null} />
        <Gauge label="Processor" value={latest ? (latest.cpus === null ? '…' : percent(latest.cpus)) : '…'} of={`${limits.cpus * 100} %`} values={samples.map(({ cpus }) => cpus)} top={limits.cpus} now={latest?.cpus ?? null} />
        <Gauge label="Processes" value={latest ? String(latest.pids ?? '–') : '…'} of={String(limits.pids)} values={samples.map(({ pids }) => pids)} top={limits.pids} now={latest?.pids ?? null} />
      </div>
      {kills > 0 && <p class="notice warning">Memory ran out {kills === 1 ? 'once' : `${kills} times`}: the kernel ended a process for it.</p>}
    </>
  );
}

function Gauge({ label, value, of, values, top, now }: { label: string; value: string; of: string; values: (number | null)[]; top: number; now: number | null }) {
  const known = values.filter((each): each is number => each !== null);
  const high = Math.max(1e-9, ...known) * 1.15;
  const scale = Math.min(Math.max(high, top * 0.02), Math.max(top, high));
  let path = '';
  values.forEach((each, index) => {
    if (each === null) return;
    path += `${path ? 'L' : 'M'}${(300 - (values.length - 1 - index) * 2).toFixed(1)} ${(58 - (each / scale) * 54).toFixed(1)}`;
  });
  return (
    <section class="card gauge" aria-label={label}>
      <h2>{label}</h2>
      <p><strong>{value}</strong> <span class="quiet">of {of}</span></p>
      <svg viewBox="0 0 300 60" preserveAspectRatio="none" role="img" aria-label={`${label} of the last five minutes`}>
        <path class="gauge-line" d={path} />
      </svg>
      <Meter value={now ?? 0} max={top} label={label} />
    </section>
  );
}
