/**
 * Everything that this library throws, sorted by who has to act. The words are those of the Python
 * SDK; `code` is the word that the server sends.
 */
import type { Execution, Result } from './results.js';

/** Base of all of ours. */
export class HutchError extends Error {
  static readonly code: string = 'internal';

  constructor(message: string) {
    super(message);
    this.name = new.target.name;
  }

  /** The same word in the API and in the docs. */
  get code(): string {
    return (this.constructor as typeof HutchError).code;
  }
}

/** The request cannot be carried out as it is; sending it again will not help. */
export class CallerError extends HutchError {
  static override readonly code: string = 'caller_error';
}
/** The request itself is wrong. The message says what would be right. */
export class InvalidRequest extends CallerError {
  static override readonly code: string = 'invalid_request';
}
/** The operation needs a file, and this is a folder. */
export class IsFolder extends InvalidRequest {
  static override readonly code: string = 'is_folder';
}
/** The operation needs a folder, and this is something else. */
export class NotFolder extends InvalidRequest {
  static override readonly code: string = 'not_folder';
}
/** There is no such box, shell, process, program, file or image. */
export class NotFound extends CallerError {
  static override readonly code: string = 'not_found';
}
/** The server has no such image, or its operator does not allow it. */
export class NoImage extends NotFound {
  static override readonly code: string = 'invalid_image';
}
/** Something is there already, or is not in a state for this. */
export class Conflict extends CallerError {
  static override readonly code: string = 'conflict';
}
/** The box's user may not do this. */
export class NotPermitted extends CallerError {
  static override readonly code: string = 'not_permitted';
}
/** The server needs a key, or one with more rights. */
export class Unauthorized extends CallerError {
  static override readonly code: string = 'unauthorized';
}
/** With `check`: a command did not exit with 0, or a cell raised. */
export class CommandFailed extends CallerError {
  static override readonly code: string = 'command_failed';
  constructor(
    message: string,
    readonly result?: Result,
    readonly execution?: Execution,
  ) {
    super(message);
  }
}

/** A limit was in the way: ask for less, or later. */
export class LimitReached extends HutchError {
  static override readonly code: string = 'limit_reached';
}
/** The owner of the key has, or asks for, more than the operator of the server allows. */
export class QuotaReached extends LimitReached {
  static override readonly code: string = 'quota_reached';
}
/** A timeout passed. `result` or `execution` has the output so far. */
export class TimedOut extends LimitReached {
  static override readonly code: string = 'timed_out';
  constructor(
    message: string,
    readonly result?: Result,
    readonly execution?: Execution,
  ) {
    super(message);
  }
}
/** The box's disk or memory is full. What was there before is unharmed. */
export class NoSpace extends LimitReached {
  static override readonly code: string = 'no_space';
}
/** The machine has no room for another box. */
export class NoCapacity extends LimitReached {
  static override readonly code: string = 'no_capacity';
}
/** Too many boxes wait to be started on this server. Nothing was done. */
export class ServerBusy extends LimitReached {
  static override readonly code: string = 'server_busy';
  /** Seconds until it is worth trying again. */
  retryAfter = 1;
}

/** The box failed, not the request: open a new one. */
export class BoxError extends HutchError {
  static override readonly code: string = 'box_error';
}
/** The box did not come up. Nothing is left of it. */
export class StartFailed extends BoxError {
  static override readonly code: string = 'start_failed';
}
/** The box died, or was closed. Whatever ran in it is gone. */
export class BoxLost extends BoxError {
  static override readonly code: string = 'box_lost';
}
/** There never was a session of this id, or it belongs to another owner. */
export class NoSession extends BoxLost {
  static override readonly code: string = 'session_not_found';
}
/** The session was closed, or its deadline passed. The message says which. */
export class SessionEnded extends BoxLost {
  static override readonly code: string = 'session_expired';
}
/** The guest broke the protocol and was cut off. Trust nothing it said. */
export class GuestMisbehaved extends BoxError {
  static override readonly code: string = 'guest_misbehaved';
}

/** The server cannot do what was asked, or cannot reach the box for now: the message says which. */
export class BackendUnavailable extends HutchError {
  static override readonly code: string = 'backend_unavailable';
}
/** The box of the session runs a version of Hutch that the server cannot talk to. */
export class IncompatibleBox extends BackendUnavailable {
  static override readonly code: string = 'incompatible_box';
}
/** The server cannot be reached, or is shutting down. Safe requests were retried. */
export class ServerUnavailable extends HutchError {
  static override readonly code: string = 'server_unavailable';
}

const CLASSES = [
  HutchError, CallerError, InvalidRequest, IsFolder, NotFolder, NotFound, NoImage, Conflict,
  NotPermitted, Unauthorized, CommandFailed, LimitReached, QuotaReached, TimedOut, NoSpace,
  NoCapacity, ServerBusy, BoxError, StartFailed, BoxLost, NoSession, SessionEnded, GuestMisbehaved,
  BackendUnavailable, IncompatibleBox, ServerUnavailable,
];
const BY_STATUS: Record<number, typeof HutchError> = {
  400: InvalidRequest, 401: Unauthorized, 403: NotPermitted, 404: NotFound, 409: Conflict,
  413: InvalidRequest, 415: InvalidRequest, 421: InvalidRequest, 429: QuotaReached,
  502: ServerUnavailable, 503: NoCapacity, 504: ServerUnavailable,
};

/** The class of a word; HutchError for a word that this version does not know. */
export function errorClass(code: unknown): typeof HutchError {
  return CLASSES.find((found) => found.code === code) ?? HutchError;
}

/** For an answer that is not from Hutch, but from something in front of it. */
export function errorOfStatus(status: number, body: string): HutchError {
  const text = body.slice(0, 500).trim();
  return new (BY_STATUS[status] ?? HutchError)(`status ${status}${text && `: ${text}`}`);
}
