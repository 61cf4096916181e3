/** What the server has and does now: sessions first. */
import type { BoxInfo, Schemas } from 'hutch';
import { useEffect, useMemo, useRef, useState } from 'preact/hooks';
import { Chart, type ChartProps } from './charts.js';
import { GRADES } from './grades.js';
import { ended, followError, isComplete, sessions } from './live.js';
import { go, link } from './route.js';
import { identity, isAdmin, mayRun, reconnects, server } from './server.js';
import { ActDialog, canDo, MakeButton, makeBox, StateBadge, stateWords, type Act } from './sessions.js';
import {
  ago, at, Badge, brief, Button, count, Dialog, EmptyState, ErrorBox, Icon, IconButton, Loading, Meter, safeText, size, Table,
  useLoaded, useNow, useShortcuts, type Column,
} from './ui/index.js';

type Stats = Schemas['Stats'];
interface Used extends Stats {
  /** Processors' worth of time, between the last two measurements. */
  cpus: number | null;
  takenAt: number;
}

const STATS_EVERY = 5000; // milliseconds
const AT_ONCE = 200; // sessions that one request asks for
const HISTORY_EVERY = 10000;
const CHARTS = 'hutch-charts';

export function Overview() {
  const all = sessions.value;
  const isReady = isComplete.value;
  if (!isReady && all.size === 0) {
    return (
      <div class="page">
        {followError.value ? <ErrorBox title="The sandboxes could not be read." error={followError.value} /> : <Loading what="Reading the sandboxes" />}
      </div>
    );
  }
  if (isReady && all.size === 0 && ended.value.length === 0) return <FirstScreen />;
  return <Sessions all={all} />;
}

/** Of an empty server: one click makes a box. */
function FirstScreen() {
  const own = identity.value!.owner;
  useShortcuts([{ keys: 'n', does: 'Make a sandbox', run: () => mayRun.value && void makeBox() }]);
  return (
    <div class="page">
      <div class="first">
        <Icon name="box" size={40} />
        <h1>{isAdmin.value ? 'This server has no sandboxes yet' : 'You have no sandboxes yet'}</h1>
        <p class="quiet">
          A sandbox is a small Linux machine of its own, for code that you do not want to run on yours: a shell, Python,
          files, programs. It starts in a moment, and nothing that runs in it reaches this server.
        </p>
        {mayRun.value ? <MakeButton isLarge /> : <p class="notice">Your key may only look. Ask for one with the scope “run” to make a sandbox.</p>}
        <div class="first-steps">
          <div class="card"><h2>Look around first</h2><p class="quiet">In the <a href={link('playground')}>playground</a> you choose the image and its limits, try it, and read the code for what you did.</p></div>
          <div class="card"><h2>From Python</h2><pre tabIndex={0}>{'from hutch import Sandbox\n\nwith Sandbox.create() as sandbox:\n    print(sandbox.shell.run("uname -a").stdout)'}</pre><p class="quiet">With <code>HUTCH_URL={location.origin}</code> and your key as <code>HUTCH_API_KEY</code> in its environment.</p></div>
          <div class="card"><h2>From a terminal</h2><pre tabIndex={0}>{'hutch create --ttl 1h'}</pre><p class="quiet">Sandboxes of {isAdmin.value ? 'all owners' : safeText(own)} appear here by themselves.</p></div>
        </div>
      </div>
    </div>
  );
}

/** What the boxes use, of the sessions that are asked for; renewed every few seconds. */
function useStats(ids: string[]): ReadonlyMap<string, Used> {
  const [used, setUsed] = useState<ReadonlyMap<string, Used>>(new Map());
  const wanted = useRef(ids);
  wanted.current = ids;
  const isAny = ids.length > 0;
  const round = reconnects.value;
  useEffect(() => {
    if (!isAny) return;
    const control = new AbortController();
    let timer: ReturnType<typeof setTimeout>;
    const ask = async () => {
      const asked = wanted.current;
      try {
        if (!document.hidden && asked.length) {
          const answer = await server().stats(asked, { signal: control.signal });
          const takenAt = performance.now() / 1000;
          setUsed((old) => {
            const next = new Map<string, Used>();
            for (const { session, stats } of answer) {
              const before = old.get(session);
              const seconds = before && takenAt - before.takenAt;
              const cpus = seconds && seconds > 0.5 && stats.cpuSeconds !== null && before.cpuSeconds !== null
                ? Math.max(0, (stats.cpuSeconds - before.cpuSeconds) / seconds)
                : (before?.cpus ?? null);
              next.set(session, { ...stats, cpus, takenAt });
            }
            return next;
          });
        }
      } catch {
        // What was measured before stays; the next round asks again.
      }
      if (!control.signal.aborted) timer = setTimeout(ask, STATS_EVERY);
    };
    timer = setTimeout(ask, 50);
    return () => {
      control.abort();
      clearTimeout(timer);
    };
  }, [isAny, round, ids.slice(0, 40).join()]);
  return used;
}

const COMPARE: Record<string, (a: BoxInfo, b: BoxInfo, used: ReadonlyMap<string, Used>) => number> = {
  id: (a, b) => a.id.localeCompare(b.id),
  status: (a, b) => a.status.localeCompare(b.status),
  owner: (a, b) => a.owner.localeCompare(b.owner),
  image: (a, b) => a.image.localeCompare(b.image),
  memory: (a, b, used) => (used.get(a.id)?.memory ?? -1) - (used.get(b.id)?.memory ?? -1) || a.limits.memory - b.limits.memory,
  cpu: (a, b, used) => (used.get(a.id)?.cpus ?? -1) - (used.get(b.id)?.cpus ?? -1) || a.limits.cpus - b.limits.cpus,
  age: (a, b) => +b.createdAt - +a.createdAt,
  deadline: (a, b) => (a.expiresAt ? +a.expiresAt : Infinity) - (b.expiresAt ? +b.expiresAt : Infinity),
};

/** `label:env=prod` and `label:env` look at labels, `owner:`, `image:` and `state:` at those; the rest anywhere. */
function matcher(text: string): (session: BoxInfo) => boolean {
  const tests = text.toLowerCase().split(/\s+/).filter(Boolean).map((word): ((session: BoxInfo) => boolean) => {
    const [, field, value] = /^(label|owner|image|state|id):(.+)$/.exec(word) ?? [];
    if (field === 'label') {
      const [name, wanted] = value!.split(/=(.*)/s);
      return (session) => Object.entries(session.labels).some(
        ([key, has]) => key.toLowerCase() === name && (wanted === undefined || has.toLowerCase() === wanted),
      );
    }
    if (field === 'state') return (session) => session.status.startsWith(value!) || stateWords(session.status).startsWith(value!);
    if (field) return (session) => String(session[field as 'id' | 'owner' | 'image']).toLowerCase().includes(value!);
    return (session) =>
      session.id.toLowerCase().includes(word) || session.owner.toLowerCase().includes(word)
      || session.image.toLowerCase().includes(word) || (session.workspaceId ?? '').toLowerCase().includes(word)
      || Object.entries(session.labels).some(([name, has]) => `${name}=${has}`.toLowerCase().includes(word));
  });
  return (session) => tests.every((test) => test(session));
}

const OLD = 9; // rows per screen that j and k do not need to measure

function Sessions({ all }: { all: ReadonlyMap<string, BoxInfo> }) {
  const [text, setText] = useState('');
  const [state, setState] = useState('live');
  const [sort, setSort] = useState({ by: 'age', isDescending: false });
  const [selected, setSelected] = useState<Set<string>>(new Set());
  const [cursor, setCursor] = useState(-1);
  const [act, setAct] = useState<Act | undefined>();
  const [inSight, setInSight] = useState<string[]>([]);
  const [areChartsShown, showCharts] = useState(localStorage.getItem(CHARTS) !== 'hidden');
  const search = useRef<HTMLInputElement>(null);
  const used = useStats(inSight);
  const now = useNow(2000);
  const past = ended.value;

  const rows = useMemo(() => {
    const source = state === 'ended' ? past : [...all.values()];
    const matches = matcher(text);
    const found = source.filter((session) => (state === 'live' || state === 'ended' || session.status === state) && matches(session));
    const compare = COMPARE[sort.by]!;
    const sign = sort.isDescending ? -1 : 1;
    return found.sort((a, b) => sign * compare(a, b, used) || (a.id < b.id ? 1 : -1));
    // What is measured changes all the time: only a sort by it has to follow.
  }, [all, past, text, state, sort, sort.by === 'memory' || sort.by === 'cpu' ? used : 0]);

  const chosen = useMemo(
    () => [...selected].map((id) => all.get(id)).filter((session): session is BoxInfo => session !== undefined),
    [selected, all],
  );
  const labels = useMemo(() => {
    const names = new Set<string>();
    for (const session of all.values()) {
      for (const [name, value] of Object.entries(session.labels)) names.add(`label:${name}=${value}`);
      if (names.size > 200) break;
    }
    return [...names].sort();
  }, [all]);

  const current = rows[cursor];
  const toggle = () => {
    if (!current) return;
    const next = new Set(selected);
    if (!next.delete(current.id)) next.add(current.id);
    setSelected(next);
  };
  useShortcuts([
    { keys: 'j', does: 'Next sandbox', run: () => setCursor(Math.min(rows.length - 1, cursor + 1)) },
    { keys: 'k', does: 'Previous sandbox', run: () => setCursor(Math.max(0, cursor - 1)) },
    { keys: 'J', does: `${OLD} sandboxes down`, run: () => setCursor(Math.min(rows.length - 1, cursor + OLD)) },
    { keys: 'K', does: `${OLD} sandboxes up`, run: () => setCursor(Math.max(0, cursor - OLD)) },
    { keys: 'Enter', does: 'Open the sandbox', run: () => current && go('sandboxes', current.id) },
    { keys: 'x', does: 'Select the sandbox', run: toggle },
    { keys: '/', does: 'Search', run: () => search.current?.focus() },
    { keys: 'n', does: 'Make a sandbox', run: () => mayRun.value && void makeBox() },
    { keys: 'Escape', does: 'Select nothing', run: () => (setSelected(new Set()), setCursor(-1)) },
  ]);

  const columns: Column<BoxInfo>[] = [
    {
      id: 'id', label: 'Sandbox', width: 'minmax(150px, 2.2fr)', isSortable: true,
      cell: (session) => (
        <span class="session-name">
          <a class="mono" href={link('sandboxes', session.id)}>{session.id}</a>
          {Object.entries(session.labels).slice(0, 3).map(([name, value]) => (
            <button
              key={name}
              type="button"
              class="chip"
              title={`Show those with the label ${safeText(`${name}=${value}`)}`}
              onClick={() => setText(`label:${name}=${value}`)}
            >
              {safeText(value ? `${name}=${value}` : name)}
            </button>
          ))}
        </span>
      ),
    },
    {
      id: 'status', label: 'State', width: '118px', isSortable: true,
      cell: (session) => <span title={session.why ? safeText(session.why) : undefined}><StateBadge state={session.status} /></span>,
    },
    { id: 'owner', label: 'Owner', width: 'minmax(80px, .8fr)', isSortable: true, isExtra: true, cell: (session) => safeText(session.owner) },
    { id: 'image', label: 'Image', width: 'minmax(90px, 1fr)', isSortable: true, isExtra: true, cell: (session) => <span title={safeText(session.image)}>{safeText(session.image)}</span> },
    {
      id: 'memory', label: 'Memory', width: '140px', isSortable: true, isNumber: true, isExtra: true,
      cell: (session) => <Part value={used.get(session.id)?.memory} words={size} of={size(session.limits.memory)} />,
    },
    {
      id: 'cpu', label: 'CPU', width: '100px', isSortable: true, isNumber: true, isExtra: true,
      cell: (session) => <Part value={used.get(session.id)?.cpus} words={(value) => value.toFixed(2)} of={String(session.limits.cpus)} />,
    },
    {
      id: 'age', label: 'Age', width: '72px', isSortable: true, isNumber: true,
      cell: (session) => <time title={at(session.createdAt)} dateTime={session.createdAt.toISOString()}>{brief((now - +session.createdAt) / 1000)}</time>,
    },
    {
      id: 'deadline', label: state === 'ended' ? 'Ended' : 'Deadline', width: '110px', isSortable: true, isNumber: true, isExtra: true,
      cell: (session) => <Deadline session={session} now={now} />,
    },
  ];
  const isFiltered = text !== '' || state !== 'live';
  return (
    <div class="page overview">
      <div class="page-head">
        <h1>Sandboxes</h1>
        <span class="quiet">{count(all.size, 'live sandbox')}{isFiltered ? `, ${rows.length.toLocaleString('en')} shown` : ''}</span>
        <div class="end">
          <IconButton
            icon="chart"
            label={areChartsShown ? 'Hide the charts' : 'Show the charts'}
            isPressed={areChartsShown}
            onClick={() => {
              localStorage.setItem(CHARTS, areChartsShown ? 'hidden' : 'shown');
              showCharts(!areChartsShown);
            }}
          />
          {mayRun.value && <MakeButton />}
        </div>
      </div>
      <Summary all={all} />
      {areChartsShown && <Charts />}
      <div class="row filters">
        <div class="search">
          <Icon name="search" />
          <input
            ref={search}
            type="search"
            aria-label="Search sandboxes"
            placeholder="Search, or label:env=prod"
            list="labels"
            value={text}
            onInput={(event) => (setText(event.currentTarget.value), setCursor(-1))}
            onKeyDown={(event) => event.key === 'Escape' && (setText(''), search.current?.blur())}
          />
          <datalist id="labels">{labels.map((name) => <option key={name} value={name} />)}</datalist>
        </div>
        <select class="state" aria-label="State" value={state} onChange={(event) => setState(event.currentTarget.value)}>
          <option value="live">All live</option>
          <option value="running">Running</option>
          <option value="asleep">Asleep</option>
          <option value="starting">Starting</option>
          <option value="ended">Ended just now ({past.length})</option>
        </select>
        {chosen.length > 0 && (
          <div class="row bulk" role="toolbar" aria-label="With those selected">
            <b>{chosen.length.toLocaleString('en')} selected</b>
            {mayRun.value && (['extend', 'sleep', 'wake', 'end'] as const).map((each) => (
              <Button key={each} isSmall kind={each === 'end' ? 'danger' : 'plain'} isDisabled={!chosen.some((session) => canDo(each, session))} onClick={() => setAct(each)}>
                {{ end: 'End', extend: 'Extend', sleep: 'Sleep', wake: 'Wake' }[each]}
              </Button>
            ))}
            <Button isSmall kind="ghost" onClick={() => setSelected(new Set())}>Clear</Button>
          </div>
        )}
      </div>
      <Table
        label="Sandboxes"
        columns={columns}
        rows={rows}
        keyOf={(session) => session.id}
        onOpen={(session) => go('sandboxes', session.id)}
        sort={sort}
        onSort={(by) => setSort((old) => ({ by, isDescending: old.by === by && !old.isDescending }))}
        selected={state === 'ended' ? undefined : selected}
        onSelect={setSelected}
        cursor={cursor}
        onRows={(shown) => setInSight(shown.filter((session) => session.status === 'running').slice(0, AT_ONCE).map((session) => session.id))}
        empty={
          isFiltered ? (
            <EmptyState icon="search" title="No sandbox matches" action={<Button onClick={() => (setText(''), setState('live'))}>Show all live sandboxes</Button>}>
              Words are looked for in ids, owners, images, workspaces and labels. <code>label:env=prod</code> looks for a label.
            </EmptyState>
          ) : (
            <EmptyState title="No sandbox lives now" action={mayRun.value ? <MakeButton isLarge /> : undefined}>{count(past.length, 'sandbox')} ended since you opened this page.</EmptyState>
          )
        }
      />
      {act && <ActDialog act={act} sessions={chosen} onClose={() => setAct(undefined)} onDone={() => act === 'end' && setSelected(new Set())} />}
    </div>
  );
}

function Part({ value, words, of }: { value: number | null | undefined; words: (value: number) => string; of: string }) {
  return <><span>{value == null ? '–' : words(value)}</span> <span class="quiet">/ {of}</span></>;
}

function Deadline({ session, now }: { session: BoxInfo; now: number }) {
  if (session.endedAt) return <span title={at(session.endedAt)}>{brief((now - +session.endedAt) / 1000)} ago</span>;
  const idle = session.idle ? `; ${session.onIdle === 'hibernate' ? 'sleeps' : 'ends'} after ${brief(session.idle)} without use` : '';
  if (!session.expiresAt) return <span class="quiet" title={`No deadline${idle}`}>{session.idle ? `idle ${brief(session.idle)}` : 'none'}</span>;
  const left = (+session.expiresAt - now) / 1000;
  return <time class={left < 120 ? 'warning-text' : ''} title={at(session.expiresAt) + idle} dateTime={session.expiresAt.toISOString()}>{left <= 0 ? 'now' : `in ${brief(left)}`}</time>;
}

/** Cards: states, isolation, capacity and quota, pool, failures. */
function Summary({ all }: { all: ReadonlyMap<string, BoxInfo> }) {
  const [isFailuresShown, showFailures] = useState(false);
  const [tick, setTick] = useState(0);
  useEffect(() => {
    const timer = setInterval(() => document.hidden || setTick((old) => old + 1), HISTORY_EVERY);
    return () => clearInterval(timer);
  }, []);
  const info = useLoaded((signal) => server().info({ signal }), []);
  const pool = useLoaded((signal) => server().pool({ signal }), [tick]);
  const quota = useLoaded((signal) => server().quota(identity.value!.owner, { signal }), [tick]);
  const failures = useLoaded((signal) => server().failures({ signal }), [tick]);
  const states = useMemo(() => {
    const counts = new Map<string, number>();
    let memory = 0;
    let cpus = 0;
    for (const session of all.values()) {
      counts.set(session.status, (counts.get(session.status) ?? 0) + 1);
      if (session.status === 'asleep') continue;
      memory += session.limits.memory;
      cpus += session.limits.cpus;
    }
    return { counts: [...counts].sort((a, b) => b[1] - a[1]), memory, cpus };
  }, [all]);
  const use = quota.value;
  const isLimited = use !== undefined && Object.values(use.quota).some((limit) => limit !== null);
  const most = Number((info.value?.limits['sessions'] as { max?: number } | undefined)?.max ?? 0);
  return (
    <div class="cards summary">
      <section class="card" aria-label="Live, by state">
        <h2>Live</h2>
        <div class="big">{all.size.toLocaleString('en')}{most > 0 && <small class="quiet"> of {most.toLocaleString('en')}</small>}</div>
        <div class="row tight">{states.counts.map(([state, many]) => <span key={state} class="nowrap"><StateBadge state={state} /> {many.toLocaleString('en')}</span>)}</div>
      </section>
      <section class="card" aria-label="Isolation">
        <h2>Isolation</h2>
        <div class="big">{info.value ? <Badge kind={GRADES[info.value.isolation]?.kind ?? 'neutral'}>{GRADES[info.value.isolation]?.words ?? info.value.isolation}</Badge> : '–'}</div>
        <p class="quiet">{info.value ? `${info.value.backend}, Hutch ${info.value.version}` : ''}{isAdmin.value && info.value && <> · <a href={link('admin', 'report')}>report</a></>}</p>
      </section>
      <section class="card" aria-label="Capacity">
        <h2>{isLimited ? 'Your quota' : 'Reserved'}</h2>
        {isAdmin.value && !isLimited ? (
          <dl class="uses" title="What all sandboxes that are awake may use">
            <Use label="Memory" value={states.memory} max={null} words={size} />
            <Use label="CPUs" value={states.cpus} max={null} words={number} />
            {use && use.disk !== null && <Use label="Your disk" value={use.disk} max={null} words={size} />}
          </dl>
        ) : use ? (
          <dl class="uses">
            <Use label="Sandboxes" value={use.sessions} max={use.quota.sessions} words={number} />
            <Use label="Memory" value={use.memory} max={use.quota.memory} words={size} />
            <Use label="CPUs" value={use.cpus} max={use.quota.cpus} words={number} />
            {use.disk !== null && <Use label="Disk" value={use.disk} max={use.quota.disk} words={size} />}
          </dl>
        ) : '–'}
      </section>
      <section class="card" aria-label="Pool">
        <h2>Pool</h2>
        {pool.value?.length ? (
          <ul class="pool">
            {pool.value.slice(0, 3).map((each) => (
              <li key={each.image} title={each.error ? safeText(each.error) : undefined}>
                <span class="ellipsis">{safeText(each.image)}</span>
                <span class={each.failures ? 'bad-text' : ''}>{each.ready} of {each.target} ready{each.starting ? `, ${each.starting} starting` : ''}{each.failures ? `, failed ${count(each.failures, 'time')}` : ''}</span>
              </li>
            ))}
          </ul>
        ) : <p class="quiet">{pool.value ? 'No sandboxes are kept ready: each is started when it is asked for.' : '–'}</p>}
      </section>
      <section class="card" aria-label="Failures lately">
        <h2>Failed lately</h2>
        <div class={`big ${failures.value?.length ? 'bad-text' : ''}`}>{failures.value?.length ?? '–'}</div>
        {failures.value?.[0] ? (
          <button type="button" class="link ellipsis" onClick={() => showFailures(true)}>{ago(failures.value[0].happenedAt)}: {safeText(failures.value[0].why)}</button>
        ) : <p class="quiet">{failures.value ? 'Nothing since the server was started.' : ''}</p>}
      </section>
      {isFailuresShown && (
        <Dialog title="What failed lately" isWide onClose={() => showFailures(false)}>
          <div class="scroll-x">
            <table class="plain">
              <thead><tr><th>When</th><th>What</th><th>Sandbox</th><th>Owner</th><th>Image</th><th>Why</th></tr></thead>
              <tbody>
                {failures.value?.map((each) => (
                  <tr key={`${each.happenedAt.getTime()} ${each.session} ${each.code}`}>
                    <td class="nowrap" title={at(each.happenedAt)}>{ago(each.happenedAt)}</td>
                    <td>{{ open: 'could not be opened', wake: 'could not wake', save: 'could not be saved', lost: 'was lost', limit: 'was refused' }[each.kind] ?? each.kind}</td>
                    <td class="mono">{each.session ? <a href={link('sandboxes', each.session)} onClick={() => showFailures(false)}>{each.session}</a> : '–'}</td>
                    <td>{safeText(each.owner)}</td>
                    <td>{safeText(each.image)}</td>
                    <td>{safeText(each.why)}{each.code && <> <code class="quiet">{each.code}</code></>}</td>
                  </tr>
                ))}
              </tbody>
            </table>
          </div>
        </Dialog>
      )}
    </div>
  );
}

function Use({ label, value, max, words }: { label: string; value: number; max: number | null; words: (value: number) => string }) {
  return (
    <div>
      <dt>{label}</dt>
      <dd>{words(value)}{max !== null && <span class="quiet"> of {words(max)}</span>}</dd>
      {max !== null && <Meter value={value} max={max} label={label} />}
    </div>
  );
}

const milliseconds = (value: number): string => (value < 1 ? `${Math.round(value * 1000)} ms` : `${Math.round(value * 10) / 10} s`);
const number = (value: number): string => (Number.isInteger(value) ? value.toLocaleString('en') : value.toFixed(1));

function Charts() {
  const [period, setPeriod] = useState<'hour' | 'day'>('hour');
  const [samples, setSamples] = useState<Schemas['Sample'][]>([]);
  const [error, setError] = useState<unknown>();
  const [again, setAgain] = useState(0);
  const round = reconnects.value;
  useEffect(() => {
    const control = new AbortController();
    const load = () => {
      if (document.hidden) return;
      server().history({ period, signal: control.signal }).then(
        (found) => (setSamples(found), setError(undefined)),
        (failure: unknown) => !control.signal.aborted && setError(failure),
      );
    };
    load();
    const timer = setInterval(load, HISTORY_EVERY);
    return () => {
      control.abort();
      clearInterval(timer);
    };
  }, [period, round, again]);
  const times = useMemo(() => samples.map((sample) => sample.takenAt.getTime() / 1000), [samples]);
  const charts = useMemo(() => {
    const values = (of: (sample: Schemas['Sample']) => number | null) => samples.map(of);
    const live = (sample: Schemas['Sample']) => Object.values(sample.states).reduce((sum, many) => sum + many, 0);
    return [
      { title: 'Sandboxes', of: 'counts', isFilled: true, format: number, lines: [{ label: 'live', color: 1, values: values(live) }, { label: 'opened', color: 2, values: values((each) => each.opened) }] },
      { title: 'Commands and cells', of: 'counts', format: number, lines: [{ label: 'commands', color: 1, values: values((each) => each.commands) }, { label: 'cells', color: 2, values: values((each) => each.cells) }, { label: 'errors', color: 3, values: values((each) => each.errors) }] },
      { title: 'Time to open', of: 'seconds', isSparse: true, format: milliseconds, lines: [{ label: 'half within', color: 1, values: values((each) => each.openP50) }, { label: '95 % within', color: 3, values: values((each) => each.openP95) }] },
      { title: 'Time of commands and cells', of: 'seconds', isSparse: true, format: milliseconds, lines: [{ label: 'half within', color: 1, values: values((each) => each.runP50) }, { label: '95 % within', color: 3, values: values((each) => each.runP95) }] },
      { title: 'Memory of all sandboxes', of: 'bytes', isFilled: true, format: size, lines: [{ label: 'memory', color: 4, values: values((each) => each.memory) }] },
    ] satisfies Omit<ChartProps, 'times'>[];
  }, [samples]);
  if (error && !samples.length) return <ErrorBox title="The charts have no data." error={error} retry={() => setAgain(again + 1)} />;
  return (
    <section class="charts" aria-label="Charts">
      <div class="periods" role="group" aria-label="Period">
        {(['hour', 'day'] as const).map((each) => (
          <button key={each} type="button" class="button ghost small" aria-pressed={period === each} onClick={() => setPeriod(each)}>Last {each}</button>
        ))}
        {samples.length < 2 && <span class="quiet">The server takes a sample every {period === 'hour' ? 'ten seconds' : 'five minutes'}: lines appear soon.</span>}
      </div>
      <div class="chart-grid">{charts.map((chart) => <Chart key={chart.title} times={times} {...chart} />)}</div>
    </section>
  );
}
