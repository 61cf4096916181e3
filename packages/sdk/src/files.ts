/** Files of a box or of a workspace: everything is done there, as its user. */
import { encode, decode } from './convert.js';
import { InvalidRequest, NotFound } from './errors.js';
import type { Schemas } from './results.js';
import type { Stream } from './stream.js';
import type { Abortable, Answer, Data, Fields, Operation, Transport } from './transport.js';

export type Entry = Schemas['Entry'];
export type Match = Schemas['Match'];
export type Change = Schemas['Change'];

/** Above this, a file is read as a stream, or in parts. */
const READ_LIMIT = 1024 ** 3;

export interface ReadOptions extends Abortable {
  offset?: number;
  length?: number;
}

export interface SearchOptions extends Abortable {
  /** Which files, by name or by path below `path`. */
  glob?: string;
  ignoreCase?: boolean;
  limit?: number;
  /** A language ("py", "js", "rust") or an ending of names. */
  type?: string;
  /** Lines before and after each match. */
  context?: number;
  gitignore?: boolean;
  /** Seconds; some patterns never end. */
  timeout?: number;
}

type OfWorkspace = Extract<Operation, `${string}OfWorkspace`>;
type FileOperation = {
  [N in Operation]: `${N}OfWorkspace` extends OfWorkspace ? N : never;
}[Operation];
type FileFields<N extends Operation> = Omit<Fields<N>, 'session'>;

/** Paths are the box's own, as text; relative ones start at its working directory. */
export class Files {
  constructor(
    private readonly transport: Transport,
    private readonly at: { session: string } | { workspace: string; owner?: string },
  ) {}

  /**
   * A file's content, or `length` bytes of it from `offset` on. As text, bytes that are not UTF-8
   * become U+FFFD. As a stream it may be of any size; above 1 GiB, the others throw
   * InvalidRequest. Throws NotFound.
   */
  read(path: string, format?: 'text', options?: ReadOptions): Promise<string>;
  read(path: string, format: 'bytes', options?: ReadOptions): Promise<Uint8Array>;
  read(path: string, format: 'stream', options?: ReadOptions): Promise<Stream<Uint8Array>>;
  async read(
    path: string,
    format: 'text' | 'bytes' | 'stream' = 'text',
    { offset, length, signal }: ReadOptions = {},
  ): Promise<string | Uint8Array | Stream<Uint8Array>> {
    if (!['text', 'bytes', 'stream'].includes(format)) {
      throw new InvalidRequest(`format is text, bytes or stream, not ${format}`);
    }
    const limit = format === 'stream' ? undefined : READ_LIMIT;
    const name = 'session' in this.at ? 'ReadFile' : 'ReadFileOfWorkspace';
    const fields = { ...this.at, path, offset, length, limit } as Fields<typeof name>;
    const stream = await this.transport.bytes(name, fields, { signal });
    if (format === 'stream') return stream;
    const data = await joined(stream);
    return format === 'bytes' ? data : decode(data);
  }

  /**
   * Write a file, and its parent folders; the number of bytes. It is replaced at once: a reader
   * sees the old content or the new. `expect` is the SHA-256 of what the file is by now, or "" if
   * there must be none: throws Conflict, and nothing is written, if it is something else.
   */
  write(
    path: string,
    data: Data,
    { signal, ...options }: Abortable & { mode?: number; append?: boolean; expect?: string } = {},
  ): Promise<number> {
    const whole = typeof data === 'string' ? encode(data) : data;
    return this.#perform('WriteFile', { path, ...options, data: whole }, signal);
  }

  /** Write several files: path to content. Those before one that fails are written. */
  async writeFiles(files: Record<string, Data>, options: Abortable = {}): Promise<void> {
    for (const [path, data] of Object.entries(files)) await this.write(path, data, options);
  }

  /**
   * Replace text; how many times it was found. It must be there once: throws NotFound if it is
   * not, Conflict if it is there more often and `replaceAll` was not asked for.
   */
  edit(
    path: string,
    old: string,
    replacement: string,
    { replaceAll, signal }: Abortable & { replaceAll?: boolean } = {},
  ): Promise<number> {
    return this.#perform('EditFile', { path, old, new: replacement, replaceAll }, signal);
  }

  /** What is known of one file. A link is described itself, not what it points to. */
  stat(path: string, { signal }: Abortable = {}): Promise<Entry> {
    return this.#perform('StatFile', { path }, signal);
  }

  /** Whether there is something at this path, even a broken link. */
  async exists(path: string, options: Abortable = {}): Promise<boolean> {
    try {
      await this.stat(path, options);
      return true;
    } catch (error) {
      if (error instanceof NotFound) return false;
      throw error;
    }
  }

  /** Make a folder and its parents. False if it was there already. */
  makeDir(path: string, { signal }: Abortable = {}): Promise<boolean> {
    return this.#perform('MakeDir', { path }, signal);
  }

  /** Move or rename; parents of `to` are made. Throws Conflict if something is there. */
  async move(
    path: string,
    to: string,
    { overwrite, signal }: Abortable & { overwrite?: boolean } = {},
  ): Promise<void> {
    await this.#perform('MoveFile', { path, to, overwrite }, signal);
  }

  /** Remove a file, a link or an empty folder; with `recursive`, a folder and all in it. */
  async remove(
    path: string,
    { recursive, signal }: Abortable & { recursive?: boolean } = {},
  ): Promise<void> {
    await this.#perform('RemoveFile', { path, recursive }, signal);
  }

  /** Lines that match a regular expression (of Python's), in the text files below `path`. */
  search(pattern: string, path = '.', { signal, ...options }: SearchOptions = {}): Promise<Match[]> {
    return this.#perform('SearchFiles', { pattern, path, ...options }, signal);
  }

  /** Absolute paths below `path` that match, sorted; with `newest`, by when they changed. */
  glob(
    pattern: string,
    path = '.',
    { signal, ...options }: Abortable & { kind?: Entry['kind']; gitignore?: boolean; newest?: boolean } = {},
  ): Promise<string[]> {
    return this.#perform('GlobFiles', { pattern, path, ...options }, signal);
  }

  /** How `b` differs from `a`, as a unified diff; "" if it does not. */
  diff(a: string, b: string, { context, signal }: Abortable & { context?: number } = {}): Promise<string> {
    return this.#perform('DiffFiles', { a, b, context }, signal);
  }

  /** What is in a folder, sorted by name; with `depth`, also what is in those inside. */
  list(path = '.', { depth, signal }: Abortable & { depth?: number } = {}): Promise<Entry[]> {
    return this.#perform('ListFiles', { path, depth }, signal);
  }

  /** Changes in a folder, from the moment this resolves until the stream is closed. */
  async watch(
    path = '.',
    { recursive, signal }: Abortable & { recursive?: boolean } = {},
  ): Promise<Stream<Change>> {
    const name = 'session' in this.at ? 'WatchFiles' : 'WatchFilesOfWorkspace';
    const fields = { ...this.at, path, recursive } as Fields<typeof name>;
    const changes = this.transport.stream(name, fields, { signal });
    await changes.next(); // the watch is in place
    return changes;
  }

  /** A folder with all in it, as a tar. Of a box only: a workspace has `export`. */
  pack(path = '.', options: Abortable = {}): Promise<Stream<Uint8Array>> {
    return this.transport.bytes('PackFolder', { session: this.#session('pack'), path }, options);
  }

  /** Unpack a tar or tar.gz into a folder of a box, which is there; how many files it made. */
  unpack(path: string, data: Data, options: Abortable = {}): Promise<number> {
    const whole = typeof data === 'string' ? encode(data) : data;
    const fields = { session: this.#session('unpack'), path, data: whole };
    return this.transport.perform('UnpackFolder', fields, options);
  }

  #session(what: string): string {
    if ('session' in this.at) return this.at.session;
    throw new InvalidRequest(`${what} needs a box; a workspace has export and import`);
  }

  /** The operation, or its twin for workspaces: they take and answer the same. */
  #perform<N extends FileOperation>(
    name: N,
    fields: FileFields<N>,
    signal?: AbortSignal,
  ): Promise<Answer<N>> {
    const own = 'session' in this.at ? name : (`${name}OfWorkspace` as N);
    return this.transport.perform(own, { ...this.at, ...fields } as Fields<N>, { signal });
  }
}

/** All of a stream as one piece. */
export async function joined(stream: AsyncIterable<Uint8Array>): Promise<Uint8Array> {
  const pieces: Uint8Array[] = [];
  for await (const piece of stream) pieces.push(piece);
  const whole = new Uint8Array(pieces.reduce((size, piece) => size + piece.length, 0));
  let at = 0;
  for (const piece of pieces) {
    whole.set(piece, at);
    at += piece.length;
  }
  return whole;
}
