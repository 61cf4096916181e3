import { useCallback, useEffect, useRef, useState } from 'preact/hooks';
import { reconnects } from '../server.js';

export interface Loaded<T> {
  value: T | undefined;
  error: unknown;
  isLoading: boolean;
  reload: () => void;
}

/** Load something when `inputs` change, on `reload()`, and when the server came back. */
export function useLoaded<T>(load: (signal: AbortSignal) => Promise<T>, inputs: unknown[]): Loaded<T> {
  const [state, setState] = useState<{ value?: T; error?: unknown; isLoading: boolean }>({ isLoading: true });
  const [round, setRound] = useState(0);
  useEffect(() => {
    const control = new AbortController();
    setState((old) => ({ value: old.value, isLoading: true }));
    load(control.signal).then(
      (value) => !control.signal.aborted && setState({ value, isLoading: false }),
      (error: unknown) =>
        !control.signal.aborted && setState((old) => ({ value: old.value, error, isLoading: false })),
    );
    return () => control.abort();
  }, [...inputs, round, reconnects.value]);
  const reload = useCallback(() => setRound((old) => old + 1), []);
  return { value: state.value, error: state.error, isLoading: state.isLoading, reload };
}

/** Begin something that lasts while the component is shown; again when `inputs` change. */
export function useWhileShown(run: (signal: AbortSignal) => Promise<void> | void, inputs: unknown[]): void {
  useEffect(() => {
    const control = new AbortController();
    void run(control.signal);
    return () => control.abort();
  }, [...inputs, reconnects.value]);
}

/** The time, renewed every `every` milliseconds, for times in words. */
export function useNow(every = 1000): number {
  const [now, setNow] = useState(Date.now());
  useEffect(() => {
    const timer = setInterval(() => setNow(Date.now()), every);
    return () => clearInterval(timer);
  }, [every]);
  return now;
}

/** The newest of a value, for listeners that are registered once. */
export function useLatest<T>(value: T): { current: T } {
  const latest = useRef(value);
  latest.current = value;
  return latest;
}
