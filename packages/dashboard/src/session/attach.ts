/**
 * A running program over a WebSocket: its output from the start on, and its input.
 *
 * Not `Handle.stream()`: a browser opens six connections of HTTP/1.1 to a server, in all tabs
 * together, and each stream holds one. WebSockets are not among them.
 */
import type { Handle, Terminal } from 'hutch';
import { key, reconnects } from '../server.js';

export interface Listener {
  /** Call `done` when it is shown: more comes only if not too much waits. */
  onData: (data: Uint8Array, done: () => void) => void;
  /** The connection came back after it was lost. */
  onReconnect?: () => void;
  onLost?: () => void;
  onExit: (exitCode: number | null) => void;
  /** It cannot be attached to, for good. */
  onError: (message: string) => void;
}

const FIRST_PAUSE = 500; // milliseconds
const LONGEST_PAUSE = 10_000;
const MOST_WAITING = 4 * 1024 * 1024; // bytes that were received, and are not shown yet
const PIECE = 512 * 1024;
const PULL_PAUSE = 150;

/** Text as base64url, as the server takes a key in a subprotocol. */
function base64url(text: string): string {
  return btoa(text).replaceAll('+', '-').replaceAll('/', '_').replace(/=+$/, '');
}

export class Attachment {
  #socket: WebSocket | undefined;
  #isClosed = false;
  #hasEnded = false;
  #received = 0; // bytes of the output that were handed on
  #skip = 0; // bytes of a new connection that were handed on before
  #waiting = 0;
  #pause = FIRST_PAUSE;
  #timer: ReturnType<typeof setTimeout> | undefined;
  #size: [number, number] | undefined;
  #input: Uint8Array[] = [];
  #wasOpen = false;
  #unsubscribe: () => void;

  constructor(
    private readonly handle: Handle,
    private readonly session: string,
    private readonly listener: Listener,
  ) {
    this.#open();
    // When the page knows that the server is back, there is no reason to wait longer.
    let isFirst = true;
    this.#unsubscribe = reconnects.subscribe(() => {
      if (!isFirst && this.#timer !== undefined) {
        clearTimeout(this.#timer);
        this.#open();
      }
      isFirst = false;
    });
  }

  /** What is typed. While the connection is lost, it is kept, but not much of it. */
  send(data: string | Uint8Array): void {
    const bytes = typeof data === 'string' ? new TextEncoder().encode(data) : data;
    for (let start = 0; start < bytes.length; start += PIECE) {
      const piece = bytes.slice(start, start + PIECE);
      if (this.#socket?.readyState === WebSocket.OPEN) this.#socket.send(piece);
      else if (this.#input.length < 1000) this.#input.push(piece);
    }
  }

  resize(columns: number, rows: number): void {
    this.#size = [columns, rows];
    this.#tell({ resize: this.#size });
  }

  signal(number: number): void {
    this.#tell({ signal: number });
  }

  /** Leave the program alone. */
  close(): void {
    this.#isClosed = true;
    clearTimeout(this.#timer);
    this.#unsubscribe();
    this.#socket?.close();
  }

  #tell(message: object): void {
    if (this.#socket?.readyState === WebSocket.OPEN) this.#socket.send(JSON.stringify(message));
  }

  #open(): void {
    this.#timer = undefined;
    if (this.#isClosed) return;
    const path = `/v1/sessions/${encodeURIComponent(this.session)}/processes/${encodeURIComponent(this.handle.id)}/attach`;
    const protocols = ['hutch', ...(key.value === undefined ? [] : [`hutch.key.${base64url(key.value)}`])];
    const socket = new WebSocket(location.origin.replace(/^http/, 'ws') + path, protocols);
    socket.binaryType = 'arraybuffer';
    this.#socket = socket;
    this.#skip = this.#received;
    socket.onmessage = ({ data }: MessageEvent<ArrayBuffer | string>) => {
      if (this.#socket !== socket || this.#isClosed) return;
      if (typeof data === 'string') this.#heard(data);
      else this.#take(new Uint8Array(data));
    };
    socket.onclose = ({ code, reason }) => {
      if (this.#socket !== socket || this.#isClosed || this.#hasEnded) return;
      this.#socket = undefined;
      if (code === 1008) return this.listener.onError(reason || 'the server refused the connection');
      this.listener.onLost?.();
      void this.#retry();
    };
  }

  #heard(text: string): void {
    let message: { process?: unknown; exit_code?: unknown; error?: unknown };
    try {
      message = JSON.parse(text);
    } catch {
      return;
    }
    if (message.process !== undefined) {
      this.#pause = FIRST_PAUSE;
      if (this.#wasOpen) this.listener.onReconnect?.();
      this.#wasOpen = true;
      if (this.#size) this.#tell({ resize: this.#size });
      for (const piece of this.#input.splice(0)) this.#socket?.send(piece);
    } else if ('exit_code' in message) {
      this.#hasEnded = true;
      this.listener.onExit(typeof message.exit_code === 'number' ? message.exit_code : null);
    }
  }

  #take(data: Uint8Array): void {
    if (this.#skip >= data.length) {
      this.#skip -= data.length;
      return;
    }
    const rest = data.subarray(this.#skip);
    this.#skip = 0;
    this.#show(rest);
    // A WebSocket cannot be told to wait: what prints faster than it is shown is read in parts.
    if (this.#waiting > MOST_WAITING) {
      const socket = this.#socket;
      this.#socket = undefined;
      socket?.close();
      void this.#pull();
    }
  }

  #show(data: Uint8Array): void {
    this.#received += data.length;
    this.#waiting += data.length;
    this.listener.onData(data, () => (this.#waiting -= data.length));
  }

  /** Read the output part by part, as fast as it is shown, until nothing more comes for a while. */
  async #pull(): Promise<void> {
    let silent = 0;
    const input = this.#input;
    try {
      while (!this.#isClosed) {
        for (const bytes of input.splice(0)) await this.handle.sendStdin(bytes);
        if (this.#waiting > PIECE) {
          await new Promise((resolve) => setTimeout(resolve, 20));
          continue;
        }
        const piece = await this.handle.logs(this.#received, PIECE);
        if (piece.start > this.#received) this.#received = piece.start; // the oldest were dropped
        if (piece.data.length) {
          silent = 0;
          this.#show(piece.data);
        } else if (piece.ended) {
          return this.#open(); // for its exit code
        } else if (++silent * PULL_PAUSE > 2000 && this.#received < MOST_WAITING * 4) {
          return this.#open();
        } else {
          await new Promise((resolve) => setTimeout(resolve, PULL_PAUSE));
        }
      }
    } catch {
      this.listener.onLost?.();
      void this.#retry();
    }
  }

  /** A handshake that is refused says no more than one that failed: ask over HTTP. */
  async #retry(): Promise<void> {
    try {
      await this.handle.logs(0, 1);
    } catch (error) {
      const code = (error as { code?: string }).code;
      if (code !== 'server_unavailable' && code !== undefined && !this.#isClosed) {
        this.close();
        return this.listener.onError(error instanceof Error ? error.message : String(error));
      }
    }
    if (this.#isClosed) return;
    this.#timer = setTimeout(() => this.#open(), this.#pause);
    this.#pause = Math.min(this.#pause * 2, LONGEST_PAUSE);
  }
}

export const isTerminal = (handle: Handle): handle is Terminal => handle.process.tty;
