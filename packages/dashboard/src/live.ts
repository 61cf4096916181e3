/**
 * The sessions of the server as they are now: one stream for the whole page. It rests while the tab
 * is hidden, since a browser has few connections to one server, for all its tabs.
 */
import { effect, signal } from '@preact/signals';
import type { BoxInfo } from 'hutch';
import { connection, identity, reconnects, server } from './server.js';

export const sessions = signal<ReadonlyMap<string, BoxInfo>>(new Map());
/** Whether `sessions` has all that live. */
export const isComplete = signal(false);
/** Why the list is not live now; undefined if it is. */
export const followError = signal<unknown>(undefined);
/** Those that ended while this page was open, newest first. */
export const ended = signal<readonly BoxInfo[]>([]);

const ENDED = new Set<string>(['destroyed', 'expired', 'crashed']);
const MAX_ENDED = 200;
const GATHER = 120; // milliseconds: changes are shown together
const FIRST_PAUSE = 1000;
const LONGEST_PAUSE = 15000;
const REST_AFTER = 20000; // milliseconds in which the tab is hidden

const isResting = signal(false);
let hidden: ReturnType<typeof setTimeout> | undefined;
document.addEventListener('visibilitychange', () => {
  clearTimeout(hidden);
  if (document.hidden) hidden = setTimeout(() => (isResting.value = true), REST_AFTER);
  else isResting.value = false;
});

export const isEnded = (session: BoxInfo): boolean => ENDED.has(session.status);

/** Put in what an operation just answered, before the stream says so. */
export function note(session: BoxInfo): void {
  const next = new Map(sessions.peek());
  if (isEnded(session)) next.delete(session.id);
  else next.set(session.id, session);
  sessions.value = next;
}

export function follow(): void {
  effect(() => {
    const who = identity.value;
    void reconnects.value;
    if (!who) {
      sessions.value = new Map();
      ended.value = [];
      isComplete.value = false;
      return;
    }
    if (isResting.value) return;
    const control = new AbortController();
    void run(control.signal);
    return () => control.abort();
  });
}

async function run(signal: AbortSignal): Promise<void> {
  let pause = FIRST_PAUSE;
  while (!signal.aborted) {
    try {
      if (await once(signal)) pause = FIRST_PAUSE;
    } catch (error) {
      if (signal.aborted) return;
      followError.value = error;
    }
    // With a connection that is lost, the end of the loss begins all of this again.
    if (signal.aborted || connection.peek() === 'lost') return;
    await new Promise((resolve) => setTimeout(resolve, pause));
    pause = Math.min(pause * 2, LONGEST_PAUSE);
  }
}

/** One stream, until it ends. Whether it had all sessions. */
async function once(signal: AbortSignal): Promise<boolean> {
  const known = new Map<string, BoxInfo>();
  const gone: BoxInfo[] = [];
  let isWhole = false;
  let timer: ReturnType<typeof setTimeout> | undefined;
  const show = () => {
    timer = undefined;
    if (signal.aborted) return;
    // Until all are there, what was shown before a reconnect stays.
    if (isWhole || !isComplete.peek()) sessions.value = new Map(known);
    if (gone.length) ended.value = [...gone.splice(0).reverse(), ...ended.peek()].slice(0, MAX_ENDED);
  };
  try {
    for await (const session of server().followSessions({ current: true, signal })) {
      if (session === null) {
        isWhole = true;
        show();
        isComplete.value = true;
        followError.value = undefined;
        continue;
      }
      if (isEnded(session)) {
        if (known.delete(session.id)) gone.push(session);
      } else {
        known.set(session.id, session);
      }
      timer ??= setTimeout(show, GATHER);
    }
  } finally {
    clearTimeout(timer);
    if (isWhole) show();
  }
  return isWhole;
}
