/**
 * Operations over HTTP, to one server. A stream is a request of its own: leaving it closes the
 * connection, and the server stops a command whose connection has closed.
 */
import { routes, type components, type operations } from './api.js';
import { encode, fromJson, quote, snake, toBase64, toJson } from './convert.js';
import {
  CommandFailed, errorClass, errorOfStatus, InvalidRequest, ServerUnavailable, TimedOut,
  Unauthorized, type HutchError,
} from './errors.js';
import { EventParser } from './events.js';
import { Execution, itemOf, Result, type StreamItems } from './results.js';
import { Attempts, pauseFor } from './retry.js';
import { Stream } from './stream.js';

/** Which server; HUTCH_URL and HUTCH_API_KEY of the environment where this says nothing. */
export interface ServerOptions {
  /** Such as "http://127.0.0.1:8080". */
  url?: string;
  apiKey?: string;
  /** What sends requests; `unixFetch` of "hutch/node" does so over a Unix socket. */
  fetch?: typeof fetch;
  /**
   * What `attach` connects with. Without it, the runtime's own WebSocket, unless `fetch` is given;
   * in a runtime without one, such as Node 20, `attach` goes over HTTP.
   */
  webSocket?: new (url: string, protocols?: string[]) => Socket;
}

/** As much of a WebSocket as is used, for programs whose types have none. */
export interface Socket {
  binaryType: string;
  onmessage: ((event: any) => unknown) | null;
  onclose: ((event: any) => unknown) | null;
  onerror: ((event: any) => unknown) | null;
  send(data: string | Uint8Array): void;
  close(): void;
}

/** Every call takes a signal. Aborting it stops what runs in the box. */
export interface Abortable {
  signal?: AbortSignal;
}

/** Content of a file. Streams and iterables may be of any size, and are sent as they come. */
export type Data =
  | string
  | Uint8Array
  | Blob
  | ReadableStream<Uint8Array>
  | Iterable<Uint8Array>
  | AsyncIterable<Uint8Array>;

export type Operation = keyof operations & keyof typeof routes;
type Part<T, K extends string> = T extends { [key in K]?: infer V } ? NonNullable<V> : unknown;
type Known<T> = [T] extends [never] ? unknown : T;
type JsonOf<T> = T extends { content: { 'application/json': infer V } } ? V : never;
type Body<N extends Operation> = Known<JsonOf<NonNullable<operations[N]['requestBody']>>>;
type Parameters<N extends Operation> = operations[N]['parameters'];

/** What an operation is asked with: its path, its query and its body in one object. */
export type Fields<N extends Operation> = Known<Part<Parameters<N>, 'path'>> &
  Known<Part<Parameters<N>, 'query'>> &
  Body<N> & { data?: Data };

/** A bare value comes wrapped in an object; nothing to say is `{ok: true}`. */
type Unwrapped<T> = T extends { value: infer V } ? V : T extends { ok: true } ? null : T;
export type Answer<N extends Operation> = Unwrapped<JsonOf<operations[N]['responses'][keyof operations[N]['responses']]>>;

const SILENCE = 60_000; // milliseconds; on a stream the server says something every 15 seconds
const PIECE = 65536;
const MAX_ANSWER = 64 * 1024 * 1024; // bytes
const KEY = /^[!-~]{1,512}$/;

export class Transport {
  readonly url: string;
  readonly #key: string | undefined;
  readonly #fetch: typeof fetch;
  readonly #webSocket: ServerOptions['webSocket'];
  #reached = false;

  constructor(options: ServerOptions = {}) {
    const usual = environment('HUTCH_URL');
    const url = options.url ?? usual;
    if (!url) throw new InvalidRequest('this needs a server: give url, or set HUTCH_URL');
    let parsed: URL;
    try {
      parsed = new URL(url);
    } catch {
      throw new InvalidRequest(`a url is http://127.0.0.1:8080 or https://boxes.example.com, not ${url.slice(0, 200)}`);
    }
    if (!/^https?:$/.test(parsed.protocol)) {
      const hint = parsed.protocol === 'unix:' ? '; for a socket, give fetch: unixFetch(path) of hutch/node' : '';
      throw new InvalidRequest(`a url begins with http: or https:, not ${parsed.protocol}${hint}`);
    }
    if (parsed.username || parsed.password || parsed.search || parsed.hash) {
      throw new InvalidRequest('a url is only where the server is: give the key as apiKey');
    }
    // Not the text as given: after a lone "?" or "#", no path would be one.
    this.url = (parsed.origin + parsed.pathname).replace(/\/+$/, '');
    // The key of the environment is for the server of the environment: another never sees it.
    const own = usual === undefined || usual === url;
    this.#key = options.apiKey ?? (own ? environment('HUTCH_API_KEY') : undefined);
    if (this.#key !== undefined && !KEY.test(this.#key)) {
      throw new InvalidRequest('apiKey is not a key: it has spaces, or other than ASCII signs');
    }
    this.#fetch = options.fetch ?? ((input, init) => fetch(input, init));
    // Where requests go another way, a WebSocket of the runtime would go elsewhere, with the key.
    this.#webSocket = options.webSocket ?? (options.fetch ? undefined : globalThis.WebSocket);
  }

  get hasSockets(): boolean {
    return this.#webSocket !== undefined;
  }

  /** A WebSocket. It cannot send headers: the key is in a subprotocol. */
  socket(path: string): Socket {
    const ofKey = (key: string) => toBase64(encode(key)).replaceAll('+', '-').replaceAll('/', '_').replace(/=+$/, '');
    const protocols = ['hutch', ...(this.#key === undefined ? [] : [`hutch.key.${ofKey(this.#key)}`])];
    return new this.#webSocket!(this.url.replace(/^http/, 'ws') + path, protocols);
  }

  /** Carry out one operation, and return its answer. */
  async perform<N extends Operation>(
    name: N,
    fields: Fields<N>,
    { signal }: Abortable = {},
  ): Promise<Answer<N>> {
    const attempts = this.#attempts(name, fields);
    for (;;) {
      const response = await this.#ask(name, fields, 'application/json', attempts, signal);
      let text: string;
      try {
        text = await textOf(response);
      } catch (error) {
        signal?.throwIfAborted();
        if (isOurs(error)) throw error;
        await pauseFor(attempts.afterLoss(), signal);
        continue;
      }
      return this.#understood(() => unwrap(JSON.parse(text)) as Answer<N>);
    }
  }

  /** Carry out one operation, item by item. It is sent when the first item is asked for. */
  stream<N extends keyof StreamItems>(
    name: N,
    fields: Fields<N>,
    options: Abortable = {},
  ): Stream<StreamItems[N]> {
    const line = new Line(options.signal);
    return new Stream(this.#items<StreamItems[N]>(name, fields, line), () => line.stop());
  }

  /** Carry out one operation that gives bytes. It is sent now: a missing file is told at once. */
  async bytes<N extends Operation>(
    name: N,
    fields: Fields<N>,
    options: Abortable = {},
  ): Promise<Stream<Uint8Array>> {
    const line = new Line(options.signal);
    const attempts = this.#attempts(name, fields);
    line.begin();
    try {
      const response = await this.#ask(name, fields, '*/*', attempts, line.signal);
      return new Stream(this.#pieces(response, line, attempts), () => line.stop(response));
    } catch (error) {
      line.end();
      throw error;
    }
  }

  /** The result of a command or a cell, from its stream: on a long wait, heartbeats are heard. */
  async result<T>(
    stream: Stream<unknown>,
    kind: abstract new (...args: never[]) => T,
    each?: (item: unknown) => void,
  ): Promise<T> {
    for await (const item of stream) {
      if (item instanceof kind) return item;
      each?.(item);
    }
    throw new ServerUnavailable(`${this.url} ended a command without a result`);
  }

  /** A request that is no operation. The key is added; what `isAnswer` refuses is thrown. */
  async fetch(path: string, init: RequestInit = {}, isAnswer = isSuccess): Promise<Response> {
    const oneShot = init.body instanceof ReadableStream;
    const attempts = new Attempts(path, this.url, 'POST', this.#reached, oneShot);
    const make = () => ({ ...init, headers: this.#headers(init.headers) });
    return this.#send(this.url + path, make, attempts, init.signal ?? undefined, isAnswer);
  }

  #attempts(name: Operation, fields: object): Attempts {
    const data = (fields as { data?: Data }).data;
    const oneShot = data !== undefined && !isWhole(data);
    return new Attempts(name, this.url, routes[name].split(' ')[0]!, this.#reached, oneShot);
  }

  #headers(given?: HeadersInit): Headers {
    const headers = new Headers(given);
    if (this.#key !== undefined) headers.set('Authorization', `Bearer ${this.#key}`);
    return headers;
  }

  async #ask(
    name: Operation,
    fields: object,
    accept: string,
    attempts: Attempts,
    signal?: AbortSignal,
  ): Promise<Response> {
    const [verb, route] = routes[name].split(' ') as [string, string];
    const { data, ...rest } = fields as Record<string, unknown> & { data?: Data };
    const path = route.replace(/\{(\w+)\}/g, (_, parameter: string) => {
      const value = rest[parameter];
      delete rest[parameter];
      if (typeof value !== 'string' || !value) {
        throw new InvalidRequest(`${parameter} is text, and not empty`);
      }
      // In a URL these two are no names, however they are quoted: the request would go elsewhere.
      if (value === '.' || value === '..') throw new InvalidRequest(`${parameter} cannot be '${value}'`);
      return quote(value);
    });
    const given = Object.entries(rest).filter(([, value]) => value !== undefined && value !== null);
    const inQuery = verb === 'GET' || verb === 'DELETE' || data !== undefined;
    const query = inQuery
      ? given.map(([field, value]) => `${snake(field)}=${quote(String(value))}`).join('&')
      : '';
    const json = !inQuery && given.length && JSON.stringify(toJson(Object.fromEntries(given)));
    let upload: Upload | undefined;
    const make = (): RequestInit => {
      const headers = this.#headers({ Accept: accept });
      const init: RequestInit & { duplex?: 'half' } = { method: verb, headers, signal };
      if (json) {
        headers.set('Content-Type', 'application/json');
        init.body = json;
      } else if (data !== undefined) {
        headers.set('Content-Type', 'application/octet-stream');
        if (isWhole(data)) init.body = data as BodyInit;
        else {
          upload = uploadOf(data);
          Object.assign(init, { body: upload.stream, duplex: 'half' });
        }
      }
      return init;
    };
    try {
      return await this.#send(this.url + path + (query && `?${query}`), make, attempts, signal);
    } catch (error) {
      upload?.close(); // `fetch` does so only if it was aborted
      // What the caller's own iterator threw is not a failure of the connection.
      throw upload?.failure ? upload.failure.error : error;
    }
  }

  /**
   * A response that began well. Redirects are not followed: one could lead to another host, and
   * one that a box sent could lead to the API, with the key.
   */
  async #send(
    url: string,
    make: () => RequestInit,
    attempts: Attempts,
    signal?: AbortSignal,
    isAnswer = isSuccess,
  ): Promise<Response> {
    for (;;) {
      const request: RequestInit = { ...make(), redirect: 'manual' };
      let pause: number;
      try {
        const response = await this.#fetch(url, request);
        this.#reached = true;
        if (isAnswer(response)) return response;
        const error = this.#error(response.status, await textOf(response));
        const after = response.headers.get('Retry-After');
        pause = attempts.afterRefusal(error, after && /^\d+$/.test(after) ? Number(after) : null);
      } catch (error) {
        signal?.throwIfAborted();
        if (isOurs(error)) throw error;
        if (error instanceof DOMException && error.name === 'AbortError') throw error;
        pause = attempts.afterFailure(error);
      }
      await pauseFor(pause, signal);
    }
  }

  #error(status: number, text: string): HutchError {
    if (status === 401 && this.#key === undefined) {
      return new Unauthorized(`${this.url} needs a key: set HUTCH_API_KEY, or give apiKey`);
    }
    if (status < 400) {
      // Browsers hide the status of a redirect: 0.
      return new ServerUnavailable(`${this.url} answered with a redirect: give the url that it leads to`);
    }
    return errorFrom(status, text);
  }

  /** An answer that cannot be read is the server's fault. */
  #understood<T>(read: () => T): T {
    try {
      return read();
    } catch {
      throw new ServerUnavailable(`${this.url} sent an answer that is not one of Hutch`);
    }
  }

  async *#items<T>(name: Operation, fields: object, line: Line): AsyncGenerator<T, void, undefined> {
    const attempts = this.#attempts(name, fields);
    let done: T | undefined;
    line.begin(); // not before: a stream that is never read leaves no listener behind
    try {
      const response = await this.#ask(name, fields, 'text/event-stream', attempts, line.signal);
      const parser = new EventParser();
      try {
        for await (const piece of piecesOf(response, line)) {
          for (const [event, data] of parser.feed(piece)) {
            if (event === 'error') throw errorFrom(500, data);
            const item = this.#understood(() => itemOf(event, JSON.parse(data)) as T | undefined);
            if (item === undefined) continue; // of a newer server
            if (event === 'done') done = item;
            else yield item;
          }
        }
      } catch (error) {
        if (line.stopped) return;
        line.signal.throwIfAborted();
        if (isOurs(error)) throw error;
        if (done === undefined) throw attempts.lost();
      }
      if (done !== undefined) yield done;
      else if (/^Run|^FollowProgram$/.test(name) && !line.stopped) throw attempts.lost();
    } catch (error) {
      if (!line.stopped) throw error;
    } finally {
      line.end();
    }
  }

  async *#pieces(
    response: Response,
    line: Line,
    attempts: Attempts,
  ): AsyncGenerator<Uint8Array, void, undefined> {
    try {
      yield* piecesOf(response, line, Infinity);
    } catch (error) {
      if (line.stopped) return;
      line.signal.throwIfAborted();
      throw isOurs(error) ? error : attempts.lost();
    } finally {
      line.end();
    }
  }
}

/** The connection of a stream. It is cut when the stream is closed, or the caller's signal says. */
class Line {
  stopped = false;
  readonly #controller = new AbortController();
  readonly #abort = () => this.#controller.abort(this.caller?.reason);

  constructor(private readonly caller?: AbortSignal) {}

  /** Follow the caller's signal, until `end`. */
  begin(): void {
    if (this.caller?.aborted) this.#abort();
    this.caller?.addEventListener('abort', this.#abort, { once: true });
  }

  get signal(): AbortSignal {
    return this.#controller.signal;
  }

  /** The reader sees the end of the stream. */
  stop(unread?: Response): void {
    if (this.#controller.signal.aborted) return;
    this.stopped = true;
    this.#controller.abort(new DOMException('the stream was closed', 'AbortError'));
    // An unread body holds its connection until it is cancelled.
    if (unread && !unread.body?.locked) unread.body?.cancel().catch(() => {});
    this.end();
  }

  end(): void {
    this.caller?.removeEventListener('abort', this.#abort);
  }
}

/** What arrives, read only when asked for. ServerUnavailable if nothing does for `silence`. */
async function* piecesOf(
  response: Response,
  line: Line,
  silence = SILENCE,
): AsyncGenerator<Uint8Array, void, undefined> {
  if (!response.body) return;
  const reader = response.body.getReader();
  try {
    for (;;) {
      const { done, value } = await within(reader.read(), silence);
      if (done) return;
      yield value;
    }
  } finally {
    if (line.stopped || !line.signal.aborted) reader.cancel().catch(() => {});
  }
}

/** All of an answer. Throws ServerUnavailable if it is too long. */
async function textOf(response: Response): Promise<string> {
  const reader = response.body?.getReader();
  const decoder = new TextDecoder();
  let text = '';
  let size = 0;
  try {
    for (;;) {
      const { done, value } = (await reader?.read()) ?? { done: true };
      if (done) return text + decoder.decode();
      size += value.length;
      if (size > MAX_ANSWER) throw new ServerUnavailable(`the server sent more than ${MAX_ANSWER} bytes`);
      text += decoder.decode(value, { stream: true });
    }
  } finally {
    reader?.cancel().catch(() => {});
  }
}

async function within<T>(work: Promise<T>, milliseconds: number): Promise<T> {
  if (milliseconds === Infinity) return work;
  let timer: ReturnType<typeof setTimeout> | undefined;
  const late = new Promise<never>((_, reject) => {
    timer = setTimeout(() => reject(new Error('silence')), milliseconds);
  });
  try {
    return await Promise.race([work, late]);
  } finally {
    clearTimeout(timer);
  }
}

function unwrap(body: unknown): unknown {
  const keys = typeof body === 'object' && body !== null ? Object.keys(body) : [];
  if (keys.length === 1 && keys[0] === 'ok') return null;
  if (keys.length === 1 && keys[0] === 'value') return (body as { value: unknown }).value;
  return fromJson(body);
}

/** The error that a server answered with. */
export function errorFrom(status: number, text: string): HutchError {
  let body: Partial<components['schemas']['Error']> | undefined;
  try {
    body = JSON.parse(text);
  } catch {
    // Something in front of the server answered.
  }
  if (typeof body?.code !== 'string' || typeof body.message !== 'string') {
    return errorOfStatus(status, text);
  }
  const Class = errorClass(body.code);
  if (Class !== (CommandFailed as unknown) && Class !== (TimedOut as unknown)) {
    return new Class(body.message);
  }
  const details = (body.details ?? {}) as Record<string, unknown>;
  const result = details.result && new Result(fromJson(details.result) as Result);
  const execution = details.execution && new Execution(fromJson(details.execution) as Execution);
  return new (Class as unknown as typeof TimedOut)(
    body.message,
    (result || undefined) as Result | undefined,
    (execution || undefined) as Execution | undefined,
  );
}

const isSuccess = (response: Response): boolean => response.ok;

/** A variable of the environment, where there is one and it may be read. */
function environment(name: string): string | undefined {
  try {
    const { process } = globalThis as { process?: { env?: Record<string, string | undefined> } };
    return process?.env?.[name] || undefined;
  } catch {
    return undefined; // Deno without --allow-env
  }
}

export const isOurs = (error: unknown): error is HutchError =>
  error instanceof Error && typeof (error.constructor as { code?: unknown }).code === 'string';

/** What fetch can send again. */
const isWhole = (data: Data): data is string | Uint8Array | Blob =>
  typeof data === 'string' || data instanceof Uint8Array || data instanceof Blob;

/** The body of one request. */
interface Upload {
  readonly stream: ReadableStream<Uint8Array>;
  /** What the source threw. */
  failure?: { error: unknown };
  /** Close the source, so that a generator can clean up. */
  close(): void;
}

/** Pieces of at most 64 KiB, taken only as fast as they are sent. */
function uploadOf(data: Exclude<Data, string | Uint8Array | Blob>): Upload {
  if (data instanceof ReadableStream) data = piecesOfStream(data);
  if (!(Symbol.asyncIterator in data || Symbol.iterator in data)) {
    throw new InvalidRequest('data is text, bytes, a Blob, or gives bytes');
  }
  const source = Symbol.asyncIterator in data ? data[Symbol.asyncIterator]() : data[Symbol.iterator]();
  const close = async () => void (await source.return?.());
  let rest = new Uint8Array();
  const stream = new ReadableStream<Uint8Array>(
    {
      async pull(controller) {
        try {
          while (!rest.length) {
            const { done, value } = await source.next();
            if (done) return controller.close();
            if (!(value instanceof Uint8Array)) {
              throw new InvalidRequest('a piece of data must be a Uint8Array');
            }
            rest = new Uint8Array(value);
          }
        } catch (error) {
          upload.failure = { error };
          throw error;
        }
        controller.enqueue(rest.subarray(0, PIECE));
        rest = rest.subarray(PIECE);
      },
      cancel: close,
    },
    { highWaterMark: 0 },
  );
  const upload: Upload = { stream, close: () => void close().catch(() => {}) };
  return upload;
}

/** For browsers in which a stream is no iterable yet. */
async function* piecesOfStream(stream: ReadableStream<Uint8Array>): AsyncGenerator<Uint8Array, void, undefined> {
  const reader = stream.getReader();
  try {
    for (let next; !(next = await reader.read()).done; ) yield next.value;
  } finally {
    reader.cancel().catch(() => {});
  }
}
