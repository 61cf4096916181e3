/** A sandbox: a kept shell, a kept Python, programs and files, at a server. */
import { runCode, streamCode, contextOf, type CodeOptions, type Context, type RunCodeOptions } from './code.js';
import { Commands, Shells, Terminals } from './commands.js';
import { quote } from './convert.js';
import { InvalidRequest, SessionEnded } from './errors.js';
import { Files } from './files.js';
import { Piece, type CellResult, type Chunk, type Execution, type Schemas } from './results.js';
import { asyncDispose, type Stream } from './stream.js';
import { Toolbox } from './tools.js';
import { Transport, type Abortable, type ServerOptions } from './transport.js';

export type BoxInfo = Schemas['BoxInfo'];
type OpenRequest = Schemas['OpenSessionRequest'];

/** What a box is to be like. Sizes are bytes, or text like "512m". */
export interface CreateOptions
  extends ServerOptions,
    Abortable,
    Omit<OpenRequest, 'limits' | 'mounts' | 'ttlSeconds' | 'idempotencyKey' | 'warm'> {
  memory?: number | string;
  cpus?: number;
  pids?: number;
  disk?: number | string;
  /** Seconds from now until it ends, unless `extend` is called. */
  ttl?: number;
  /** Folders of the server: "HOST:BOX" or "HOST:BOX:ro". */
  mounts?: (string | Schemas['MountInput'])[];
  network?: 'none';
}

const ENDED = ['crashed', 'destroyed', 'expired'];
const PAGE = 100;

/**
 * A box at a server. `await using` closes it at the end of the block, unless you came to it with
 * `connect`. A box that dies under you throws BoxLost; it never looks like output of a command.
 *
 *     await using sandbox = await Sandbox.create();
 *     const { stdout } = await sandbox.shell.run('echo hello');
 */
export class Sandbox implements AsyncDisposable {
  readonly shell: Shells;
  readonly commands: Commands;
  readonly files: Files;
  readonly pty: Terminals;
  /** What an agent can call in this box. */
  readonly tools: Toolbox;

  private constructor(
    /** As it was when it was last asked for. */
    public info: BoxInfo,
    private readonly transport: Transport,
    private readonly owned: boolean,
  ) {
    this.shell = new Shells(transport, info.id);
    this.commands = new Commands(transport, info.id);
    this.files = new Files(transport, { session: info.id });
    this.pty = new Terminals(transport, info.id);
    this.tools = new Toolbox(transport, info.id);
  }

  /**
   * Start a box. When this resolves, it can be used. Throws StartFailed, InvalidRequest, NoImage,
   * QuotaReached or ServerUnavailable; nothing is left behind.
   */
  static async create(options: CreateOptions = {}): Promise<Sandbox> {
    const { url, apiKey, fetch, webSocket, signal, memory, cpus, pids, disk, ttl, mounts, network, ...rest } = options;
    if (network !== undefined && network !== 'none') {
      throw new InvalidRequest(`network ${network}: boxes have no network yet, only 'none'`);
    }
    const transport = new Transport({ url, apiKey, fetch, webSocket });
    const limits = { memory: sizeOf('memory', memory), cpus, pids, disk: sizeOf('disk', disk) };
    const request: OpenRequest = {
      ...rest,
      limits: Object.values(limits).some((limit) => limit !== undefined) ? limits : undefined,
      mounts: mounts?.map(mountOf),
      ttlSeconds: ttl,
      idempotencyKey: randomKey(), // so that it can be sent again if the answer is lost
    };
    return new Sandbox(await transport.perform('OpenSession', request, { signal }), transport, true);
  }

  /**
   * A box that is there already. Throws NoSession or SessionEnded. `close()` ends it. With `ended`,
   * also one that has ended: its `info` and its journal can still be read.
   */
  static async connect(
    id: string,
    { signal, ended, ...server }: ServerOptions & Abortable & { ended?: boolean } = {},
  ): Promise<Sandbox> {
    const transport = new Transport(server);
    const info = await transport.perform('GetSession', { session: id }, { signal });
    if (!ended && ENDED.includes(info.status)) {
      throw new SessionEnded(`box ${id} is ${info.status}${info.why ? `: ${info.why}` : ''}`);
    }
    return new Sandbox(info, transport, false);
  }

  /** The live boxes of a server, newest first. `label` is a name, or NAME=VALUE. */
  static async list(
    options: ServerOptions & Abortable & { image?: string; workspaceId?: string; owner?: string; label?: string } = {},
  ): Promise<BoxInfo[]> {
    const { url, apiKey, fetch, webSocket: _, signal, ...query } = options;
    const transport = new Transport({ url, apiKey, fetch });
    const found: BoxInfo[] = [];
    for (;;) {
      const page = await transport.perform(
        'ListSessions',
        { ...query, status: 'live', before: found.at(-1)?.id, limit: PAGE },
        { signal },
      );
      found.push(...page);
      if (page.length < PAGE) return found;
    }
  }

  get id(): string {
    return this.info.id;
  }

  get #at(): { session: string } {
    return { session: this.id };
  }

  /** Ask again how the box is, also if it has ended; the answer is in `info` from now on. */
  async refresh(options: Abortable = {}): Promise<BoxInfo> {
    return (this.info = await this.transport.perform('GetSession', this.#at, options));
  }

  /** Move its deadline to `ttl` seconds from now, if that is later than it was. */
  async extend(ttl: number, options: Abortable = {}): Promise<BoxInfo> {
    const fields = { ...this.#at, ttlSeconds: ttl };
    return (this.info = await this.transport.perform('ExtendSession', fields, options));
  }

  /** What the box uses now. */
  stats(options: Abortable = {}): Promise<Schemas['Stats']> {
    return this.transport.perform('GetStats', this.#at, options);
  }

  /** TCP ports that something in the box listens on. */
  ports(options: Abortable = {}): Promise<Schemas['Port'][]> {
    return this.transport.perform('ListPorts', this.#at, options);
  }

  /**
   * A request to what serves HTTP at a port of the box. As with `fetch`, any status that the box
   * answers with is a response; errors of the server are thrown. Redirects are not followed: the
   * box could send you, with your key, to any part of the API.
   */
  async fetch(port: number, path = '/', init: RequestInit = {}): Promise<Response> {
    const top = `/v1/sessions/${quote(this.id)}/ports/${Number(port)}/http/`;
    const target = top + path.replace(/^\//, '');
    const { href } = new URL(this.transport.url + target);
    if (!href.startsWith(new URL(this.transport.url + top).href)) {
      throw new InvalidRequest(`this path leads out of the port: ${path.slice(0, 200)}`);
    }
    return this.transport.fetch(target, init, isOfBox);
  }

  /**
   * A path of the server at which a browser can open a port of the box, for an hour: without a
   * key, so keep it to yourself. It works for the address that asked for it.
   */
  preview(port: number, options: Abortable = {}): Promise<Schemas['Preview']> {
    return this.transport.perform('PreviewPort', { ...this.#at, port: String(port) }, options);
  }

  /** What happened in the box, after line number `after`, oldest first. */
  journal(after = 0, { limit = 1000, signal }: Abortable & { limit?: number } = {}): Promise<Schemas['JournalEntry'][]> {
    return this.transport.perform('ReadJournal', { ...this.#at, after, limit }, { signal });
  }

  /** The same, and then each line as it is written, until the box has ended. */
  followJournal(after = 0, options: Abortable = {}): Stream<Schemas['JournalEntry']> {
    return this.transport.stream('FollowJournal', { ...this.#at, after }, options);
  }

  /** The journal as a recording that asciinema plays. */
  exportJournal(options: Abortable = {}): Promise<Stream<Uint8Array>> {
    return this.transport.bytes('ExportJournal', this.#at, options);
  }

  /** End the box. When this resolves it is gone, with everything in it. May be repeated. */
  async close(options: Abortable = {}): Promise<void> {
    await this.transport.perform('CloseSession', this.#at, options);
  }

  /** The same as `close`. */
  kill(options: Abortable = {}): Promise<void> {
    return this.close(options);
  }

  /** Let the box go, and keep what is in it: the next call brings everything back. */
  hibernate(options: Abortable = {}): Promise<Schemas['Hibernation']> {
    return this.transport.perform('Hibernate', this.#at, options);
  }

  /** Bring the box back now, and not with the next call. null if it was awake. */
  wake(options: Abortable = {}): Promise<Schemas['Hibernation'] | null> {
    return this.transport.perform('Wake', this.#at, options);
  }

  /** Part of an output that was kept, from `offset` on. `kept` is `Result.kept`. */
  async readOutput(kept: string, offset = 0, length = 65536, options: Abortable = {}): Promise<Piece> {
    const fields = { ...this.#at, output: kept, offset, length };
    return new Piece(await this.transport.perform('ReadOutput', fields, options));
  }

  /**
   * Run Python in a kernel that stays: its variables are there for the next cell. With `check`,
   * throws CommandFailed or TimedOut. Throws NotFound if the image has no Python.
   */
  runCode(code: string, options: RunCodeOptions = {}): Promise<Execution> {
    return runCode(this.transport, this.id, code, options);
  }

  /** Output in chunks and results as they come, then the execution. Leaving the loop interrupts. */
  streamCode(code: string, options: CodeOptions = {}): Stream<Chunk | CellResult | Execution> {
    return streamCode(this.transport, this.id, code, options);
  }

  /** What Ctrl-C does to the cell that runs; its variables stay. Whether one was running. */
  interrupt(context?: string | Context, options: Abortable = {}): Promise<boolean> {
    return this.transport.perform('InterruptCode', { ...this.#at, context: contextOf(context) }, options);
  }

  /** The variables of a kernel, once no cell runs. Throws Conflict if the box sleeps. */
  variables(context?: string | Context, options: Abortable = {}): Promise<Schemas['Variable'][]> {
    return this.transport.perform('GetVariables', { ...this.#at, context: contextOf(context) }, options);
  }

  /** Another kernel, independent of the others. Throws Conflict if there is one of this name. */
  createCodeContext(
    name?: string,
    { signal, ...options }: Abortable & { cwd?: string; env?: Record<string, string> } = {},
  ): Promise<Context> {
    return this.transport.perform('OpenContext', { ...this.#at, ...options, context: name }, { signal });
  }

  /** The contexts that were created; and "main", once it was used. */
  listCodeContexts(options: Abortable = {}): Promise<Context[]> {
    return this.transport.perform('ListContexts', this.#at, options);
  }

  /** A fresh kernel in place of this one. A cell that runs is its last. */
  restartCodeContext(context?: string | Context, options: Abortable = {}): Promise<Context> {
    return this.transport.perform('RestartContext', { ...this.#at, context: contextOf(context) }, options);
  }

  /** End a kernel and everything it still runs. */
  async removeCodeContext(context: string | Context, options: Abortable = {}): Promise<void> {
    await this.transport.perform('CloseContext', { ...this.#at, context: contextOf(context) }, options);
  }

  async [asyncDispose](): Promise<void> {
    if (this.owned) await this.close();
  }
}

/** The server puts this header, and no other of its kind, on what a box answers. */
const isOfBox = (response: Response): boolean =>
  response.ok || response.headers.get('Content-Security-Policy') === 'sandbox';

const UNITS: Record<string, number> = { '': 1, k: 1024, m: 1024 ** 2, g: 1024 ** 3, t: 1024 ** 4 };

function sizeOf(name: string, size?: number | string): number | undefined {
  if (typeof size !== 'string') return size;
  const found = /^(\d+(?:\.\d+)?)\s*([kmgt]?)i?b?$/i.exec(size.trim());
  if (!found) throw new InvalidRequest(`${name} is a number of bytes or text like '512m', not '${size}'`);
  return Math.floor(Number(found[1]) * UNITS[found[2]!.toLowerCase()]!);
}

function mountOf(mount: string | Schemas['MountInput']): Schemas['MountInput'] {
  if (typeof mount !== 'string') return mount;
  const [source, target, mode, ...more] = mount.split(':');
  if (!source || !target || more.length || ![undefined, 'ro', 'rw'].includes(mode)) {
    throw new InvalidRequest(`a mount is HOST:BOX or HOST:BOX:ro, not '${mount}'`);
  }
  return { source, target, readOnly: mode === 'ro' };
}

/** Also where `crypto.randomUUID` is missing: on a page that came over plain HTTP. */
function randomKey(): string {
  const bytes = crypto.getRandomValues(new Uint8Array(16));
  return Array.from(bytes, (byte) => byte.toString(16).padStart(2, '0')).join('');
}
