/** The server itself: what it is and has, and what only its operator may do. */
import type { operations } from './api.js';
import type { Schemas } from './results.js';
import type { Stream } from './stream.js';
import { Transport, type Abortable, type Answer, type ServerOptions } from './transport.js';

export interface AuditOptions extends Abortable {
  after?: number;
  limit?: number;
  /** "30m", "7d" or a date. */
  since?: string;
  owner?: string;
  key?: string;
  event?: string;
}

/** Any JSON, for which the generated types have no word. */
type Changes = Schemas['ChangeSettingsRequest']['changes'];

export interface LogOptions extends Abortable {
  after?: number;
  limit?: number;
  /** This level, or a higher one. */
  level?: Schemas['LogRecord']['level'];
}

/** Of a server. Most of this needs a key with the scope "admin". */
export class Server {
  readonly #transport: Transport;

  constructor(options: ServerOptions = {}) {
    this.#transport = new Transport(options);
  }

  /** Version, backend, grade of isolation, images, limits. */
  info(options: Abortable = {}): Promise<Schemas['ServerInfo']> {
    return this.#transport.perform('GetInfo', {}, options);
  }

  /** Whose key this is, and what it may do. */
  whoAmI(options: Abortable = {}): Promise<Schemas['Identity']> {
    return this.#transport.perform('WhoAmI', {}, options);
  }

  /** Make a ticket, with which a browser gets a temporary key of the same rights. Valid once. */
  makeTicket(options: Abortable = {}): Promise<Schemas['Ticket']> {
    return this.#transport.perform('MakeTicket', {}, options);
  }

  /** Exchange a ticket for a temporary key. Needs no key; the answer has the `key` itself. */
  redeemTicket(ticket: string, options: Abortable = {}): Promise<Schemas['Key']> {
    return this.#transport.perform('RedeemTicket', { ticket }, options);
  }

  /** What each layer of isolation does on the server's machine, by trying it. */
  report(options: Abortable = {}): Promise<Schemas['Report']> {
    return this.#transport.perform('GetReport', {}, options);
  }

  /** Whether the server runs. */
  health(options: Abortable = {}): Promise<Answer<'healthz'>> {
    return this.#transport.perform('healthz', {}, options);
  }

  /** Throws ServerUnavailable or NoCapacity until its sessions are adopted, and when it stops. */
  ready(options: Abortable = {}): Promise<Answer<'readyz'>> {
    return this.#transport.perform('readyz', {}, options);
  }

  /** Metrics, as Prometheus reads them. */
  async metrics(options: Abortable = {}): Promise<string> {
    const decoder = new TextDecoder();
    let text = '';
    for await (const piece of await this.#transport.bytes('metrics', {}, options)) {
      text += decoder.decode(piece, { stream: true });
    }
    return text;
  }

  /** Sessions, newest first, one page; `before` is the last id of the page before it. */
  sessions(
    { signal, ...query }: Abortable & operations['ListSessions']['parameters']['query'] = {},
  ): Promise<Schemas['BoxInfo'][]> {
    return this.#transport.perform('ListSessions', query, { signal });
  }

  /**
   * Each session when it is new, when its state or deadline changes, and at its end. With
   * `current`, first all that have not ended. null: from now on nothing is missed. Throws
   * ServerBusy if it is read too slowly: begin again then.
   */
  followSessions(
    { signal, ...query }: Abortable & { owner?: string; current?: boolean } = {},
  ): Stream<Schemas['BoxInfo'] | null> {
    return this.#transport.stream('FollowSessions', query, { signal });
  }

  /** What boxes use now, of at most 200 sessions. Those that sleep or are gone are left out. */
  stats(sessions: readonly string[], options: Abortable = {}): Promise<Schemas['SessionStats'][]> {
    return this.#transport.perform('ListStats', { sessions: sessions.join(',') }, options);
  }

  /** What happened lately: each ten seconds of an hour, or each five minutes of a day. */
  history(
    { signal, ...query }: Abortable & { period?: 'hour' | 'day'; owner?: string } = {},
  ): Promise<Schemas['Sample'][]> {
    return this.#transport.perform('GetHistory', query, { signal });
  }

  /** The last sessions that could not be opened or woken, or that were lost, newest first. */
  failures({ signal, ...query }: Abortable & { owner?: string } = {}): Promise<Schemas['Failure'][]> {
    return this.#transport.perform('ListFailures', query, { signal });
  }

  /** The settings, without secrets. */
  settings(options: Abortable = {}): Promise<Schemas['SettingsReport']> {
    return this.#transport.perform('GetSettings', {}, options);
  }

  /**
   * What a change of settings would do; changes nothing. A value is as in the config file, or
   * text; null stands for the default.
   */
  checkSettings(changes: Record<string, unknown>, options: Abortable = {}): Promise<Schemas['SettingsCheck']> {
    return this.#transport.perform('CheckSettings', { changes: changes as Changes }, options);
  }

  /** Change settings in the config file, which `digest` names. They count after a restart. */
  changeSettings(
    changes: Record<string, unknown>,
    digest: string,
    options: Abortable = {},
  ): Promise<Schemas['SettingsCheck']> {
    return this.#transport.perform('ChangeSettings', { changes: changes as Changes, digest }, options);
  }

  /** The server's own log, oldest first, from number `after` on. */
  log({ signal, ...query }: LogOptions = {}): Promise<Schemas['LogRecord'][]> {
    return this.#transport.perform('ReadServerLog', query, { signal });
  }

  /** The server's own log from number `after` on, and what comes. */
  followLog({ signal, ...query }: Omit<LogOptions, 'limit'> = {}): Stream<Schemas['LogRecord']> {
    return this.#transport.stream('FollowServerLog', query, { signal });
  }

  images(options: Abortable = {}): Promise<Schemas['ImageInfo'][]> {
    return this.#transport.perform('ListImages', {}, options);
  }

  /** Build an image; how far it is, step by step. Leaving the loop stops it. */
  buildImage(
    name: string,
    { signal, ...options }: Abortable & { packages?: string[]; preload?: string[] } = {},
  ): Stream<Schemas['BuildProgress']> {
    return this.#transport.stream('BuildImage', { name, ...options }, { signal });
  }

  /** Pull an image from a registry; how far it is, step by step. Leaving the loop stops it. */
  pullImage(reference: string, options: Abortable = {}): Stream<Schemas['BuildProgress']> {
    return this.#transport.stream('PullImage', { reference }, options);
  }

  async removeImage(name: string, options: Abortable = {}): Promise<void> {
    await this.#transport.perform('RemoveImage', { name }, options);
  }

  /** Boxes that wait to be used. */
  pool(options: Abortable = {}): Promise<Schemas['PoolState'][]> {
    return this.#transport.perform('GetPool', {}, options);
  }

  /** Set how many boxes of an image are kept ready, until the server is restarted. */
  sizePool(image: string, size: number, options: Abortable = {}): Promise<Answer<'SizePool'>> {
    return this.#transport.perform('SizePool', { image, size }, options);
  }

  keys(options: Abortable = {}): Promise<Schemas['Key'][]> {
    return this.#transport.perform('ListKeys', {}, options);
  }

  /** Make a key. This once, the answer has the `key` itself. */
  makeKey(
    owner: string,
    { signal, ...options }: Abortable & Omit<Schemas['MakeKeyRequest'], 'owner'> = {},
  ): Promise<Schemas['Key']> {
    return this.#transport.perform('MakeKey', { owner, ...options }, { signal });
  }

  /** Change when a key expires: "12h", "30d", "2027-01-01" or "never". */
  extendKey(key: string, expires: string, options: Abortable = {}): Promise<Answer<'ExtendKey'>> {
    return this.#transport.perform('ExtendKey', { key, expires }, options);
  }

  /** Make a key in place of another, which expires after `overlap`. */
  rotateKey(
    key: string,
    { signal, ...options }: Abortable & Schemas['RotateKeyRequest'] = {},
  ): Promise<Schemas['Key']> {
    return this.#transport.perform('RotateKey', { key, ...options }, { signal });
  }

  /** By its id: from now on it opens nothing. */
  async revokeKey(key: string, options: Abortable = {}): Promise<void> {
    await this.#transport.perform('RevokeKey', { key }, options);
  }

  /** Lines of the audit log, oldest first. */
  audit({ signal, ...query }: AuditOptions = {}): Promise<Schemas['AuditEntry'][]> {
    return this.#transport.perform('ReadAudit', query, { signal });
  }

  /** Lines of the audit log, and those to come. */
  followAudit({ signal, ...query }: Omit<AuditOptions, 'limit'> = {}): Stream<Schemas['AuditEntry']> {
    return this.#transport.stream('FollowAudit', query, { signal });
  }

  /** What an owner may have, and has. */
  quota(owner: string, options: Abortable = {}): Promise<Schemas['Usage']> {
    return this.#transport.perform('GetQuota', { owner }, options);
  }

  /** Set all of an owner's quota: what is left out has no limit. */
  setQuota(
    owner: string,
    quota: Schemas['SetQuotaRequest'],
    options: Abortable = {},
  ): Promise<Answer<'SetQuota'>> {
    return this.#transport.perform('SetQuota', { owner, ...quota }, options);
  }

  /** Set the quota of a workspace in bytes; null: the server's default. */
  setWorkspaceQuota(
    workspace: string,
    quota: number | null,
    { owner, signal }: Abortable & { owner?: string } = {},
  ): Promise<Schemas['Workspace']> {
    return this.#transport.perform('SetWorkspaceQuota', { workspace, quota, owner }, { signal });
  }
}
