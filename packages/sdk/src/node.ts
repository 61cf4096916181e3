/** For Node, Deno and Bun: files of this machine, and servers behind a Unix socket. */
import { randomBytes } from 'node:crypto';
import { constants, createWriteStream } from 'node:fs';
import { lstat, mkdir, open, readdir, realpath, rename, rm } from 'node:fs/promises';
import { request } from 'node:http';
import { dirname, join, sep } from 'node:path';
import { Readable } from 'node:stream';
import { pipeline } from 'node:stream/promises';
import { InvalidRequest, LimitReached } from './errors.js';
import type { Files } from './files.js';
import type { Abortable } from './transport.js';

// A box cannot have more of either; one that lists more is lying.
const MAX_DEPTH = 250;
const MAX_ENTRIES = 1_000_000;

/**
 * Copy a file or a folder of this machine to `path` in the box; the number of files. Permission
 * bits are kept. Links are followed only at `local` itself; those inside a folder are left out,
 * and so are special files.
 */
export async function upload(
  files: Files,
  local: string,
  path: string,
  options: Abortable = {},
): Promise<number> {
  const source = await realpath(local);
  const status = await lstat(source);
  if (status.isFile()) return sendFile(files, source, path, options);
  if (!status.isDirectory()) throw new InvalidRequest(`neither a file nor a folder: ${local}`);
  return sendFolder(files, source, path, options);
}

async function sendFolder(files: Files, source: string, path: string, options: Abortable): Promise<number> {
  await files.makeDir(path, options);
  let count = 0;
  for (const entry of await readdir(source, { withFileTypes: true })) {
    const [from, to] = [join(source, entry.name), `${path}/${entry.name}`];
    if (entry.isDirectory()) count += await sendFolder(files, from, to, options);
    else if (entry.isFile()) count += await sendFile(files, from, to, options);
  }
  return count;
}

async function sendFile(files: Files, source: string, path: string, options: Abortable): Promise<number> {
  // By now it may be a link, or a FIFO that would never be opened: a box may write to this folder.
  const { O_RDONLY, O_NOFOLLOW, O_NONBLOCK } = constants;
  const file = await open(source, O_RDONLY | O_NOFOLLOW | O_NONBLOCK);
  try {
    const status = await file.stat();
    if (!status.isFile()) throw new InvalidRequest(`not a file any more: ${source}`);
    const data = file.createReadStream({ autoClose: false }) as AsyncIterable<Uint8Array>;
    await files.write(path, data, { mode: status.mode & 0o777, ...options });
  } finally {
    await file.close();
  }
  return 1;
}

/**
 * Copy a file or a folder of the box to `local` on this machine; the number of files.
 *
 * The box is not trusted: names that would leave `local` are refused, links and special files are
 * left out, and nothing is written through a link that is there already. More than `limit` bytes in
 * all throws LimitReached. Each file is there whole or not at all.
 */
export async function download(
  files: Files,
  path: string,
  local: string,
  { limit = 8 * 1024 ** 3, ...options }: Abortable & { limit?: number } = {},
): Promise<number> {
  const top = await files.stat(path, options);
  const budget = { left: limit, limit, entries: 0 };
  if (top.kind === 'file') {
    await mkdir(dirname(local), { recursive: true });
    await fetchFile(files, top.path, local, top.mode, budget, options);
    return 1;
  }
  if (top.kind !== 'dir') throw new InvalidRequest(`neither a file nor a folder: ${path}`);
  await mkdir(local, { recursive: true });
  return fetchFolder(files, top.path, local, budget, options, 1);
}

interface Budget {
  left: number;
  limit: number;
  entries: number;
}

async function fetchFolder(
  files: Files,
  path: string,
  local: string,
  budget: Budget,
  options: Abortable,
  depth: number,
): Promise<number> {
  if (depth > MAX_DEPTH) throw new LimitReached(`more than ${MAX_DEPTH} nested folders`);
  let count = 0;
  for (const entry of await files.list(path, options)) {
    const name = nameIn(path, entry.path);
    if (++budget.entries > MAX_ENTRIES) throw new LimitReached(`more than ${MAX_ENTRIES} files and folders`);
    const target = join(local, name);
    if (entry.kind === 'dir') {
      await mkdir(target).catch(async (error: NodeJS.ErrnoException) => {
        // A link that is there already must not lead out of the folder.
        if (error.code !== 'EEXIST' || !(await lstat(target)).isDirectory()) throw error;
      });
      count += await fetchFolder(files, entry.path, target, budget, options, depth + 1);
    } else if (entry.kind === 'file') {
      await fetchFile(files, entry.path, target, entry.mode, budget, options);
      count += 1;
    }
  }
  return count;
}

async function fetchFile(
  files: Files,
  path: string,
  local: string,
  mode: number,
  budget: Budget,
  options: Abortable,
): Promise<void> {
  const there = await lstat(local).catch(() => undefined);
  if (there?.isDirectory()) {
    throw new InvalidRequest(`${local} is a local folder: add the name of the file`);
  }
  // At random: two downloads may write the same file, and a box must not guess it.
  const part = join(dirname(local), `.hutch-${randomBytes(8).toString('hex')}`);
  const pieces = await files.read(path, 'stream', options);
  const counted = async function* () {
    for await (const piece of pieces) {
      budget.left -= piece.length;
      if (budget.left < 0) throw new LimitReached(`more than ${budget.limit} bytes in all`);
      yield piece;
    }
  };
  try {
    await pipeline(counted, createWriteStream(part, { flags: 'wx', mode: (mode & 0o777) | 0o600 }));
    await rename(part, local); // which replaces a link, and does not follow it
  } finally {
    await pieces.close(); // not yet closed if the file could not be created
    await rm(part, { force: true });
  }
}

/** The name of `path`, which must be directly in `folder`. The box may have said anything. */
function nameIn(folder: string, path: string): string {
  const base = folder.endsWith('/') ? folder : `${folder}/`;
  const name = path.slice(base.length);
  // On Windows, "a:b" is a stream of the file a, and a dot or space at the end is dropped.
  const isOdd = sep === '\\' && /[\\:]|[. ]$/.test(name);
  if (!path.startsWith(base) || ['', '.', '..'].includes(name) || /[/\0]/.test(name) || isOdd) {
    throw new InvalidRequest(`a file that cannot be in this folder: ${JSON.stringify(path).slice(0, 300)}`);
  }
  return name;
}

/**
 * A `fetch` over a Unix socket, for `{url: 'http://localhost', fetch: unixFetch(path)}`. The user
 * who runs a server needs no key at its socket.
 */
export function unixFetch(socketPath: string): typeof fetch {
  return async (input, init) => {
    const asked = new Request(input, init as RequestInit);
    const { pathname, search } = new URL(asked.url);
    const headers = Object.fromEntries(asked.headers);
    const { signal } = asked;
    return new Promise<Response>((resolve, reject) => {
      const fail = (error: unknown) => reject(signal.aborted ? signal.reason : error);
      const sent = request({ socketPath, path: pathname + search, method: asked.method, headers, signal }, (message) => {
        try {
          const hasBody = ![204, 205, 304].includes(message.statusCode ?? 0);
          const body = Readable.toWeb(message) as ReadableStream<Uint8Array>;
          const given = Object.entries(message.headers).map(([name, value]) => [name, String(value)] as [string, string]);
          resolve(new Response(hasBody ? body : null, { status: message.statusCode, headers: given }));
        } catch (error) {
          message.destroy();
          fail(error); // a status that no Response can have, say
        }
      });
      sent.on('error', fail);
      // Not `pipe`: an error of the source would be thrown at the whole process.
      if (asked.body) pipeline(Readable.fromWeb(asked.body as never), sent).catch(fail);
      else sent.end();
    });
  };
}
