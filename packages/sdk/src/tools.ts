/**
 * Tools for agents: each with a name, a description and a JSON Schema, and one way to call them.
 * The server has them, at /mcp: so their answers are condensed as everywhere else.
 */
import { fromBase64 } from './convert.js';
import { BoxLost, errorClass, InvalidRequest, ServerUnavailable } from './errors.js';
import { EventParser } from './events.js';
import type { Abortable, Transport } from './transport.js';

export interface Tool {
  name: string;
  description: string;
  /** A JSON Schema of its arguments. */
  parameters: Record<string, unknown>;
  onlyReads: boolean;
  /** Call it: `arguments` as the model gave them, also as JSON. */
  execute(args: unknown, options?: Abortable): Promise<ToolAnswer>;
}

/** What the model is told. Whatever it could put right itself is an answer, not an exception. */
export interface ToolAnswer {
  text: string;
  /** Of what ran; 1 for a tool that could not do what was asked. */
  exitCode: number;
  /** The tool could not do it: `text` says why, and what to do next. */
  failed: boolean;
  pictures: { data: Uint8Array; mime: string }[];
  /** For programs. */
  details: Record<string, unknown>;
}

export interface ToolboxOptions {
  /** Names of tools; all of them without. With bash, git or python comes recall. */
  only?: string[];
  /** false: what commands print is not made shorter. */
  condense?: boolean;
  /** Seconds that a command has, unless the model wants fewer. */
  timeout?: number;
}

interface Content {
  type: string;
  text?: string;
  data?: string;
  mimeType?: string;
}
interface CallResult {
  content: Content[];
  isError?: boolean;
  _meta?: Record<string, Record<string, unknown>>;
}
interface ListResult {
  tools: {
    name: string;
    description: string;
    inputSchema: { properties: Record<string, unknown> };
    annotations?: { readOnlyHint?: boolean };
  }[];
}

const PROTOCOL = '2026-07-28';
const NAME = /^[\w.-]{1,128}$/; // it goes into a header
const FACTS = 'hutch/facts';
const OF_BOXES = ['create_box', 'list_boxes', 'close_box']; // this toolbox has its box

/** The tools of one box. */
export class Toolbox {
  #listed: Tool[] | undefined;
  #id = 0;

  constructor(
    private readonly transport: Transport,
    private readonly session: string,
    private readonly options: ToolboxOptions = {},
  ) {}

  /** The same box with other options: `sandbox.tools.with({only: ['read', 'grep']})`. */
  with(options: ToolboxOptions): Toolbox {
    return new Toolbox(this.transport, this.session, { ...this.options, ...options });
  }

  /** What a model can call. */
  async list(options: Abortable = {}): Promise<Tool[]> {
    return (this.#listed ??= await this.#list(options));
  }

  /**
   * Call a tool. Throws BoxLost if the box is gone, ServerUnavailable if the server cannot be
   * reached, and InvalidRequest if there is no such tool; the rest is an answer for the model.
   * Aborting the signal stops the command.
   */
  async call(name: string, args: unknown, options: Abortable = {}): Promise<ToolAnswer> {
    if (!NAME.test(name)) throw new InvalidRequest(`there is no tool ${JSON.stringify(name).slice(0, 200)}`);
    const given = argumentsOf(args);
    if (given === undefined) {
      return answerOf([{ type: 'text', text: 'arguments are a JSON object' }], true, { exit_code: 1 });
    }
    const params = { name, arguments: { ...given, box: this.session } };
    const result = (await this.#ask('tools/call', params, options)) as CallResult;
    const { box: _, ...facts } = result._meta?.[FACTS] ?? {};
    const answer = answerOf(result.content, result.isError === true, facts);
    const Class = errorClass(facts.error);
    if (Class.prototype instanceof BoxLost || Class === BoxLost) throw new Class(answer.text);
    return answer;
  }

  async #list(options: Abortable): Promise<Tool[]> {
    const { tools } = (await this.#ask('tools/list', {}, options)) as ListResult;
    return tools
      .filter(({ name }) => !OF_BOXES.includes(name))
      .map(({ name, description, inputSchema, annotations }) => {
        const { box: _, ...properties } = inputSchema.properties;
        return {
          name,
          description,
          parameters: { ...inputSchema, properties },
          onlyReads: annotations?.readOnlyHint === true,
          execute: (args, more) => this.call(name, args, more),
        };
      });
  }

  /** One request of the protocol, which needs no session. */
  async #ask(method: string, params: object, { signal }: Abortable): Promise<unknown> {
    const query = new URLSearchParams();
    const { only, condense, timeout } = this.options;
    if (only) query.set('only', only.join(','));
    if (condense === false) query.set('raw', 'yes');
    if (timeout !== undefined) query.set('timeout', String(timeout));
    const id = ++this.#id;
    const meta = {
      'io.modelcontextprotocol/protocolVersion': PROTOCOL,
      'io.modelcontextprotocol/clientInfo': { name: 'hutch', version: '0' },
      'io.modelcontextprotocol/clientCapabilities': {},
    };
    const name = (params as { name?: string }).name;
    const response = await this.transport.fetch(`/mcp${query.size ? `?${query}` : ''}`, {
      method: 'POST',
      signal,
      headers: {
        'Content-Type': 'application/json',
        Accept: 'application/json, text/event-stream',
        'MCP-Protocol-Version': PROTOCOL,
        'Mcp-Method': method,
        ...(name === undefined ? {} : { 'Mcp-Name': name, 'Mcp-Param-Box-Id': this.session }),
      },
      body: JSON.stringify({ jsonrpc: '2.0', id, method, params: { ...params, _meta: meta } }),
    });
    const message = await messageOf(response, id, signal);
    if (message.error) throw new InvalidRequest(message.error.message);
    return message.result;
  }
}

interface Message {
  id?: number;
  result?: unknown;
  error?: { message: string };
}

/** The answer: alone, or the last of several events. */
async function messageOf(response: Response, id: number, signal?: AbortSignal): Promise<Message> {
  try {
    if (!response.headers.get('Content-Type')?.includes('text/event-stream')) {
      return (await response.json()) as Message;
    }
    const parser = new EventParser();
    const reader = response.body!.getReader();
    try {
      for (;;) {
        const { done, value } = await reader.read();
        if (done) break;
        for (const [, data] of parser.feed(value)) {
          const message = JSON.parse(data) as Message;
          if (message.id === id) return message;
        }
      }
    } finally {
      reader.cancel().catch(() => {}); // an answer is the last event that is wanted
    }
  } catch {
    signal?.throwIfAborted();
  }
  throw new ServerUnavailable('the connection was lost before the tool answered');
}

function argumentsOf(args: unknown): object | undefined {
  let given = args ?? {};
  if (typeof given === 'string') {
    try {
      given = JSON.parse(given || '{}');
    } catch {
      return undefined;
    }
  }
  return typeof given === 'object' && !Array.isArray(given) ? (given as object) : undefined;
}

function answerOf(content: Content[], failed: boolean, facts: Record<string, unknown>): ToolAnswer {
  const { exit_code: exitCode, ...details } = facts;
  return {
    text: content.filter(({ type }) => type === 'text').map(({ text }) => text).join('\n'),
    exitCode: Number(exitCode ?? (failed ? 1 : 0)),
    failed,
    pictures: content
      .filter(({ type }) => type === 'image')
      .map(({ data = '', mimeType = '' }) => ({ data: fromBase64(data), mime: mimeType })),
    details,
  };
}
