/** What commands and cells answer. The fields are the server's; the rest is for convenience. */
import type { components } from './api.js';
import { decode, encode, fromBase64, fromJson } from './convert.js';
import { CommandFailed, InvalidRequest, TimedOut } from './errors.js';

export type Schemas = components['schemas'];
type PieceFields = Schemas['Piece'];
type ResultFields = Schemas['Result'];
type CellResultFields = Schemas['CellResult'];
type ExecutionFields = Schemas['Execution'];

/** A piece of output as it arrived. */
export class Chunk {
  constructor(
    readonly stream: 'stdout' | 'stderr',
    readonly data: Uint8Array,
  ) {}

  /** Bytes that are not UTF-8 become U+FFFD. */
  get text(): string {
    return decode(this.data);
  }
}

/** Part of an output that was kept. It begins at `start`. */
export interface Piece extends PieceFields {}
export class Piece {
  constructor(fields: PieceFields) {
    Object.assign(this, fields);
  }

  get text(): string {
    return decode(this.data);
  }
}

/** What a command did. A non-zero exit code, or a timeout, is a result and not an error. */
export interface Result extends ResultFields {}
export class Result {
  constructor(fields: ResultFields) {
    Object.assign(this, fields);
  }

  get ok(): boolean {
    return this.exitCode === 0 && !this.timedOut;
  }

  /** This result; throws TimedOut or CommandFailed with it attached. */
  check(): this {
    if (this.timedOut) throw new TimedOut(timedOut(this.durationMs), this);
    if (this.exitCode) {
      const last = (this.stderr.trim() || this.output.trim()).slice(-500);
      throw new CommandFailed(`exit code ${this.exitCode}${last && `: ${last}`}`, this);
    }
    return this;
  }
}

const NAMED = [
  'text', 'html', 'markdown', 'svg', 'png', 'jpeg', 'pdf', 'latex', 'json', 'javascript', 'data',
  'chart',
] as const;

/** Something that a cell showed, in every form that it has. */
export interface CellResult extends CellResultFields {}
export class CellResult {
  constructor(fields: CellResultFields) {
    Object.assign(this, fields);
  }

  /** The names of the forms that it has. */
  formats(): string[] {
    const named = NAMED.filter((name) => this[name] !== null && this[name] !== undefined);
    return [...named, ...Object.keys(this.extra)];
  }

  /** A picture or document as a file would have it. Throws InvalidRequest if it is not there. */
  bytesOf(format: 'png' | 'jpeg' | 'pdf'): Uint8Array {
    const text = this[format];
    if (typeof text !== 'string') {
      throw new InvalidRequest(`this result has no ${format}, but ${this.formats().join(', ')}`);
    }
    try {
      return fromBase64(text);
    } catch {
      throw new InvalidRequest(`the ${format} of this result is not valid base64`);
    }
  }
}

/** What a cell did. An error, or a timeout, is an execution and not an exception. */
export interface Execution extends Omit<ExecutionFields, 'results'> {}
export class Execution {
  readonly results: CellResult[];

  constructor(fields: ExecutionFields) {
    Object.assign(this, fields);
    this.results = fields.results.map((result) => new CellResult(result));
  }

  /** The value of the last expression as text; null if there was none. */
  get text(): string | null {
    return this.results.find((result) => result.isMain)?.text ?? null;
  }

  get ok(): boolean {
    return !(this.error || this.timedOut || this.died);
  }

  /** This execution; throws TimedOut or CommandFailed with it attached. */
  check(): this {
    if (this.timedOut) throw new TimedOut(timedOut(this.durationMs), undefined, this);
    if (this.error) {
      const message = `${this.error.name}: ${this.error.value.slice(0, 500)}`;
      throw new CommandFailed(message, undefined, this);
    }
    return this;
  }
}

/** What each operation that streams gives, item by item. */
export interface StreamItems {
  RunShell: Chunk | Result;
  RunProgram: Chunk | Result;
  FollowProgram: Chunk | Result;
  RunCode: Chunk | CellResult | Schemas['Call'] | Execution;
  WatchFiles: Schemas['Change'];
  WatchFilesOfWorkspace: Schemas['Change'];
  FollowJournal: Schemas['JournalEntry'];
  FollowAudit: Schemas['AuditEntry'];
  BuildImage: Schemas['BuildProgress'];
  PullImage: Schemas['BuildProgress'];
  FollowSessions: Schemas['BoxInfo'] | null;
  FollowServerLog: Schemas['LogRecord'];
}

/** The item of an event; undefined if this version does not know the event. */
export function itemOf(event: string, body: unknown): unknown {
  const value = fromJson(body);
  switch (event) {
    case 'chunk': {
      const { stream, text, base64 } = value as Schemas['Chunk'];
      return new Chunk(stream, base64 ?? encode(text ?? ''));
    }
    case 'result':
      return new CellResult(value as Schemas['CellResult']);
    case 'done':
      return 'exitCode' in (value as object)
        ? new Result(value as Schemas['Result'])
        : new Execution(value as Schemas['Execution']);
    case 'ready':
      return null;
    case 'call': case 'change': case 'entry': case 'audit': case 'progress': case 'session': case 'log':
      return value;
    default:
      return undefined;
  }
}

const timedOut = (milliseconds: number) => `timed out after ${(milliseconds / 1000).toFixed(1)} s`;
