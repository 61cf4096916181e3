/** Server-sent events, as they come out of a stream of bytes. */
import { ServerUnavailable } from './errors.js';

/** Of one event. A result with pictures is some megabytes; nothing that is sent is more. */
const MAX_EVENT = 64 * 1024 * 1024;

/** Bytes in, events out. Comments are heartbeats, and dropped. */
export class EventParser {
  #decoder = new TextDecoder();
  #rest: string[] = [];
  #size = 0;
  #name = '';
  #data: string[] = [];

  /** Each event that is complete now: its name, and its data. */
  *feed(piece: Uint8Array): Generator<[name: string, data: string]> {
    const lines = this.#decoder.decode(piece, { stream: true }).split('\n');
    for (const [index, part] of lines.entries()) {
      this.#rest.push(part);
      this.#size += part.length;
      if (this.#size > MAX_EVENT) {
        throw new ServerUnavailable(`the server sent an event of more than ${MAX_EVENT} bytes`);
      }
      if (index === lines.length - 1) break; // it goes on in the next piece
      const line = this.#rest.join('').replace(/\r$/, '');
      this.#rest = [];
      if (line) {
        this.#take(line);
        continue;
      }
      const [name, data] = [this.#name || 'message', this.#data];
      this.#name = '';
      this.#data = [];
      this.#size = 0;
      if (data.length) yield [name, data.join('\n')];
    }
  }

  #take(line: string): void {
    const colon = line.indexOf(':');
    const field = colon < 0 ? line : line.slice(0, colon);
    const value = colon < 0 ? '' : line.slice(colon + 1).replace(/^ /, '');
    if (field === 'event') this.#name = value;
    else if (field === 'data') this.#data.push(value);
  }
}
