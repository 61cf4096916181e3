"use strict";
/**
 * One box per conversation, at a Hutch server: a shell and a Python that stay, and files.
 *
 * AnythingLLM has one tool per skill, so what to do is a parameter.
 */

const crypto = require("node:crypto");
const { Hutch, Told, handler, progress, report, seconds, shortened } = require("./hutch.js");

const CONVERSATION = "anythingllm.conversation"; // a label of sessions
const LINES = 500; // of a file that are shown, unless more are asked for

// For builds of AnythingLLM that pass no id: they load this file once for each conversation.
const otherwise = crypto.randomUUID();

const ACTIONS = { run, python, read, write, edit, ls, search, delete: remove };

module.exports.runtime = { handler: handler(act) };

async function act(skill, args) {
  const server = new Hutch(skill.runtimeArgs);
  const action = String(args.action || "run").toLowerCase();
  const conversation = String(skill.super?.handlerProps?.invocation?.uuid || otherwise);
  if (action === "reset") return reset(server, conversation);
  if (!Object.hasOwn(ACTIONS, action)) {
    throw new Told(
      `action is one of ${[...Object.keys(ACTIONS), "reset"].join(", ")}, not ${JSON.stringify(args.action)}.`,
    );
  }
  const say = (text) => skill.introspect?.(text);
  let session = await server.find(CONVERSATION, conversation);
  if (!session) {
    say("Starting a box.");
    const image = skill.runtimeArgs?.HUTCH_IMAGE;
    session = await server.open({
      ...(image ? { image } : {}),
      labels: { [CONVERSATION]: conversation },
      idle: 900,
      on_idle: "hibernate",
      ttl_seconds: 86400,
    });
  }
  return ACTIONS[action]({ server, id: session.id, args, say });
}

async function reset(server, conversation) {
  for (let old; (old = await server.find(CONVERSATION, conversation));) await server.end(old.id);
  return "The box was removed, with everything in it. The next call begins with a new one.";
}

async function run({ server, id, args, say }) {
  const command = wanted(args, "command");
  const timeout = seconds(args.timeout, 60);
  say(`Running: ${command.slice(0, 200)}`);
  return report(await server.shell(id, command, { timeout, onText: progress(say) }), timeout);
}

async function python({ server, id, args, say }) {
  const code = wanted(args, "code");
  const timeout = seconds(args.timeout, 60);
  say("Running Python.");
  const options = { seconds: timeout, onText: progress(say) };
  const cell = await server.stream(`sessions/${id}/contexts/main/run`, { code, timeout }, options);
  const shown = (cell.results ?? []).map(shownAs).filter(Boolean);
  const printed = [cell.logs?.stdout, ...shown, cell.logs?.stderr].filter(Boolean).join("\n").trimEnd();
  const text = shortened(printed);
  if (cell.timed_out)
    return `Stopped after ${timeout} s. ${cell.died ? "All variables are lost. " : ""}Its output until then:\n${text || "(none)"}`;
  if (cell.died)
    return `Python died (${cell.died}), and all variables are lost. The next call gets a new one.\n${text}`;
  if (cell.error)
    return `Failed: ${shortened(cell.error.traceback || `${cell.error.name}: ${cell.error.value}`)}\n${text}`.trimEnd();
  return text || "(no output)";
}

function shownAs(result) {
  if (result.png || result.jpeg || result.svg)
    return "[a picture, which cannot be shown here: save it to a file]";
  return result.text ?? "";
}

async function read({ server, id, args }) {
  const query = { path: wanted(args, "path") };
  const answer = await server.ask("GET", `sessions/${id}/files/content`, {
    query: { ...query, limit: "16777216" },
  });
  const text = await answer.text();
  const lines = text.split("\n");
  if (lines[lines.length - 1] === "") lines.pop();
  const offset = Math.max(0, Math.floor(Number(args.offset) || 0));
  const limit = Math.max(1, Math.floor(Number(args.limit) || LINES));
  const part = lines.slice(offset, offset + limit).map((line, n) => `${offset + n + 1}\t${line}`);
  const left = lines.length - offset - part.length;
  const more = left > 0 ? `\n[${left} more lines: read again with offset=${offset + part.length}]` : "";
  return shortened(part.join("\n")) + more || "(an empty file)";
}

async function write({ server, id, args }) {
  const path = wanted(args, "path");
  const body = typeof args.content === "string" ? args.content : missing("content");
  await server.ask("PUT", `sessions/${id}/files/content`, { query: { path }, body });
  return `Wrote ${Buffer.byteLength(body)} bytes to ${path}.`;
}

async function edit({ server, id, args }) {
  const json = { path: wanted(args, "path"), old: wanted(args, "oldText"), new: String(args.newText ?? "") };
  const { value } = await server.json("POST", `sessions/${id}/files/edit`, { json });
  return `Replaced ${value} place in ${json.path}.`;
}

async function ls({ server, id, args }) {
  const query = args.path ? { path: args.path } : {};
  const found = await server.json("GET", `sessions/${id}/files`, { query });
  const lines = found.map((entry) => {
    const name = entry.path.split("/").pop();
    if (entry.kind === "dir") return `${name}/`;
    return entry.kind === "link" ? `${name} -> ${entry.target}` : `${name} ${entry.size}`;
  });
  return shortened(lines.join("\n")) || "(an empty folder)";
}

async function search({ server, id, args }) {
  const query = { pattern: wanted(args, "pattern"), limit: "200" };
  if (args.path) query.path = args.path;
  const found = await server.json("GET", `sessions/${id}/files/search`, { query });
  return (
    shortened(found.map((match) => `${match.path}:${match.line}:${match.text}`).join("\n")) ||
    "(no line matches)"
  );
}

async function remove({ server, id, args }) {
  const path = wanted(args, "path");
  await server.ask("DELETE", `sessions/${id}/files`, { query: { path } });
  return `Deleted ${path}.`;
}

function wanted(args, name) {
  return typeof args[name] === "string" && args[name] ? args[name] : missing(name);
}

function missing(name) {
  throw new Told(`${name} is missing: this action needs it.`);
}
