/** The server's own log, as it is written. */
import type { LogOptions, Schemas } from 'hutch';
import { useEffect, useMemo, useRef, useState } from 'preact/hooks';
import { server } from '../server.js';
import { Button, EmptyState, ErrorBox, Icon, reason, useShortcuts, useWhileShown } from '../ui/index.js';

type LogRecord = Schemas['LogRecord'];
type Level = NonNullable<LogOptions['level']>;

const LEVELS: Level[] = ['debug', 'info', 'warning', 'error'];
const MOST = 3000; // records
const GATHER = 150; // milliseconds: records are shown together
const AGAIN = 2000;

export function Log() {
  const [level, setLevel] = useState<Level>('info');
  const [text, setText] = useState('');
  const [records, setRecords] = useState<LogRecord[]>([]);
  const [error, setError] = useState<unknown>();
  const [isPaused, setPaused] = useState(false);
  const place = useRef<HTMLDivElement>(null);
  const search = useRef<HTMLInputElement>(null);
  const isAtEnd = useRef(true);
  useShortcuts([
    { keys: '/', does: 'Search the log', run: () => search.current?.focus() },
    { keys: 'p', does: 'Stop, or go on', run: () => setPaused(!isPaused) },
  ]);

  useWhileShown(async (signal) => {
    if (isPaused) return;
    let waiting: LogRecord[] = [];
    let timer: ReturnType<typeof setTimeout> | undefined;
    const show = () => {
      timer = undefined;
      const fresh = waiting;
      waiting = [];
      if (!signal.aborted) setRecords((old) => [...old, ...fresh].slice(-MOST));
    };
    setRecords([]);
    while (!signal.aborted) {
      try {
        const first = await server().log({ level, limit: 1000, signal });
        if (signal.aborted) return;
        setRecords(first);
        setError(undefined);
        for await (const record of server().followLog({ level, after: first.at(-1)?.number ?? 0, signal })) {
          waiting.push(record);
          timer ??= setTimeout(show, GATHER);
        }
      } catch (failure) {
        if (signal.aborted) return;
        setError(failure);
      }
      await new Promise((resolve) => setTimeout(resolve, AGAIN));
    }
  }, [level, isPaused]);

  const shown = useMemo(() => {
    const words = text.toLowerCase();
    return words ? records.filter((record) => `${record.logger} ${record.message}`.toLowerCase().includes(words)) : records;
  }, [records, text]);
  useEffect(() => {
    if (isAtEnd.current && place.current) place.current.scrollTop = place.current.scrollHeight;
  }, [shown]);
  return (
    <>
      <div class="page-head">
        <h1>Log</h1>
        <span class="quiet">What the server says about itself, since it was started.</span>
        <div class="end"><Button icon={isPaused ? 'play' : 'pause'} onClick={() => setPaused(!isPaused)}>{isPaused ? 'Go on' : 'Stop'}</Button></div>
      </div>
      <div class="row filters">
        <div class="search"><Icon name="search" /><input ref={search} type="search" aria-label="Search the log" placeholder="Search" value={text} onInput={(event) => setText(event.currentTarget.value)} /></div>
        <select class="state" aria-label="Level" value={level} onChange={(event) => setLevel(event.currentTarget.value as Level)}>
          {LEVELS.map((each) => <option key={each} value={each}>{each === 'error' ? 'error' : `${each} and above`}</option>)}
        </select>
      </div>
      {error ? <ErrorBox error={new Error(`The log is not live: ${reason(error)}. It is tried again by itself.`)} /> : null}
      <div
        class="log card"
        ref={place}
        tabIndex={0}
        role="log"
        aria-label="Log of the server"
        onScroll={(event) => {
          const { scrollTop, scrollHeight, clientHeight } = event.currentTarget;
          isAtEnd.current = scrollHeight - scrollTop - clientHeight < 40;
        }}
      >
        {shown.map((record) => (
          <div key={record.number} class={`log-line ${record.level}`}>
            <time dateTime={record.happenedAt.toISOString()} title={record.happenedAt.toLocaleString()}>{record.happenedAt.toLocaleTimeString()}</time>
            <span class="level">{record.level}</span>
            <span class="message">{record.message}{record.traceback && <details><summary>Traceback</summary><pre>{record.traceback}</pre></details>}</span>
            <span class="quiet logger">{record.logger}</span>
          </div>
        ))}
        {shown.length === 0 && !error && <EmptyState icon="list" title={text ? 'No line matches' : 'Nothing was said yet'}>{text ? 'Look for another word, or choose a lower level.' : 'Lines appear here as the server writes them.'}</EmptyState>}
      </div>
    </>
  );
}
