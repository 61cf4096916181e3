/** The server that this page is from: who asks, and whether it can be reached. */
import { batch, computed, effect, signal } from '@preact/signals';
import { Server, ServerUnavailable, Unauthorized, type Schemas, type ServerOptions } from 'hutch';
import { clearAddress } from './route.js';
import { toast } from './ui/toast.js';
import { reason, until } from './ui/words.js';

export type Identity = Schemas['Identity'];

const KEPT = 'hutch-key';

/** The key of this tab. It is in no address, no cookie, and gone when the tab is closed. */
export const key = signal<string | undefined>(sessionStorage.getItem(KEPT) ?? undefined);
export const identity = signal<Identity | undefined>(undefined);
export const isAdmin = computed(() => identity.value?.scope === 'admin');
/** Whether the key may make and change boxes; one with the scope "read" only looks. */
export const mayRun = computed(() => isAdmin.value || identity.value?.scope === 'run');
/** Begun by the address of this tab or by its key, and not yet known how it ends. */
export const isBeginning = signal(true);
/** Why the login page is shown, in a sentence; nothing before the first login. */
export const goodbye = signal('');
/** `lost` while the server does not answer. The page tries again by itself. */
export const connection = signal<'connected' | 'lost'>('connected');
/** When the next attempt is made while the connection is lost, in milliseconds since 1970. */
export const nextAttempt = signal(0);
/** Counts up each time the server came back: what reads it in an effect loads itself again. */
export const reconnects = signal(0);

const REVOKED = 'Your key was revoked or has expired. Log in with another one.';
const FIRST_PAUSE = 1000;
const LONGEST_PAUSE = 15000;

/** What every call of the SDK is made with. */
export function options(): ServerOptions {
  return optionsOf(key.value);
}

function optionsOf(apiKey: string | undefined): ServerOptions {
  return { url: location.origin, apiKey, fetch: observedFetch, webSocket: WebSocket };
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
  const asked = key.peek();
  if (identity.peek() === undefined || header !== (asked === undefined ? null : `Bearer ${asked}`)) return;
  try {
    await new Server({ url: location.origin, apiKey: asked }).whoAmI();
  } catch (error) {
    if (error instanceof Unauthorized && key.peek() === asked) {
      signOut(asked === undefined ? 'This server needs a key now.' : REVOKED);
    }
  }
}

/** Ask who a key belongs to, and keep it for this tab. Throws what the SDK throws. */
export async function signIn(apiKey: string): Promise<void> {
  const who = await new Server(optionsOf(apiKey)).whoAmI();
  if (who.scope === 'metrics') {
    throw new Unauthorized('This key reads metrics only. Log in with one of the scope “read”, “run” or “admin”.');
  }
  batch(() => {
    key.value = apiKey;
    identity.value = who;
    goodbye.value = '';
  });
  sessionStorage.setItem(KEPT, apiKey);
}

export function signOut(why = ''): void {
  batch(() => {
    key.value = undefined;
    identity.value = undefined;
    goodbye.value = why;
  });
  sessionStorage.removeItem(KEPT);
}

const REVOKING = 10_000; // milliseconds

/** Forget the key of this tab, and revoke it if it was made for this tab alone. Says what it did. */
export async function logOut(): Promise<void> {
  const who = identity.peek();
  const asked = new Server(optionsOf(key.peek()));
  if (!who?.isTemporary || !who.key) {
    return signOut(key.peek() === undefined ? 'You are logged out.' : 'You are logged out. This tab has forgotten the key; the key itself stays valid.');
  }
  // First here: whatever becomes of the request, the next one at this screen has no key.
  signOut('You are logged out. The temporary key is being revoked…');
  let outcome = 'You are logged out, and the temporary key of this tab is revoked.';
  try {
    await asked.revokeKey(who.key, { signal: AbortSignal.timeout(REVOKING) });
  } catch (error) {
    // Refused like this, it had ended before.
    if (!(error instanceof Unauthorized)) {
      outcome = `You are logged out, but the server did not revoke the temporary key of this tab: it ends ${who.expiresAt ? until(who.expiresAt) : 'with the key that it comes from'}. End it sooner with “hutch key revoke ${who.key}”.`;
    }
  }
  if (identity.peek() === undefined) goodbye.value = outcome;
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

/** Redeem the ticket of the address, or go on with the key of this tab. */
export function begin(): void {
  const ticket = /^#ticket=([^&]+)/.exec(location.hash)?.[1];
  // At once, so that it is in no history, and no bookmark of this page has it.
  if (ticket) clearAddress();
  addEventListener('hashchange', redeemNew);
  effect(() => {
    const round = reconnects.value;
    if (identity.peek() === undefined) void resume(round === 0 ? ticket : undefined);
  });
}

/** `hutch dashboard` may open its address in a tab that has this page already. */
function redeemNew(): void {
  const ticket = /^#ticket=([^&]+)/.exec(location.hash)?.[1];
  if (!ticket) return;
  clearAddress();
  void resume(ticket);
}

async function resume(ticket: string | undefined): Promise<void> {
  isBeginning.value = true;
  try {
    if (ticket) {
      const { key: redeemed } = await new Server(optionsOf(undefined)).redeemTicket(decodeURIComponent(ticket));
      if (redeemed) await signIn(redeemed);
      // The link may be of someone else, whose sandboxes then are not one's own.
      toast(`This link logged you in as ${identity.peek()?.owner}.`);
    } else if (key.value !== undefined) {
      await signIn(key.value);
    } else if (!document.querySelector('meta[name="needs-key"]')) {
      // A server that has no keys yet needs none.
      identity.value = await new Server(optionsOf(undefined)).whoAmI();
    }
  } catch (error) {
    if (error instanceof ServerUnavailable) {
      if (ticket) signOut('The server did not answer. Run “hutch dashboard” again once it does.');
      return;
    }
    const used = 'This link was used already, or is older than a minute. Run “hutch dashboard” again.';
    if (ticket) signOut(error instanceof Unauthorized ? used : reason(error));
    else if (!(error instanceof Unauthorized)) signOut(reason(error));
    else signOut(key.value === undefined ? goodbye.value : REVOKED);
  } finally {
    isBeginning.value = false;
  }
}

export type { Schemas };
