"use strict";
/**
 * A project's folder on this machine: read as a tar, and written with results from a box.
 *
 * Links are never followed, so nothing outside of the folder is read or written.
 */

const crypto = require("node:crypto");
const fs = require("node:fs");
const path = require("node:path");
const { Told } = require("./hutch.js");

// Files of tools, for this machine, which they create again.
const LEFT_OUT = new Set([
  "__pycache__",
  ".pytest_cache",
  ".mypy_cache",
  ".ruff_cache",
  ".tox",
  ".nox",
  ".venv",
  "venv",
  "node_modules",
  ".DS_Store",
]);
const { O_RDONLY, O_WRONLY, O_CREAT, O_EXCL } = fs.constants;
const O_NOFOLLOW = fs.constants.O_NOFOLLOW ?? 0; // Windows has none
const O_NONBLOCK = fs.constants.O_NONBLOCK ?? 0;
const BLOCK = 512;
const ENTRIES = 100000; // that are read of the list in a box

/** The real path of a project: a folder inside the one that the operator allows. */
function locate(projectPath, allowed) {
  if (!allowed) {
    throw new Told(
      "No project may be used yet: set PROJECTS_FOLDER in the settings of this skill to the folder " +
        "that has your projects.",
    );
  }
  if (typeof projectPath !== "string" || !path.isAbsolute(projectPath)) {
    throw new Told("projectPath must be the absolute path of the project's folder.");
  }
  const top = real(allowed, "PROJECTS_FOLDER");
  const project = real(projectPath, "projectPath");
  if (!fs.statSync(project).isDirectory()) throw new Told(`projectPath is no folder: ${projectPath}`);
  const below = path.relative(top, project);
  if (below === ".." || below.startsWith(`..${path.sep}`) || path.isAbsolute(below)) {
    throw new Told(`projectPath must be inside ${allowed}: only projects there may be used.`);
  }
  return project;
}

function real(name, what) {
  try {
    return fs.realpathSync(name);
  } catch {
    throw new Told(`${what}: there is no folder ${name}`);
  }
}

/**
 * Everything in the folder, by relative path, folders before their contents. What cannot be read
 * (gone, forbidden, or with a name that is not UTF-8) is left out, and passed to `skip`.
 */
function scan(top, skip) {
  const found = Object.create(null); // a file may be called __proto__
  const todo = [""];
  while (todo.length) {
    const below = todo.shift();
    const list = () => fs.readdirSync(path.join(top, below)).sort();
    for (const name of (below ? tried(list, below, skip) : list()) ?? []) {
      if (LEFT_OUT.has(name)) continue;
      const inside = below ? `${below}/${name}` : name;
      const entry = tried(() => entryOf(path.join(top, inside)), inside, skip);
      if (!entry) continue;
      found[inside] = entry;
      if (entry[0] === "dir" && !fs.existsSync(path.join(top, inside, "pyvenv.cfg"))) todo.push(inside);
    }
  }
  return found;
}

function entryOf(name) {
  const stat = fs.lstatSync(name);
  if (stat.isDirectory()) return ["dir", 0, 0, stat.mode & 0o777];
  if (stat.isSymbolicLink()) return ["link", 0, 0, 0o777, fs.readlinkSync(name)];
  return stat.isFile() ? ["file", stat.size, Math.floor(stat.mtimeMs), stat.mode & 0o777] : null;
}

function tried(read, name, skip) {
  try {
    return read();
  } catch {
    skip(name);
    return null;
  }
}

/** A scan that was kept in a box; untrusted, because code in the box may have changed it. */
function known(kept) {
  const found = Object.create(null);
  const names = kept && typeof kept === "object" ? Object.keys(kept) : [];
  if (names.length > ENTRIES) return found;
  const plain = (value) => typeof value === "string" || typeof value === "number";
  for (const name of names) {
    const entry = kept[name];
    const fits = Array.isArray(entry) && entry.length <= 5 && entry.every(plain);
    if (fits && isInside(name)) found[name] = entry;
  }
  return found;
}

/** What to send and what to remove, so that the box has what changed here since `before`. */
function changes(now, before) {
  const same = (name) => JSON.stringify(now[name]) === JSON.stringify(before[name]);
  const changed = Object.keys(now).filter((name) => !same(name));
  const gone = Object.keys(before)
    .filter((name) => !(name in now))
    .sort()
    .reverse();
  return { changed, gone };
}

/** These entries of a scan as a tar, in pieces. Files that are gone are passed to `skip`. */
async function* tar(top, tree, names, skip) {
  for (const name of names) {
    if (tree[name][0] !== "file") {
      yield* headers(name, tree[name]);
      continue;
    }
    const file = await opened(path.join(top, name));
    if (!file) {
      skip(name);
      continue;
    }
    try {
      yield* headers(name, tree[name]);
      yield* contents(file, tree[name][1]);
    } finally {
      await file.close();
    }
  }
  yield Buffer.alloc(2 * BLOCK);
}

function* headers(name, [kind, size, mtime, mode, target = ""]) {
  const long = {};
  if (Buffer.byteLength(name) > 99) long.path = name;
  if (Buffer.byteLength(target) > 99) long.linkpath = target;
  if (Object.keys(long).length) {
    const records = Buffer.from(Object.entries(long).map(record).join(""));
    yield header("pax", "x", { size: records.length });
    yield padded(records);
  }
  const type = { dir: "5", link: "2", file: "0" }[kind];
  yield header(name, type, { size, mtime, mode, target });
}

async function opened(name) {
  let file;
  try {
    file = await fs.promises.open(name, O_RDONLY | O_NOFOLLOW | O_NONBLOCK);
  } catch {
    return null;
  }
  if ((await file.stat()).isFile()) return file;
  await file.close();
  return null;
}

/** Exactly as many bytes as the header says, even if the file changes while it is read. */
async function* contents(file, size) {
  let left = size;
  while (left > 0) {
    const piece = Buffer.alloc(Math.min(left, 256 * 1024));
    const { bytesRead } = await file.read(piece, 0, piece.length);
    const got = bytesRead || piece.length; // a file that became shorter is padded with zeros
    left -= got;
    yield piece.subarray(0, got);
  }
  if (size % BLOCK) yield Buffer.alloc(BLOCK - (size % BLOCK));
}

function header(name, type, { size = 0, mtime = 0, mode = 0o644, target = "" }) {
  const block = Buffer.alloc(BLOCK);
  const octal = (value, at, digits) => block.write(value.toString(8).padStart(digits, "0"), at);
  Buffer.from(name).copy(block, 0, 0, 99);
  octal(mode, 100, 7);
  octal(0, 108, 7);
  octal(0, 116, 7);
  octal(size, 124, 11);
  octal(Math.max(0, Math.floor(mtime / 1000)), 136, 11);
  block.fill(" ", 148, 156);
  block.write(type, 156);
  Buffer.from(target).copy(block, 157, 0, 99);
  block.write("ustar\u000000", 257);
  const sum = block.reduce((total, byte) => total + byte, 0);
  block.write(`${sum.toString(8).padStart(6, "0")}\0 `, 148);
  return block;
}

/** A record of a pax header, which starts with its own length. */
function record([key, value]) {
  const rest = ` ${key}=${value}\n`;
  let length = Buffer.byteLength(rest);
  while (length !== Buffer.byteLength(`${length}${rest}`)) length = Buffer.byteLength(`${length}${rest}`);
  return `${length}${rest}`;
}

function padded(data) {
  return Buffer.concat([data, Buffer.alloc((BLOCK - (data.length % BLOCK)) % BLOCK)]);
}

function isInside(name) {
  const odd = (part) => part === ".." || /[\0\\]/.test(part) || (path.sep === "\\" && part.includes(":"));
  const found = name.split("/");
  return !name.startsWith("/") && !found.some(odd) && found.some((part) => part !== "." && part !== "");
}

/** The parts of an untrusted path. Throws Told if it leads out of the project, or into .git. */
function parts(name) {
  if (!isInside(name)) throw new Told(`${JSON.stringify(name)} is not a path inside the project.`);
  const found = name.split("/").filter((part) => part !== "." && part !== "");
  // Git runs hooks and commands of its configuration, and would run them on this machine.
  if (found.some(isGit)) throw new Told("Nothing is copied back into .git.");
  return found;
}

/** Whether a file system may take this name for .git: some ignore its ending, or invisible marks. */
function isGit(part) {
  const visible = part.normalize("NFKC").replace(/[\p{Cc}\p{Default_Ignorable_Code_Point}\p{Cf}]/gu, "");
  return /^(\.git|git~\d+)[.\s]*(:|$)/i.test(visible);
}

/** Write a file of the project: whole or not at all, and through no link. */
async function save(top, name, data, mode) {
  const found = parts(name);
  let folder = top;
  for (const part of found.slice(0, -1)) {
    folder = path.join(folder, part);
    const there = fs.lstatSync(folder, { throwIfNoEntry: false });
    if (!there) fs.mkdirSync(folder);
    else if (!there.isDirectory())
      throw new Told(`${name}: ${part} is a link or a file of the project, and stays as it is.`);
  }
  const last = path.join(folder, found[found.length - 1]);
  const there = fs.lstatSync(last, { throwIfNoEntry: false });
  if (there && !there.isFile())
    throw new Told(`${name} is a link or a folder of the project, and stays as it is.`);
  const fresh = path.join(folder, `.hutch-${crypto.randomBytes(8).toString("hex")}`);
  const file = await fs.promises.open(
    fresh,
    O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW,
    mode & 0o111 ? 0o755 : 0o644,
  );
  try {
    await file.writeFile(data);
    await file.close();
    fs.renameSync(fresh, last);
  } catch (error) {
    await file.close().catch(() => {});
    fs.rmSync(fresh, { force: true });
    throw error;
  }
}

module.exports = { changes, known, locate, parts, save, scan, tar };
