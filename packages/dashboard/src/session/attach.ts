/** What a running program prints, as it is shown, and what is typed into it. */
import { ServerUnavailable, type Attachment as Connection, type Handle, type Terminal } from 'hutch';
import { reconnects } from '../server.js';
import { reason } from '../ui/index.js';

export interface Listener {
  /** Call `done` when it is shown: the program waits until then. */
  onData: (data: Uint8Array, done: () => void) => void;
  /** The connection came back after it was lost. */
  onReconnect?: () => void;
  onLost?: () => void;
  onExit: (exitCode: number | null) => void;
  /** It cannot be attached to, for good. */
  onError: (message: string) => void;
}

export class Attachment {
  readonly #abort = new AbortController();
  readonly #connected: Promise<Connection>;
  #connect!: (connection: Connection) => void;
  #size: [number, number] | undefined;

  constructor(
    private readonly handle: Handle,
    private readonly listener: Listener,
  ) {
    this.#connected = new Promise((resolve) => (this.#connect = resolve));
    void this.#run();
  }

  /** What is typed. While the connection is lost, it waits. */
  send(data: string | Uint8Array): void {
    // What was on its way when the connection was lost may have arrived: it is not typed twice.
    void this.#connected.then((connection) => connection.write(data)).catch(() => {});
  }

  resize(columns: number, rows: number): void {
    this.#size = [columns, rows];
    void this.#sendSize();
  }

  /** Leave the program alone. */
  close(): void {
    this.#abort.abort();
  }

  async #run(): Promise<void> {
    const { signal } = this.#abort;
    let stop: (() => void) | undefined;
    try {
      const connection = await this.#attach();
      this.#connect(connection);
      // When the page knows that the server is back, there is no reason to wait longer.
      stop = reconnects.subscribe(() => connection.reconnect());
      for await (const data of connection) {
        await new Promise<void>((done) => this.listener.onData(data, done));
      }
      this.listener.onExit(connection.exitCode);
    } catch (error) {
      if (!signal.aborted) this.listener.onError(reason(error));
    } finally {
      stop?.();
    }
  }

  async #attach(): Promise<Connection> {
    const { signal } = this.#abort;
    for (;;) {
      try {
        return await this.handle.attach({
          signal,
          patience: Infinity,
          onLost: this.listener.onLost,
          onReconnect: () => {
            this.listener.onReconnect?.();
            void this.#sendSize();
          },
        });
      } catch (error) {
        if (!(error instanceof ServerUnavailable)) throw error;
        this.listener.onLost?.();
      }
    }
  }

  async #sendSize(): Promise<void> {
    if (!this.#size || !isTerminal(this.handle)) return;
    await this.handle.resize(...this.#size).catch(() => {}); // it is sent again after a reconnect
  }
}

export const isTerminal = (handle: Handle): handle is Terminal => handle.process.tty;
