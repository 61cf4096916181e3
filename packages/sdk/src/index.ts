/** Hutch: sandboxes for AI agents, at a server of your own. */
export { Sandbox, type BoxInfo, type CreateOptions } from './sandbox.js';
export { Attachment, type AttachOptions } from './attach.js';
export {
  Handle, Shell, Terminal, type Command, type Commands, type Listeners, type ProgramOptions,
  type RunOptions, type Shells, type Terminals,
} from './commands.js';
export type { CodeOptions, Context, Functions, RunCodeOptions } from './code.js';
export type { Change, Entry, Files, Match, ReadOptions, SearchOptions } from './files.js';
export { Workspace } from './workspace.js';
export { Server, type AuditOptions, type LogOptions } from './server.js';
export type { Tool, ToolAnswer, Toolbox, ToolboxOptions } from './tools.js';
export { CellResult, Chunk, Execution, Piece, Result, type Schemas } from './results.js';
export { Stream } from './stream.js';
export type { Abortable, Data, ServerOptions, Socket } from './transport.js';
export {
  BackendUnavailable, BoxError, BoxLost, CallerError, CommandFailed, Conflict, GuestMisbehaved,
  HutchError, IncompatibleBox, InvalidRequest, IsFolder, LimitReached, NoCapacity, NoImage,
  NoSession, NoSpace, NotFolder, NotFound, NotPermitted, QuotaReached, ServerBusy,
  ServerUnavailable, SessionEnded, StartFailed, TimedOut, Unauthorized,
} from './errors.js';
