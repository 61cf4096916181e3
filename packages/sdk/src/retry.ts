/** When a request is sent again: only what cannot be done twice by that. */
import { ServerBusy, ServerUnavailable, type HutchError } from './errors.js';

// Milliseconds of all pauses of one request. A server that restarts takes less than BUDGET.
const BUDGET = 10_000;
const BUSY_BUDGET = 60_000; // the server said that it will have time later, and when
const SHORT_BUDGET = 1_000; // it never answered: more likely the url is wrong
const FIRST_PAUSE = 50;
const LONGEST_PAUSE = 1_000;
/** Asked twice, these do what they do once. A session is opened under a key of its own. */
const REPEATABLE = ['OpenSession', 'CloseSession', 'ExtendSession'];
const COMMANDS = ['RunShell', 'RunCode', 'RunProgram'];
const NOT_CONNECTED = /ECONNREFUSED|ENOTFOUND|EAI_AGAIN|ENOENT|EACCES|CONNECT_TIMEOUT|ConnectionRefused|connection refused|Unable to connect|dns error/i;
const NOT_FOR_NOW = /ENOTFOUND|EACCES|CERT|SSL|TLS|dns error|certificate/i;

/** Of one request. Each method answers how long to pause before the next try, or throws. */
export class Attempts {
  readonly #began = performance.now();
  #budget: number;
  #pause = FIRST_PAUSE;

  constructor(
    private readonly operation: string,
    private readonly url: string,
    private readonly verb: string,
    reached: boolean,
    private readonly oneShot = false,
  ) {
    this.#budget = reached ? BUDGET : SHORT_BUDGET;
  }

  get #mayRepeat(): boolean {
    return !this.oneShot && (this.verb === 'GET' || REPEATABLE.includes(this.operation));
  }

  /** No answer came. */
  afterFailure(error: unknown): number {
    const reason = reasonOf(error);
    if (!NOT_CONNECTED.test(reason) && !NOT_FOR_NOW.test(reason)) return this.afterLoss();
    const lasting = NOT_FOR_NOW.test(reason);
    const pause = lasting || this.oneShot ? null : this.#next();
    if (pause !== null) return pause;
    const advice = lasting ? '' : '. Does `hutch serve` run there?';
    throw new ServerUnavailable(`cannot reach ${this.url}: ${plain(reason)}${advice}`);
  }

  /** Something was sent, and the answer did not come, or not all of it. */
  afterLoss(): number {
    const pause = this.#mayRepeat ? this.#next() : null;
    if (pause === null) throw this.lost();
    return pause;
  }

  /** The server answered with an error. */
  afterRefusal(error: HutchError, retryAfter: number | null): number {
    if (error instanceof ServerBusy) {
      this.#budget = BUSY_BUDGET;
      if (retryAfter !== null) error.retryAfter = retryAfter;
    }
    const pause = retryAfter !== null && this.#mayRepeat ? this.#next(retryAfter * 1000) : null;
    if (pause === null) throw error;
    return pause;
  }

  /** For a connection that ended too early. */
  lost(): ServerUnavailable {
    const why = `the connection to ${this.url} was lost`;
    if (COMMANDS.includes(this.operation)) {
      return new ServerUnavailable(
        `${why} before the result came; the server stops a command whose client is gone`,
      );
    }
    if (this.#mayRepeat) return new ServerUnavailable(`${why} before all of the answer came`);
    return new ServerUnavailable(`${why} and it is not known whether ${this.operation} was done`);
  }

  #next(atLeast = 0): number | null {
    const pause = Math.max(atLeast, this.#pause);
    this.#pause = Math.min(this.#pause * 2, LONGEST_PAUSE);
    return performance.now() + pause - this.#began <= this.#budget ? pause : null;
  }
}

/** Codes and messages of an error and its causes: each runtime has them in another place. */
function reasonOf(error: unknown): string {
  const words: string[] = [];
  const seen = new Set<unknown>();
  const look = (found: unknown): void => {
    if (typeof found !== 'object' || found === null || seen.has(found)) return;
    seen.add(found);
    const { code, message, cause, errors } = found as Record<string, unknown>;
    words.push(...[code, message].filter((word) => typeof word === 'string'));
    look(cause);
    if (Array.isArray(errors)) errors.forEach(look);
  };
  look(error);
  // Deno's messages have the URL, in which names of files may say anything.
  return words.join(' ').replace(/https?:\S+/g, '');
}

function plain(reason: string): string {
  if (/ENOTFOUND|dns error/i.test(reason)) return 'no such host';
  if (/ENOENT/.test(reason)) return 'no such socket';
  if (/EACCES/.test(reason)) return 'permission denied: run this as the user of the server, or use a url and a key';
  if (/TIMEOUT/.test(reason)) return 'no answer in time';
  if (/CERT|certificate/i.test(reason)) return 'its certificate is not accepted';
  if (/SSL|TLS/i.test(reason)) return 'it does not speak HTTPS';
  return 'nothing listens there';
}

/** Wait; throws the signal's reason if it is aborted first. */
export function pauseFor(milliseconds: number, signal?: AbortSignal): Promise<void> {
  return new Promise((resolve, reject) => {
    if (signal?.aborted) return reject(signal.reason);
    const abort = () => {
      clearTimeout(timer);
      reject(signal?.reason);
    };
    const timer = setTimeout(() => {
      signal?.removeEventListener('abort', abort);
      resolve();
    }, milliseconds);
    signal?.addEventListener('abort', abort, { once: true });
  });
}
