/**
 * A program over one connection: its output from any byte on, and its input. A connection that is
 * lost is made again, and the output goes on at the same byte.
 *
 * It is a WebSocket where there is one. A browser opens six connections of HTTP/1.1 to a server,
 * in all tabs together, and each stream holds one; WebSockets are not among them.
 */
import type { Handle } from './commands.js';
import { encode, quote } from './convert.js';
import { Conflict, ServerUnavailable } from './errors.js';
import { Chunk } from './results.js';
import { pauseFor } from './retry.js';
import { asyncDispose } from './stream.js';
import { isOurs, type Abortable, type Socket, type Transport } from './transport.js';

export interface AttachOptions extends Abortable {
  /** The byte of the output to begin with; without it, the first. */
  offset?: number;
  /** Seconds for which a lost connection is tried again; 10 without it. */
  patience?: number;
  /** The connection was lost; the program goes on. */
  onLost?: () => void;
  onReconnect?: () => void;
}

/** Bytes on their way, in each direction. Without a reader, the program waits after that many. */
const WINDOW = 256 * 1024;
const FIRST_PAUSE = 250; // milliseconds
const LONGEST_PAUSE = 10_000;
const PATIENCE = 10;
/** WebSockets that were refused one after the other, before something in between is to blame. */
const REFUSALS = 2;

/** Input that was not confirmed yet. */
interface Input {
  data: Uint8Array;
  sent: number;
  /** Of all input of this connection, where this ends. */
  end: number;
  resolve: () => void;
  reject: (error: unknown) => void;
}

/**
 * What a program prints, piece by piece, and its input. Closing it leaves the program alone.
 *
 *     await using attachment = await terminal.attach();
 *     for await (const data of attachment) process.stdout.write(data);
 *     console.log(attachment.exitCode);
 */
export class Attachment implements AsyncIterableIterator<Uint8Array>, AsyncDisposable {
  /** Once all of the output was read and the program has ended. */
  exitCode: number | null = null;
  /** Of the next byte that is read. It jumps if older output was dropped before it was read. */
  offset: number;

  readonly #abort = new AbortController();
  readonly #queue: Uint8Array[] = [];
  #queued = 0; // bytes
  #ofBefore = 0; // bytes in the queue that came over an earlier connection
  #over: { error: unknown } | 'ended' | undefined;
  #wakers: (() => void)[] = [];
  #socket: Socket | undefined; // while it is open
  #taken = 0; // bytes of this connection that were read
  #told = 0; // of these, how many the server knows of
  #inputs: Input[] = [];
  #sent = 0; // bytes of input over this connection
  #confirmed = 0;
  #refusals = 0;
  #hurry: (() => void) | undefined;

  constructor(
    private readonly transport: Transport,
    private readonly handle: Handle,
    private readonly fields: { session: string; process: string },
    private readonly options: AttachOptions,
  ) {
    this.offset = options.offset ?? 0;
  }

  /** Returns when the program was found. Called by `attach`. */
  async begin(): Promise<this> {
    const { signal } = this.options;
    signal?.throwIfAborted();
    await this.#find(signal);
    const abort = () => this.#end({ error: signal?.reason });
    signal?.addEventListener('abort', abort, { once: true });
    void this.#run().finally(() => signal?.removeEventListener('abort', abort));
    return this;
  }

  [Symbol.asyncIterator](): this {
    return this;
  }

  async next(): Promise<IteratorResult<Uint8Array, void>> {
    for (;;) {
      const value = this.#queue.shift();
      if (value) {
        this.#tookOutput(value.length);
        return { done: false, value };
      }
      if (this.#over === 'ended') return { done: true, value: undefined };
      if (this.#over) throw this.#over.error;
      await this.#change();
    }
  }

  async return(): Promise<IteratorResult<Uint8Array, void>> {
    await this.close();
    return { done: true, value: undefined };
  }

  /**
   * Give it input. Resolves when the program has room for it; while the connection is lost, input
   * waits. Throws Conflict if its input was closed, and ServerUnavailable if the connection was
   * lost before it is known that the input arrived. After the end of a program, input is dropped.
   */
  write(data: string | Uint8Array): Promise<void> {
    const bytes = encode(data).slice();
    if (this.#over === 'ended' || !bytes.length) return Promise.resolve();
    if (this.#over) return Promise.reject(this.#over.error);
    if (!this.#usesSocket) {
      return this.handle.sendStdin(bytes, { signal: this.#abort.signal }).catch((error) => {
        if (this.#over !== 'ended') throw this.#over?.error ?? error;
      });
    }
    return new Promise((resolve, reject) => {
      this.#inputs.push({ data: bytes, sent: 0, end: 0, resolve, reject });
      this.#sendInput();
    });
  }

  /** Do not wait any longer before a lost connection is tried again. */
  reconnect(): void {
    this.#hurry?.();
  }

  /** Leave the program alone. A reader sees the end of the output. May be repeated. */
  async close(): Promise<void> {
    this.#queue.length = 0;
    this.#end('ended');
  }

  [asyncDispose](): Promise<void> {
    return this.close();
  }

  get #usesSocket(): boolean {
    return this.transport.hasSockets && this.#refusals < REFUSALS;
  }

  /** Of what was received, including what has not been read yet. */
  get #received(): number {
    return this.offset + this.#queued;
  }

  async #run(): Promise<void> {
    const { patience = PATIENCE, onLost, onReconnect } = this.options;
    const { signal } = this.#abort;
    let wasConnected = false;
    let lostAt = 0;
    let pause = FIRST_PAUSE;
    const connected = () => {
      if (lostAt) onReconnect?.();
      [wasConnected, lostAt, pause] = [true, 0, FIRST_PAUSE];
    };
    while (!this.#over) {
      try {
        const exitCode = await (this.#usesSocket ? this.#overSocket(connected) : this.#overHttp(connected));
        if (this.#over) return;
        this.exitCode = exitCode;
        return this.#end('ended');
      } catch (error) {
        if (this.#over) return;
        if (isOurs(error) && !(error instanceof ServerUnavailable)) return this.#end({ error });
      }
      if (wasConnected || !lostAt) {
        lostAt = performance.now();
        if (wasConnected) onLost?.();
        wasConnected = false;
      }
      try {
        await this.#drained(); // so that connections that come and go do not fill the memory
        for (;;) {
          await this.#sleep(pause);
          pause = Math.min(pause * 2, LONGEST_PAUSE);
          try {
            await this.#find(signal); // a refused WebSocket does not say why
            break;
          } catch (error) {
            const isLate = performance.now() - lostAt > patience * 1000;
            if (!(error instanceof ServerUnavailable) || isLate) throw error;
          }
        }
      } catch (error) {
        return this.#end({ error });
      }
    }
  }

  /** Throws what is in the way. */
  async #find(signal?: AbortSignal): Promise<void> {
    const fields = { ...this.fields, offset: this.#received, length: 1 };
    const { start } = await this.transport.perform('ReadLogs', fields, { signal });
    if (start > this.#received) this.offset = start - this.#queued;
  }

  /** The exit code. Throws if the connection is lost. */
  async #overHttp(connected: () => void): Promise<number> {
    const { signal } = this.#abort;
    const fields = { ...this.fields, offset: this.#received };
    connected();
    // What waited for a WebSocket that was refused.
    for (const { data, resolve, reject } of this.#inputs.splice(0)) this.write(data).then(resolve, reject);
    for await (const item of this.transport.stream('FollowProgram', fields, { signal })) {
      if (!(item instanceof Chunk)) return item.exitCode;
      this.#tookIn(item.data);
      while (this.#queued >= WINDOW && !this.#over) await this.#change();
    }
    throw new ServerUnavailable('the output ended too early');
  }

  #overSocket(connected: () => void): Promise<number> {
    this.#refusals += 1;
    const { session, process } = this.fields;
    const path = `/v1/sessions/${quote(session)}/processes/${quote(process)}/attach`;
    const socket = this.transport.socket(`${path}?offset=${this.#received}&window=${WINDOW}`);
    socket.binaryType = 'arraybuffer';
    this.#ofBefore = this.#queued;
    this.#taken = this.#told = this.#sent = this.#confirmed = 0;
    return new Promise<number>((resolve, reject) => {
      const stop = () => reject(new ServerUnavailable('it was closed'));
      this.#abort.signal.addEventListener('abort', stop, { once: true });
      socket.onclose = socket.onerror = () => reject(new ServerUnavailable('the connection was lost'));
      socket.onmessage = ({ data }: { data: ArrayBuffer | string }) => {
        if (this.#over) return;
        if (typeof data !== 'string') return this.#tookIn(new Uint8Array(data));
        let message: { process?: unknown; exit_code?: unknown; taken?: unknown; error?: unknown };
        try {
          message = JSON.parse(data) ?? {};
        } catch {
          return reject(new ServerUnavailable('a message that is not one of Hutch'));
        }
        if (message.process !== undefined) {
          this.#refusals = 0;
          this.#socket = socket;
          connected();
          this.#sendInput();
        } else if (typeof message.exit_code === 'number') {
          resolve(message.exit_code);
        } else if (typeof message.taken === 'number') {
          this.#confirm(message.taken);
        } else if (typeof message.error === 'string') {
          this.#inputs[0]?.reject(new Conflict(message.error));
        }
      };
    }).finally(() => {
      this.#socket = undefined;
      socket.close();
      const lost = new ServerUnavailable('the connection was lost, and it is not known whether the input arrived');
      for (const input of this.#inputs) if (input.sent) input.reject(lost);
      this.#inputs = this.#inputs.filter(({ sent }) => !sent);
    });
  }

  #tookIn(data: Uint8Array): void {
    this.#queue.push(data);
    this.#queued += data.length;
    this.#wake();
  }

  #tookOutput(size: number): void {
    this.offset += size;
    this.#queued -= size;
    const ofBefore = Math.min(this.#ofBefore, size);
    this.#ofBefore -= ofBefore;
    this.#taken += size - ofBefore;
    if (this.#socket && this.#taken - this.#told >= WINDOW / 4) {
      this.#told = this.#taken;
      this.#socket.send(JSON.stringify({ taken: this.#taken }));
    }
    this.#wake();
  }

  #sendInput(): void {
    for (const input of this.#inputs) {
      while (this.#socket && input.sent < input.data.length) {
        const room = WINDOW - (this.#sent - this.#confirmed);
        if (room <= 0) return;
        const piece = input.data.slice(input.sent, input.sent + room);
        this.#socket.send(piece);
        input.sent += piece.length;
        this.#sent += piece.length;
        input.end = this.#sent;
      }
    }
  }

  #confirm(total: number): void {
    this.#confirmed = total;
    for (let first; (first = this.#inputs[0]) && first.sent === first.data.length && first.end <= total; ) {
      first.resolve(); // without effect if it was refused
      this.#inputs.shift();
    }
    this.#sendInput();
  }

  #end(how: { error: unknown } | 'ended'): void {
    this.#over ??= how;
    for (const { resolve, reject } of this.#inputs.splice(0)) {
      if (this.#over === 'ended') resolve();
      else reject(this.#over.error);
    }
    this.#abort.abort();
    this.#wake();
  }

  async #drained(): Promise<void> {
    while (this.#queued && !this.#over) await this.#change();
  }

  async #sleep(milliseconds: number): Promise<void> {
    const hurried = new Promise<void>((resolve) => (this.#hurry = resolve));
    try {
      await Promise.race([pauseFor(milliseconds, this.#abort.signal), hurried]);
    } finally {
      this.#hurry = undefined;
    }
  }

  #change(): Promise<void> {
    return new Promise((resolve) => this.#wakers.push(resolve));
  }

  #wake(): void {
    for (const waker of this.#wakers.splice(0)) waker();
  }
}
