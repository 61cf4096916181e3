/** For Node, Deno and Bun: files of this machine, and servers behind a Unix socket. */
import { constants, createWriteStream } from 'node:fs';
import { lstat, mkdir, open, readdir, realpath, rename, rm } from 'node:fs/promises';
import { request } from 'node:http';
import { basename, dirname, join, sep } from 'node:path';
import { Readable } from 'node:stream';
import { pipeline } from 'node:stream/promises';
import { InvalidRequest, LimitReached } from './errors.js';
import type { Files } from './files.js';
import type { Abortable } from './transport.js';

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
  const { mode } = await lstat(source);
  if ((mode & constants.S_IFMT) === constants.S_IFREG) {
    const file = await open(source, constants.O_RDONLY | constants.O_NOFOLLOW);
    // The stream closes the file, however it ends.
    const data = file.createReadStream() as AsyncIterable<Uint8Array>;
    await files.write(path, data, { mode: mode & 0o777, ...options });
    return 1;
  }
  if ((mode & constants.S_IFMT) !== constants.S_IFDIR) {
    throw new InvalidRequest(`neither a file nor a folder: ${local}`);
  }
  await files.makeDir(path, options);
  let count = 0;
  for (const entry of await readdir(source, { withFileTypes: true })) {
    if (!entry.isFile() && !entry.isDirectory()) continue;
    count += await upload(files, join(source, entry.name), `${path}/${entry.name}`, options);
  }
  return count;
}

/**
 * Copy a file or a folder of the box to `local` on this machine; the number of files.
 *
 * The box is not trusted: names that would leave `local` are refused, links and special files are
 * left out, and nothing is written through a link. More than `limit` bytes in all throws
 * LimitReached. Each file is there whole or not at all.
 */
export async function download(
  files: Files,
  path: string,
  local: string,
  { limit = 8 * 1024 ** 3, ...options }: Abortable & { limit?: number } = {},
): Promise<number> {
  const top = await files.stat(path, options);
  const budget = { left: limit, limit };
  if (top.kind === 'file') {
    await mkdir(dirname(local), { recursive: true });
    await fetchFile(files, top.path, local, top.mode, budget, options);
    return 1;
  }
  if (top.kind !== 'dir') throw new InvalidRequest(`neither a file nor a folder: ${path}`);
  await mkdir(local, { recursive: true });
  return fetchFolder(files, top.path, local, budget, options);
}

interface Budget {
  left: number;
  limit: number;
}

async function fetchFolder(
  files: Files,
  path: string,
  local: string,
  budget: Budget,
  options: Abortable,
): Promise<number> {
  let count = 0;
  for (const entry of await files.list(path, options)) {
    const name = nameOf(entry.path);
    const target = join(local, name);
    if (entry.kind === 'dir') {
      await mkdir(target).catch(async (error: NodeJS.ErrnoException) => {
        // A link that is there already must not lead out of the folder.
        if (error.code !== 'EEXIST' || !(await lstat(target)).isDirectory()) throw error;
      });
      count += await fetchFolder(files, entry.path, target, budget, options);
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
    throw new InvalidRequest(`${local} is a folder here: say what the file is to be`);
  }
  const part = join(dirname(local), `.${basename(local).slice(0, 100)}.${process.pid}.part`);
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
    await rm(part, { force: true });
  }
}

/** The last part of a path in the box. It may say anything. */
function nameOf(path: string): string {
  const name = path.slice(path.lastIndexOf('/') + 1);
  if (!name || name === '.' || name === '..' || name.includes('\0') || name.includes(sep)) {
    throw new InvalidRequest(`a name that this machine cannot have: ${JSON.stringify(path)}`);
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
      const sent = request({ socketPath, path: pathname + search, method: asked.method, headers, signal }, (message) => {
        const hasBody = ![204, 205, 304].includes(message.statusCode ?? 0);
        const body = Readable.toWeb(message) as ReadableStream<Uint8Array>;
        const given = Object.entries(message.headers).map(([name, value]) => [name, String(value)] as [string, string]);
        resolve(new Response(hasBody ? body : null, { status: message.statusCode, headers: given }));
      });
      sent.on('error', (error) => reject(signal.aborted ? signal.reason : error));
      if (asked.body) Readable.fromWeb(asked.body as never).pipe(sent);
      else sent.end();
    });
  };
}
