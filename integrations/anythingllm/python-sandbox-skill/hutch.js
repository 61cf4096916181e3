"use strict";
/**
 * Boxes at a Hutch server, over HTTP. Nothing runs on this machine: no shell, no process.
 *
 * Each skill's folder has a copy of this file, because a skill must stand alone.
 */

const SHOWN = 20000; // characters of output that a model gets; of more, both ends
const PROGRESS_MS = 3000;

/** An error whose message is for the model, and is shown as it is. */
class Told extends Error {
  constructor(message, code = "") {
    super(message);
    this.code = code;
  }
}

class Hutch {
  constructor(settings) {
    const { HUTCH_URL, HUTCH_API_KEY } = settings ?? {};
    this.url = String(HUTCH_URL || "http://127.0.0.1:8080").replace(/\/+$/, "");
    this.key = HUTCH_API_KEY ? String(HUTCH_API_KEY) : "";
  }

  /** The server's answer, as a Response. Throws Told if the server refuses or cannot be reached. */
  async ask(method, route, { query = {}, json, body, accept, seconds = 120 } = {}) {
    const address = `${this.url}/v1/${route}?${new URLSearchParams(query)}`;
    const headers = { Accept: accept ?? "application/json" };
    if (this.key) headers.Authorization = `Bearer ${this.key}`;
    if (json !== undefined) headers["Content-Type"] = "application/json";
    const options = { method, headers, signal: AbortSignal.timeout(seconds * 1000) };
    if (json !== undefined) options.body = JSON.stringify(json);
    if (body !== undefined) Object.assign(options, { body, duplex: "half" });
    let answer;
    try {
      answer = await fetch(address, options);
    } catch (error) {
      throw unreachable(this.url, error);
    }
    if (answer.ok) return answer;
    const said = await answer.json().catch(() => ({}));
    throw refused(answer.status, said);
  }

  async json(method, route, options) {
    return (await this.ask(method, route, options)).json();
  }

  /** The newest live session that has this label, or null. */
  async find(label, value) {
    const query = { label: `${label}=${value}`, status: "live", limit: "1" };
    const [found] = await this.json("GET", "sessions", { query });
    return found ?? null;
  }

  async open(order) {
    return this.json("POST", "sessions", { json: order, seconds: 600 });
  }

  /** End a session. It is not an error if it is gone already. */
  async end(id) {
    await this.ask("DELETE", `sessions/${id}`).catch(ignore("session_not_found"));
  }

  /**
   * Run something that streams, and return its last event. `onText` gets the output as it arrives.
   * If the connection closes early, the server kills what runs.
   */
  async stream(route, json, { seconds, onText = () => {} }) {
    const options = { json, accept: "text/event-stream", seconds: seconds + 60 };
    const answer = await this.ask("POST", route, options);
    for await (const [event, data] of events(answer.body)) {
      if (event === "chunk") onText(data.text ?? "");
      else if (event === "done") return data;
      else if (event === "error") throw refused(0, data);
    }
    throw new Told("The server closed the connection in the middle of its answer. Try again.");
  }

  async shell(id, command, { timeout, onText }) {
    const route = `sessions/${id}/shells/main/run`;
    return this.stream(route, { command, timeout }, { seconds: timeout, onText });
  }
}

async function* events(body) {
  const decoder = new TextDecoder();
  let waiting = "";
  for await (const piece of body) {
    waiting += decoder.decode(piece, { stream: true });
    let end;
    while ((end = waiting.indexOf("\n\n")) >= 0) {
      const lines = waiting.slice(0, end).split("\n");
      waiting = waiting.slice(end + 2);
      const field = (name) => lines.find((line) => line.startsWith(`${name}: `))?.slice(name.length + 2);
      if (field("data")) yield [field("event"), JSON.parse(field("data"))];
    }
  }
}

function unreachable(url, error) {
  if (error?.name === "TimeoutError") return new Told(`The Hutch server at ${url} did not answer in time.`);
  const why = error?.cause?.code || error?.cause?.message || error?.message || "no answer";
  return new Told(
    `The Hutch server at ${url} cannot be reached (${why}). Start it with \`hutch serve\`, or correct ` +
      "HUTCH_URL in the settings of this skill. From the Docker build of AnythingLLM, the machine " +
      "itself is http://host.docker.internal:PORT.",
  );
}

function refused(status, said) {
  const message = said.message ?? `status ${status}`;
  if (status === 421) {
    return new Told(
      `The Hutch server does not accept this host name. Its operator can add it to allowed_hosts. (${message})`,
    );
  }
  if (status === 401) {
    return new Told(
      `The Hutch server needs a key: set HUTCH_API_KEY in the settings of this skill. (${message})`,
    );
  }
  return new Told(`Hutch: ${message}`, said.code ?? "");
}

function ignore(...codes) {
  return (error) => {
    if (!codes.includes(error?.code)) throw error;
  };
}

/** What a command did, as a model reads it. */
function report(result, timeout) {
  const output = shortened(result.output ?? "");
  if (result.timed_out) {
    return `Stopped after ${timeout} s, with everything it had started. Its output until then:\n${output || "(none)"}`;
  }
  if (result.exit_code !== 0) return `Failed with exit code ${result.exit_code}:\n${output || "(no output)"}`;
  return output || "(no output; exit code 0)";
}

function shortened(text) {
  if (text.length <= SHOWN) return text;
  const half = SHOWN / 2;
  const left = text.length - SHOWN;
  return (
    `${text.slice(0, half)}\n[... ${left} characters are left out here: write the output to a file, ` +
    `and read the part that you need ...]\n${text.slice(-half)}`
  );
}

/** Shows the last line of a running command from time to time. */
function progress(introspect) {
  let last = Date.now();
  return (text) => {
    const line = text.trimEnd().split("\n").pop().trim();
    if (!line || Date.now() - last < PROGRESS_MS) return;
    last = Date.now();
    introspect(line.slice(0, 200));
  };
}

/** Seconds: a number, or the text of one, within bounds. */
function seconds(value, otherwise) {
  if (value === undefined || value === null || value === "") return otherwise;
  const number = Number(value);
  if (!Number.isFinite(number) || number <= 0) {
    throw new Told(`timeout is a number of seconds above 0, not ${JSON.stringify(value)}.`);
  }
  return Math.min(number, 3600);
}

/** A handler for AnythingLLM: it always answers with text, and never throws. */
function handler(work) {
  return async function (args) {
    try {
      return String(await work(this, args ?? {}));
    } catch (error) {
      if (error instanceof Told) return error.message;
      this.logger?.(`${this.name}: ${error?.stack ?? error}`);
      return `The skill failed: ${error?.message ?? error}`;
    }
  };
}

module.exports = { Hutch, Told, handler, ignore, progress, report, seconds, shortened };
