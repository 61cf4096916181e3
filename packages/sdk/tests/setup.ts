/** What tests share: the server that pytest started, and a way to stop and start it. */
import { createServer, connect, type Socket } from 'node:net';
import type { AddressInfo } from 'node:net';

export const url = process.env.HUTCH_URL!;

/** Of the server: "crash" (kill -9) and "start" (again, at the same address). */
export async function control(word: 'crash' | 'start'): Promise<void> {
  const response = await fetch(`${process.env.HUTCH_TEST_CONTROL}/${word}`, { method: 'POST' });
  if (!response.ok) throw new Error(await response.text());
}

/** Until it is so. Only a test that fails waits to the end. */
export async function until(isSo: () => Promise<unknown> | unknown): Promise<void> {
  for (const began = Date.now(); Date.now() - began < 60_000; ) {
    if (await isSo()) return;
    await new Promise((resolve) => setTimeout(resolve, 20));
  }
  throw new Error(`it never was so: ${isSo}`);
}

/** A way to the server that drops connections when told to. */
export class Proxy implements AsyncDisposable {
  /** How many answers are cut off instead of delivered. */
  dropAnswers = 0;
  /** Bytes that came from the server. */
  received = 0;
  #port = 0;
  readonly #sockets = new Set<Socket>();
  readonly #server = createServer((client) => {
    const { hostname, port } = new URL(url);
    const server = connect(Number(port), hostname);
    this.#sockets.add(client);
    client.on('close', () => server.destroy());
    server.on('close', () => client.destroy());
    client.on('error', () => {});
    server.on('error', () => {});
    client.on('data', (data) => server.write(data) || (client.pause(), server.once('drain', () => client.resume())));
    server.on('data', (data) => {
      this.received += data.length;
      if (this.dropAnswers > 0) {
        this.dropAnswers -= 1;
        client.destroy();
      } else if (!client.write(data)) {
        server.pause();
        client.once('drain', () => server.resume());
      }
    });
  });

  /** The same port again after `stop`. */
  async listen(): Promise<string> {
    await new Promise<void>((resolve) => this.#server.listen(this.#port, '127.0.0.1', resolve));
    this.#port = (this.#server.address() as AddressInfo).port;
    return `http://127.0.0.1:${this.#port}`;
  }

  /** Nothing listens from now on. */
  async stop(): Promise<void> {
    const closed = new Promise((resolve) => this.#server.close(resolve));
    this.cut();
    await closed;
  }

  /** Every connection, now. */
  cut(): void {
    for (const socket of this.#sockets) socket.destroy();
  }

  async [Symbol.asyncDispose](): Promise<void> {
    await this.stop();
  }
}
