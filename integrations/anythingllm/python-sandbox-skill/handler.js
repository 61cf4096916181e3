"use strict";
/**
 * Runs a command in a copy of a Python project, in a box at a Hutch server.
 *
 * `ephemeral`: a new box for each call. `persistent`: the project's own box, which stays; files that
 * changed in the project since the last call are copied in, and overwrite those of the box.
 */

const crypto = require("node:crypto");
const fs = require("node:fs");
const path = require("node:path");
const { Readable } = require("node:stream");
const { Hutch, Told, handler, ignore, progress, report, seconds } = require("./hutch.js");
const project = require("./project.js");

const PROJECT = "anythingllm.project"; // labels of sessions
const NEEDS = "anythingllm.requirements";
const SENT = "/tmp/.anythingllm-project.json"; // in the box: a list of what was copied into it
const KEPT = 16 * 1024 * 1024; // bytes of that list
const GONE = 500; // files that one call removes from the box
const COPYING = 600; // seconds for copying into the box
const FILES = 500; // that one call copies back
const SIZE = 100 * 1024 * 1024; // bytes of each

module.exports.runtime = { handler: handler(run) };

async function run(skill, args) {
  const server = new Hutch(skill.runtimeArgs);
  const say = (text) => skill.introspect?.(text);
  const kept = modeOf(args.mode) === "persistent";
  const timeout = seconds(args.timeout, 30);
  const top = project.locate(args.projectPath, skill.runtimeArgs?.PROJECTS_FOLDER);
  const command = typeof args.command === "string" ? args.command.trim() : "";
  const mark = crypto.createHash("sha256").update(top).digest("hex").slice(0, 32);
  const notes = [];

  if (isTrue(args.reset)) {
    for (let old; (old = await server.find(PROJECT, mark));) await server.end(old.id);
    say("The project's box is gone.");
    if (!command) return "The project's box was removed: the next persistent call begins with a new one.";
  }
  if (!command)
    throw new Told("command is missing: give a command to run in the project, like `pytest -q`.");

  const needs = requirements(top);
  let session = kept ? await server.find(PROJECT, mark) : null;
  if (session && (session.labels[NEEDS] ?? "") !== needs.mark) {
    notes.push(
      "requirements.txt has changed since this box was made: call once with reset=true to install it again.",
    );
  }
  if (!session) {
    say(needs.packages.length ? `Starting a box with ${needs.packages.length} packages.` : "Starting a box.");
    session = await open(server, skill.runtimeArgs?.HUTCH_IMAGE, kept, timeout, mark, needs, notes);
  }
  try {
    await upload(server, session.id, top, kept, say, notes);
    say(`Running: ${command.slice(0, 200)}`);
    const result = await server.shell(session.id, command, { timeout, onText: progress(say) });
    if (result.exit_code !== 0 && /\bpip3? install\b/.test(command)) {
      notes.push(
        "A box has no network, so pip downloads nothing in it. List packages in requirements.txt, or " +
          "have the operator build an image.",
      );
    }
    const back = await copyBack(server, session.id, session.workdir, top, args.copyBack, notes);
    if (back.length) say(`Copied back ${back.length} files.`);
    const brought = back.length ? `\n\nCopied back into the project: ${back.join(", ")}` : "";
    return report(result, timeout) + brought + notes.map((note) => `\n\nNote: ${note}`).join("");
  } finally {
    // Also after a failure. If this process dies first, the box ends at its deadline.
    if (!kept) await server.end(session.id);
  }
}

function modeOf(mode) {
  const word = String(mode || "ephemeral").toLowerCase();
  if (word !== "ephemeral" && word !== "persistent") {
    throw new Told(`mode is "ephemeral" or "persistent", not ${JSON.stringify(mode)}.`);
  }
  return word;
}

function isTrue(value) {
  return value === true || String(value).toLowerCase() === "true";
}

async function open(server, image, kept, timeout, mark, needs, notes) {
  const life = kept
    ? { idle: 1800, on_idle: "hibernate", labels: { [PROJECT]: mark, [NEEDS]: needs.mark } }
    : { ttl_seconds: timeout + 900, labels: { "anythingllm.skill": "python-sandbox-skill" } };
  if (image) return server.open({ ...life, image });
  notes.push(...needs.notes);
  if (!needs.packages.length) return server.open(life);
  try {
    return await server.open({ ...life, packages: needs.packages });
  } catch (error) {
    if (!(error instanceof Told) || error.code === "") throw error;
    notes.push(
      `requirements.txt was not installed, because the server refused: ${error.message}. Its operator can run ` +
        "`hutch image build NAME --requirements requirements.txt` and set HUTCH_IMAGE in the settings of " +
        "this skill to NAME.",
    );
    return server.open({ ...life, labels: { ...life.labels, [NEEDS]: needs.mark } });
  }
}

/** Packages by name and version. A server accepts nothing else: no URL, no path, no option. */
function requirements(top) {
  const file = path.join(top, "requirements.txt");
  const there = fs.lstatSync(file, { throwIfNoEntry: false });
  if (!there?.isFile()) return { packages: [], notes: [], mark: "" };
  const text = fs.readFileSync(file, "utf8");
  const lines = text
    .split("\n")
    .map((line) => line.replace(/(^|\s)#.*/, "").trim())
    .filter(Boolean);
  const plain = (line) =>
    /^[A-Za-z0-9][\w.-]*\s*(\[[\w\s,.-]*\])?\s*([<>=!~][^;@/\\:]*)?(;.*)?$/.test(line) &&
    !/[@/\\:]/.test(line);
  const packages = lines.filter(plain);
  const others = lines.filter((line) => !plain(line));
  const notes = others.length
    ? [`not installed, because a server takes names and versions only: ${others.join(", ")}`]
    : [];
  return { packages, notes, mark: crypto.createHash("sha256").update(text).digest("hex").slice(0, 32) };
}

async function upload(server, id, top, kept, say, notes) {
  const end = Date.now() + COPYING * 1000;
  const ask = (method, route, options) => {
    const seconds = (end - Date.now()) / 1000;
    if (seconds <= 0) throw new Told(`Copying the project took more than ${COPYING} s, and was stopped.`);
    return server.ask(method, `sessions/${id}/${route}`, { ...options, seconds });
  };
  const skipped = [];
  const now = project.scan(top, (name) => skipped.push(name));
  const before = project.known(kept ? await sent(ask) : {});
  const { changed, gone } = project.changes(now, before);
  if (gone.length > GONE) {
    notes.push(`of ${gone.length} files that the project no longer has, the box still has some: use reset=true.`);
  }
  for (const name of gone.slice(0, GONE)) {
    // A folder stays if the box has put files of its own into it.
    await ask("DELETE", "files", { query: { path: name } }).catch(ignore("not_found", "conflict"));
  }
  if (changed.length) {
    say(`Copying ${changed.length} files and folders of the project.`);
    const skip = (name) => {
      // The box still has the earlier state, which the next call compares with.
      skipped.push(name);
      if (before[name]) now[name] = before[name];
      else delete now[name];
    };
    const body = Readable.toWeb(Readable.from(project.tar(top, now, changed, skip)));
    await ask("PUT", "tar", { body });
  }
  if (kept) {
    const body = JSON.stringify(now);
    await ask("PUT", "files/content", { query: { path: SENT }, body });
  }
  if (skipped.length) {
    const some = skipped.slice(0, 10).join(", ") + (skipped.length > 10 ? ", ..." : "");
    notes.push(`not copied into the box, because they could not be read: ${some}`);
  }
}

/** The list of what was copied before, which is kept in the box. */
async function sent(ask) {
  try {
    const query = { path: SENT, limit: String(KEPT) };
    return await (await ask("GET", "files/content", { query })).json();
  } catch {
    return {};
  }
}

async function copyBack(server, id, workdir, top, wanted, notes) {
  const saved = [];
  for (const name of String(wanted ?? "")
    .split(/[,\n]/)
    .map((word) => word.trim())
    .filter(Boolean)) {
    try {
      const below = project.parts(name).join("/");
      for (const file of await filesOf(server, id, `${workdir}/${below}`)) {
        if (saved.length >= FILES) throw new Told(`more than ${FILES} files: the rest stays in the box`);
        const inside = file.path.slice(workdir.length + 1);
        if (file.size > SIZE) throw new Told(`${inside} is larger than ${SIZE / 1024 / 1024} MiB`);
        const query = { path: file.path, limit: String(SIZE) };
        const answer = await server.ask("GET", `sessions/${id}/files/content`, { query });
        await project.save(top, inside, Buffer.from(await answer.arrayBuffer()), file.mode);
        saved.push(inside);
      }
    } catch (error) {
      if (!(error instanceof Told)) throw error;
      notes.push(`not copied back: ${name}: ${error.message}`);
    }
  }
  return saved;
}

/** A file, or all files of a folder. Links are left out. */
async function filesOf(server, id, name) {
  const one = await server.json("GET", `sessions/${id}/files/stat`, { query: { path: name } });
  if (one.kind === "file") return [{ ...one, path: name }];
  if (one.kind !== "dir") throw new Told("it is a link, or a special file");
  const all = await server.json("GET", `sessions/${id}/files`, { query: { path: name, depth: "32" } });
  const inside = all.filter((entry) => entry.kind === "file" && entry.path.startsWith(`${name}/`));
  return inside.sort((one, other) => (one.path < other.path ? -1 : 1));
}
