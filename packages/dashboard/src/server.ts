/** The server that this page is from: who asks, and whether it can be reached. */
import { computed, effect, signal } from '@preact/signals';
import { Server, ServerUnavailable, Unauthorized, type Schemas, type ServerOptions } from 'hutch';

export interface Identity {
  owner: string | null;
  scope: 'run' | 'admin' | (string & {});
  label?: string | null;
  expiresAt?: Date | null;
}

const KEPT = 'hutch-key';

/** The key of this tab. It is in no address, no cookie, and gone when the tab is closed. */
export const key = signal<string | undefined>(sessionStorage.getItem(KEPT) ?? undefined);
export const identity = signal<Identity | undefined>(undefined);
export const isAdmin = computed(() => identity.value?.scope === 'admin');
/** Why the login page is shown, in a sentence; nothing before the first login. */
export const goodbye = signal('');
/** `lost` while the server does not answer. The page tries again by itself. */
export const connection = signal<'connected' | 'lost'>('connected');
/** When the next attempt is made while the connection is lost, in milliseconds since 1970. */
export const nextAttempt = signal(0);
/** Counts up each time the server came back: what reads it in an effect loads itself again. */
export const reconnects = signal(0);

const FIRST_PAUSE = 1000;
const LONGEST_PAUSE = 15000;

/** What every call of the SDK is made with. */
export function options(apiKey: string | undefined = key.value): ServerOptions {
  return { url: location.origin, apiKey, fetch: observedFetch };
}

export function server(): Server {
  return new Server(options());
}

/** Notices a server that is gone and a key that opens nothing any more, whatever asked. */
async function observedFetch(input: RequestInfo | URL, init?: RequestInit): Promise<Response> {
  let response: Response;
  try {
    response = await fetch(input, init);
  } catch (error) {
    if (!init?.signal?.aborted) lose();
    throw error;
  }
  if (response.status === 401) void checkKey(new Headers(init?.headers).get('Authorization'));
  return response;
}

/** One refusal may be about the operation: only if the key opens nothing, it is the key. */
async function checkKey(header: string | null): Promise<void> {
  const asked = key.value;
  if (asked === undefined || header !== `Bearer ${asked}`) return;
  try {
    await new Server({ url: location.origin, apiKey: asked }).info();
  } catch (error) {
    if (error instanceof Unauthorized && key.value === asked) {
      signOut('Your key was revoked or has expired. Log in with another one.');
    }
  }
}

/** Ask who a key belongs to, and keep it for this tab. Throws what the SDK throws. */
export async function signIn(apiKey: string): Promise<void> {
  const who = await whoIs(apiKey);
  key.value = apiKey;
  identity.value = who;
  goodbye.value = '';
  sessionStorage.setItem(KEPT, apiKey);
}

export function signOut(why = ''): void {
  key.value = undefined;
  identity.value = undefined;
  goodbye.value = why;
  sessionStorage.removeItem(KEPT);
}

async function whoIs(apiKey: string): Promise<Identity> {
  await new Server(options(apiKey)).info();
  return { owner: null, scope: 'admin' };
}

let waiting = false;

function lose(): void {
  if (waiting) return;
  waiting = true;
  connection.value = 'lost';
  void comeBack();
}

let wake: (() => void) | undefined;

/** Ask for the server now instead of after the pause. */
export function tryNow(): void {
  wake?.();
}

async function comeBack(): Promise<void> {
  let pause = FIRST_PAUSE;
  for (;;) {
    nextAttempt.value = Date.now() + pause;
    await new Promise<void>((resolve) => {
      const timer = setTimeout(resolve, pause);
      wake = () => (clearTimeout(timer), resolve());
    });
    try {
      const response = await fetch(`${location.origin}/healthz`, { cache: 'no-store' });
      if (response.ok) break;
    } catch {
      // Still gone: the next pause is longer.
    }
    pause = Math.min(pause * 2, LONGEST_PAUSE);
  }
  waiting = false;
  connection.value = 'connected';
  reconnects.value++;
}

/** Read the key of this tab or the ticket of the address, and begin. */
export function begin(): void {
  effect(() => {
    if (key.value !== undefined && identity.value === undefined && reconnects.value >= 0) {
      void resume(key.value);
    }
  });
}

async function resume(apiKey: string): Promise<void> {
  try {
    await signIn(apiKey);
  } catch (error) {
    if (error instanceof Unauthorized) signOut('The key of this tab opens nothing any more.');
    else if (!(error instanceof ServerUnavailable)) signOut(String(error));
  }
}

export type { Schemas };
