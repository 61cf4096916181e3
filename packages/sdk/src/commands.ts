/** Shells, single programs, and terminals of a box. */
import { Attachment, type AttachOptions } from './attach.js';
import { encode } from './convert.js';
import { InvalidRequest, TimedOut } from './errors.js';
import { Chunk, Piece, Result, type Schemas } from './results.js';
import type { Stream } from './stream.js';
import type { Abortable, Transport } from './transport.js';

/** A string goes to `sh -c`; a list is the arguments of a program. */
export type Command = string | readonly string[];

export interface Listeners {
  onStdout?: (text: string) => void;
  onStderr?: (text: string) => void;
}

export interface RunOptions extends Abortable, Listeners {
  /** Seconds. */
  timeout?: number;
  /** Throw CommandFailed or TimedOut. */
  check?: boolean;
  /** What it prints can be read again by `readOutput`, however short it is. */
  keep?: boolean;
}

export interface ProgramOptions extends Abortable {
  cwd?: string;
  env?: Record<string, string>;
  user?: string;
  /** Seconds. */
  timeout?: number;
}

const LOGIN_SHELL = 'if [ -x /bin/bash ]; then exec /bin/bash -l; fi; exec /bin/sh -l';
const INPUT_PIECE = 1024 * 1024;
const WAIT = 60; // seconds of one request: runtimes give up on an answer after minutes

function argvOf(command: Command): string[] {
  if (typeof command !== 'string') return [...command];
  if (!command.trim()) throw new InvalidRequest('an empty command');
  return ['/bin/sh', '-c', command];
}

async function resultOf(
  transport: Transport,
  stream: Stream<Chunk | Result>,
  { onStdout, onStderr, check }: RunOptions,
): Promise<Result> {
  const result = await transport.result(stream, Result, (item) => {
    if (!(item instanceof Chunk)) return;
    const listener = item.stream === 'stderr' ? onStderr : onStdout;
    listener?.(item.text);
  });
  return check ? result.check() : result;
}

/** A kept shell: its directory, variables, functions and jobs stay from call to call. */
export class Shell {
  constructor(
    protected readonly transport: Transport,
    protected readonly session: string,
    readonly name: string,
  ) {}

  /**
   * Run a command and wait for its end. Commands of one shell queue, in order.
   *
   * A timeout is a result too: `timedOut`, exit code 124, the output so far. With `check`, throws
   * CommandFailed or TimedOut instead.
   */
  run(command: string, options: RunOptions = {}): Promise<Result> {
    return resultOf(this.transport, this.stream(command, options), options);
  }

  /**
   * The output in chunks as it arrives, then the result. The command starts when the first is
   * asked for. Leaving the loop stops it, with everything it started; the shell stays.
   */
  stream(
    command: string,
    { timeout, keep, signal }: Abortable & { timeout?: number; keep?: boolean } = {},
  ): Stream<Chunk | Result> {
    const fields = { session: this.session, shell: this.name, command, timeout, keep };
    return this.transport.stream('RunShell', fields, { signal });
  }

  /** End this shell and everything it still runs. The next command gets a new one. */
  async close(options: Abortable = {}): Promise<void> {
    await this.transport.perform('CloseShell', { session: this.session, shell: this.name }, options);
  }
}

/** The box's main shell, and the way to more. */
export class Shells extends Shell {
  constructor(transport: Transport, session: string) {
    super(transport, session, 'main');
  }

  /** Another shell, independent of the others. Throws Conflict if there is one of this name. */
  async open(
    name?: string,
    { signal, ...options }: Omit<ProgramOptions, 'timeout'> = {},
  ): Promise<Shell> {
    const fields = { session: this.session, ...options, shell: name };
    const opened = await this.transport.perform('OpenShell', fields, { signal });
    return new Shell(this.transport, this.session, opened);
  }
}

/** Single programs, without a shell around them unless you ask for one. */
export class Commands {
  constructor(
    private readonly transport: Transport,
    private readonly session: string,
  ) {}

  /**
   * Run a program. With `background` it goes on by itself, and a handle comes back as soon as it
   * runs. Throws NotFound if there is no such program.
   */
  run(command: Command, options: ProgramOptions & { background: true }): Promise<Handle>;
  run(
    command: Command,
    options?: ProgramOptions & RunOptions & { background?: false; stdin?: string | Uint8Array },
  ): Promise<Result>;
  async run(
    command: Command,
    options: ProgramOptions & RunOptions & { background?: boolean; stdin?: string | Uint8Array } = {},
  ): Promise<Result | Handle> {
    if (!options.background) {
      return resultOf(this.transport, this.stream(command, options), options);
    }
    const { cwd, env, user, timeout, signal } = options;
    const fields = { session: this.session, argv: argvOf(command), cwd, env, user, timeout };
    const started = await this.transport.perform('StartProgram', fields, { signal });
    return new Handle(this.transport, this.session, started);
  }

  /**
   * The output in chunks as it arrives, then the result. The program starts when the first is
   * asked for. Leaving the loop kills it, with everything it started.
   */
  stream(
    command: Command,
    options: ProgramOptions & { stdin?: string | Uint8Array; keep?: boolean } = {},
  ): Stream<Chunk | Result> {
    const { cwd, env, user, timeout, keep, signal } = options;
    const stdin = options.stdin === undefined ? undefined : encode(options.stdin);
    const fields = { session: this.session, argv: argvOf(command), cwd, env, user, stdin, timeout, keep };
    return this.transport.stream('RunProgram', fields, { signal });
  }

  /** Programs started in the background and terminals, also those that have ended. */
  list(options: Abortable = {}): Promise<Schemas['Process'][]> {
    return this.transport.perform('ListPrograms', { session: this.session }, options);
  }

  /** A handle of a program that `list` knows. Throws NotFound. */
  async connect(id: string, options: Abortable = {}): Promise<Handle> {
    const process = (await this.list(options)).find((found) => found.id === id);
    if (!process) {
      const fields = { session: this.session, process: id };
      await this.transport.perform('WaitProgram', fields, options); // which throws NotFound
    }
    return new (process?.tty ? Terminal : Handle)(this.transport, this.session, process!);
  }
}

/** A program in the background. */
export class Handle {
  #last: Promise<unknown> = Promise.resolve();

  constructor(
    protected readonly transport: Transport,
    protected readonly session: string,
    /** As it was when it started. */
    readonly process: Schemas['Process'],
  ) {}

  get id(): string {
    return this.process.id;
  }

  /** Its pid inside the box. */
  get pid(): number {
    return this.process.pid;
  }

  protected get fields(): { session: string; process: string } {
    return { session: this.session, process: this.id };
  }

  /** What it has printed so far; of very much, the first and the last part. */
  async stdout(options: Abortable = {}): Promise<string> {
    return (await this.transport.perform('WaitProgram', this.fields, options)).stdout;
  }

  /** What it has printed to stderr so far. */
  async stderr(options: Abortable = {}): Promise<string> {
    return (await this.transport.perform('WaitProgram', this.fields, options)).stderr;
  }

  /**
   * Its result, once it has ended; with listeners, also its output, from the start on. If
   * `timeout` seconds pass first, throws TimedOut with the output so far, and the program goes on.
   */
  async wait(options: Omit<RunOptions, 'keep'> = {}): Promise<Result> {
    const { timeout, check, onStdout, onStderr, signal } = options;
    if (onStdout || onStderr) {
      const fields = { ...this.fields, timeout };
      return resultOf(this.transport, this.transport.stream('FollowProgram', fields, { signal }), options);
    }
    const deadline = timeout === undefined ? Infinity : performance.now() + timeout * 1000;
    for (;;) {
      const left = Math.max(0, (deadline - performance.now()) / 1000);
      const fields = { ...this.fields, ended: true, timeout: Math.min(left, WAIT) };
      let result: Result;
      try {
        result = new Result(await this.transport.perform('WaitProgram', fields, { signal }));
      } catch (error) {
        if (!(error instanceof TimedOut) || left <= WAIT) throw error;
        continue;
      }
      // Not inside the `try`: a program that hit its own timeout has ended.
      return check ? result.check() : result;
    }
  }

  /**
   * Its output from the start, as it arrives, then the result. Of long output so far, that is the
   * first and the last part. With `offset`, it is every byte from there on, counted over stdout
   * and stderr; what was printed before comes as stdout. Throws NotFound if that is not kept any
   * more.
   *
   * Leaving the loop leaves the program alone. While the stream is open and not read, the program
   * waits.
   */
  stream({ offset, signal }: Abortable & { offset?: number } = {}): Stream<Chunk | Result> {
    return this.transport.stream('FollowProgram', { ...this.fields, offset }, { signal });
  }

  /**
   * All of its output and its input, over one connection that is made again when it is lost: for
   * terminals on a screen, and for programs that one talks to. Throws NotFound or BoxLost if it is
   * gone.
   */
  attach(options: AttachOptions = {}): Promise<Attachment> {
    return new Attachment(this.transport, this, this.fields, options).begin();
  }

  /** Part of its output, from byte `offset` on. */
  async logs(offset = 0, length = 65536, options: Abortable = {}): Promise<Piece> {
    const fields = { ...this.fields, offset, length };
    return new Piece(await this.transport.perform('ReadLogs', fields, options));
  }

  /** Give it input, in the order of the calls. Waits while the program has no room for it. */
  sendStdin(data: string | Uint8Array, options: Abortable = {}): Promise<void> {
    return this.#inOrder(async () => {
      const bytes = encode(data);
      for (let start = 0; start < bytes.length; start += INPUT_PIECE) {
        const piece = bytes.slice(start, start + INPUT_PIECE);
        await this.transport.perform('SendInput', { ...this.fields, data: piece }, options);
      }
    });
  }

  /** The program reads end-of-file after what was sent. */
  closeStdin(options: Abortable = {}): Promise<void> {
    return this.#inOrder(async () => {
      await this.transport.perform('CloseInput', this.fields, options);
    });
  }

  /** Send it a signal; only itself, not what it started. */
  async signal(number: number, options: Abortable = {}): Promise<void> {
    await this.transport.perform('SignalProgram', { ...this.fields, signal: number }, options);
  }

  /** End it and everything it started. When this returns, all of it is gone. May be repeated. */
  async kill(options: Abortable = {}): Promise<void> {
    await this.transport.perform('SignalProgram', { ...this.fields, tree: true }, options);
  }

  /** Two requests at once may arrive in any order; what is typed may not. */
  #inOrder(work: () => Promise<void>): Promise<void> {
    const next = this.#last.then(work);
    this.#last = next.catch(() => {});
    return next;
  }
}

/** A program on a terminal of its own. Its output is what a screen would get. */
export class Terminal extends Handle {
  /** Type something. `"\x03"` is Ctrl-C. */
  send(data: string | Uint8Array, options: Abortable = {}): Promise<void> {
    return this.sendStdin(data, options);
  }

  /** The program sees the new size, and gets SIGWINCH. */
  async resize(columns: number, rows: number, options: Abortable = {}): Promise<void> {
    await this.transport.perform('ResizeTerminal', { ...this.fields, columns, rows }, options);
  }
}

/** Terminals (PTYs), for people and for programs that insist on one. */
export class Terminals {
  constructor(
    private readonly transport: Transport,
    private readonly session: string,
  ) {}

  /** Start a program on a new terminal; without one, a login shell. It runs when this returns. */
  async open(
    command: Command = LOGIN_SHELL,
    { columns = 80, rows = 24, signal, ...options }: ProgramOptions & { columns?: number; rows?: number } = {},
  ): Promise<Terminal> {
    const terminal: [number, number] = [columns, rows];
    const fields = { session: this.session, argv: argvOf(command), ...options, terminal };
    const started = await this.transport.perform('StartProgram', fields, { signal });
    return new Terminal(this.transport, this.session, started);
  }
}
