/** Workspaces: folders of a server that outlive sessions, also without a session. */
import { encode } from './convert.js';
import { Files } from './files.js';
import type { Schemas } from './results.js';
import type { Stream } from './stream.js';
import { Transport, type Abortable, type Data, type ServerOptions } from './transport.js';

/**
 * A named folder of a server. Sessions have it at /workspace: `Sandbox.create({workspaceId})`.
 * The first file that is written makes the folder.
 */
export class Workspace {
  readonly files: Files;
  readonly #transport: Transport;
  readonly #at: { workspace: string; owner?: string };

  /**
   * With an admin key, `owner` may be another one. `files`, `info`, `export` and `remove` are about
   * theirs then; `create` and `import` make your own workspace of that name.
   */
  constructor(
    readonly name: string,
    { owner, ...options }: ServerOptions & { owner?: string } = {},
  ) {
    this.#transport = new Transport(options);
    this.#at = { workspace: name, owner };
    this.files = new Files(this.#transport, this.#at);
  }

  /** Make it, empty; `quota` is in bytes. Throws Conflict if there is one of this name. */
  create(
    { labels, quota, signal }: Abortable & { labels?: Record<string, string>; quota?: number } = {},
  ): Promise<Schemas['Workspace']> {
    return this.#transport.perform('MakeWorkspace', { id: this.name, labels, quota }, { signal });
  }

  /** What is known of it, its size among that. Throws NotFound if it is not there. */
  info(options: Abortable = {}): Promise<Schemas['Workspace']> {
    return this.#transport.perform('GetWorkspace', this.#at, options);
  }

  /** Remove it with all its files. Throws Conflict while a session uses it. */
  async remove(options: Abortable = {}): Promise<void> {
    await this.#transport.perform('RemoveWorkspace', this.#at, options);
  }

  /** All files, as a tar. */
  export(options: Abortable = {}): Promise<Stream<Uint8Array>> {
    return this.#transport.bytes('ExportWorkspace', this.#at, options);
  }

  /** Unpack a tar or tar.gz into it; it is made if it is not there. How many files. */
  import(source: Data, options: Abortable = {}): Promise<number> {
    const data = typeof source === 'string' ? encode(source) : source;
    return this.#transport.perform('ImportWorkspace', { workspace: this.name, data }, options);
  }

  /** All that the key may see, by name; an admin's may name another `owner`. */
  static async list(
    { owner, signal, ...server }: ServerOptions & Abortable & { owner?: string } = {},
  ): Promise<Schemas['Workspace'][]> {
    const answer = await new Transport(server).perform('ListWorkspaces', { owner }, { signal });
    return answer.workspaces;
  }
}
