/** The Python, TypeScript and curl code of what was done with a sandbox. */

/** One thing that was done. The code of a list of them begins with a "create". */
export type Action =
  | ({ do: 'create' } & CreateAction)
  | { do: 'shell'; command: string }
  | { do: 'code'; code: string; context?: string }
  | { do: 'write'; path: string; text: string }
  | { do: 'read'; path: string }
  | { do: 'fetch'; port: number; path: string; method: string; body?: string }
  | { do: 'extend'; ttl: number }
  | { do: 'hibernate' | 'wake' | 'close' };

export interface CreateAction {
  image?: string;
  memory?: string;
  cpus?: number;
  pids?: number;
  disk?: string;
  ttl?: number;
  idle?: number;
  onIdle?: string;
  relax?: string[];
  workspaceId?: string;
  labels?: Record<string, string>;
  env?: Record<string, string>;
}

export type Language = 'python' | 'typescript' | 'curl';

/** What the code does: that, and what a page did before without being asked. */
type Step = Action | { do: 'context'; context: string };

function stepsOf(actions: readonly Action[]): Step[] {
  const contexts = new Set<string>();
  return actions.flatMap((action) => {
    const context = action.do === 'code' ? action.context : undefined;
    if (!context || contexts.has(context)) return [action];
    contexts.add(context);
    return [{ do: 'context', context }, action];
  });
}

export function generate(language: Language, actions: readonly Action[], url: string): string {
  const known = actions.length ? stepsOf(actions) : [{ do: 'create' } as Action];
  if (language === 'python') return python(known, url);
  return language === 'typescript' ? typescript(known, url) : curl(known, url);
}

/** Signs that a reader does not see, or that change how the text around them is shown. */
const HIDDEN =
  /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u00ad\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb]|[\u{e0000}-\u{e0fff}]|[\ud800-\udbff](?![\udc00-\udfff])|(?<![\ud800-\udbff])[\udc00-\udfff]/gu;

const hex = (sign: string, digits: number) =>
  sign.codePointAt(0)!.toString(16).padStart(digits, '0');

function pythonHidden(sign: string): string {
  const code = sign.codePointAt(0)!;
  if (code < 0x100) return sign === '\r' ? '\\r' : `\\x${hex(sign, 2)}`;
  return code < 0x10000 ? `\\u${hex(sign, 4)}` : `\\U${hex(sign, 8)}`;
}

export function pythonText(text: string): string {
  const plain = text.replaceAll('\\', '\\\\').replace(HIDDEN, pythonHidden);
  if (plain.includes('\n')) {
    const quoted = plain.replace(/"""|"+$/g, (quotes) => quotes.replaceAll('"', '\\"'));
    return `"""\\\n${quoted}"""`;
  }
  return `"${plain.replaceAll('"', '\\"').replaceAll('\t', '\\t')}"`;
}

function scriptHidden(sign: string): string {
  const code = sign.codePointAt(0)!;
  if (code < 0x100) return sign === '\r' ? '\\r' : `\\x${hex(sign, 2)}`;
  return code < 0x10000 ? `\\u${hex(sign, 4)}` : `\\u{${hex(sign, 1)}}`;
}

export function typescriptText(text: string): string {
  const plain = text.replaceAll('\\', '\\\\').replace(HIDDEN, scriptHidden);
  if (plain.includes('\n')) {
    return `\`${plain.replaceAll('`', '\\`').replaceAll('${', '\\${')}\``;
  }
  return `'${plain.replaceAll("'", "\\'").replaceAll('\t', '\\t')}'`;
}

/** One word of bash. It cannot hold NUL. What would be hidden is written as its bytes. */
export function shellWord(text: string): string {
  if (/^[A-Za-z0-9_@%+=:,./-]+$/.test(text)) return text;
  if (!text.match(HIDDEN)) return `'${text.replaceAll("'", "'\\''")}'`;
  const bytes = (sign: string) =>
    [...new TextEncoder().encode(sign)].map((byte) => `\\x${byte.toString(16).padStart(2, '0')}`).join('');
  const plain = text.replaceAll('\0', '').replaceAll('\\', '\\\\').replaceAll("'", "\\'");
  return `$'${plain.replaceAll('\n', '\\n').replaceAll('\t', '\\t').replace(HIDDEN, bytes)}'`;
}

/** JSON in which nothing is hidden. */
function json(value: unknown): string {
  const escape = (sign: string) =>
    [...Array(sign.length).keys()]
      .map((at) => `\\u${sign.charCodeAt(at).toString(16).padStart(4, '0')}`)
      .join('');
  return JSON.stringify(value).replace(HIDDEN, escape);
}

const isSet = (value: unknown): boolean => value !== undefined && value !== '';

/** The options that were chosen, in the order in which they are usually read. */
function chosen(action: CreateAction): [keyof CreateAction, unknown][] {
  const { image, memory, cpus, pids, disk, relax, ttl, idle, onIdle, workspaceId, labels, env } = action;
  const all = { image, memory, cpus, pids, disk, relax, ttl, idle, onIdle, workspaceId, labels, env };
  return Object.entries(all).filter(([, value]) => isSet(value)) as [keyof CreateAction, unknown][];
}

const snake = (name: string) => name.replace(/[A-Z]/g, (letter) => `_${letter.toLowerCase()}`);

// --- Python -----------------------------------------------------------------------------

function pythonValue(value: unknown): string {
  if (typeof value === 'string') return pythonText(value);
  if (Array.isArray(value)) return `[${value.map(pythonValue).join(', ')}]`;
  if (typeof value === 'object' && value !== null) {
    const pairs = Object.entries(value).map(([name, one]) => `${pythonText(name)}: ${pythonValue(one)}`);
    return `{${pairs.join(', ')}}`;
  }
  return String(value);
}

function python(actions: readonly Step[], url: string): string {
  const ended = actions.some((action) => action.do === 'close');
  const body = actions.flatMap((action) => pythonLines(action));
  const needsHttp = actions.some((action) => action.do === 'fetch');
  const head = [
    '# in a clone of Hutch: pip install .',
    `# export HUTCH_URL=${shellWord(url)}`,
    '# export HUTCH_API_KEY=…   (your key)',
    ...(needsHttp ? ['import os', 'from urllib.request import Request, urlopen', ''] : []),
    'from hutch import Sandbox',
    '',
  ];
  const tail = ended ? [] : ['# sandbox.close()  # or it ends at its deadline'];
  return `${[...head, ...body, ...tail].join('\n')}\n`;
}

function pythonLines(action: Step): string[] {
  switch (action.do) {
    case 'create': {
      const options = chosen(action).map(([name, value]) => `${snake(name)}=${pythonValue(value)}`);
      return [`sandbox = Sandbox.create(${options.join(', ')})`];
    }
    case 'shell':
      return [`result = sandbox.shell.run(${pythonText(action.command)})`, 'print(result.output, end="")'];
    case 'context':
      return [`sandbox.create_code_context(${pythonText(action.context)})`];
    case 'code': {
      const context = action.context ? `, context=${pythonText(action.context)}` : '';
      return [
        `execution = sandbox.run_code(${pythonText(action.code)}${context})`,
        'print(execution.logs.stdout, execution.text, execution.error)',
      ];
    }
    case 'write':
      return [`sandbox.files.write(${pythonText(action.path)}, ${pythonText(action.text)})`];
    case 'read':
      return [`print(sandbox.files.read(${pythonText(action.path)}))`];
    case 'fetch': {
      const path = `/v1/sessions/{sandbox.id}/ports/${action.port}/http/`;
      const data = isSet(action.body) ? `, data=${pythonText(action.body!)}.encode()` : '';
      return [
        'headers = {"Authorization": "Bearer " + os.environ["HUTCH_API_KEY"]}',
        `url = os.environ["HUTCH_URL"] + f"${path}" + ${pythonText(portPath(action.path))}`,
        `request = Request(url, method=${pythonText(action.method)}, headers=headers${data})`,
        'print(urlopen(request).read().decode())',
      ];
    }
    case 'extend':
      return [`sandbox.extend(${action.ttl})`];
    case 'hibernate':
      return ['sandbox.hibernate()'];
    case 'wake':
      return ['sandbox.wake()'];
    case 'close':
      return ['sandbox.close()'];
  }
}

// --- TypeScript -------------------------------------------------------------------------

const isName = (text: string) => /^[A-Za-z_][A-Za-z0-9_]*$/.test(text) && text !== '__proto__';

function typescriptValue(value: unknown): string {
  if (typeof value === 'string') return typescriptText(value);
  if (Array.isArray(value)) return `[${value.map(typescriptValue).join(', ')}]`;
  if (typeof value === 'object' && value !== null) {
    const pairs = Object.entries(value).map(([name, one]) => {
      // Computed: a literal key "__proto__" would set what the object inherits from.
      const key = isName(name) ? name : `[${typescriptText(name)}]`;
      return `${key}: ${typescriptValue(one)}`;
    });
    return pairs.length ? `{ ${pairs.join(', ')} }` : '{}';
  }
  return String(value);
}

function typescript(actions: readonly Step[], url: string): string {
  const ended = actions.some((action) => action.do === 'close');
  const times: Record<string, number> = {};
  const body = actions.flatMap((action) => {
    const count = (times[action.do] = (times[action.do] ?? 0) + 1);
    return typescriptLines(action, count === 1 ? '' : String(count));
  });
  const head = [
    '// npm install CLONE/packages/sdk, once it is built there: npm ci --ignore-scripts && npm run build',
    `// export HUTCH_URL=${shellWord(url)}`,
    '// export HUTCH_API_KEY=…   (your key)',
    "import { Sandbox } from 'hutch';",
    '',
  ];
  const tail = ended ? [] : ['// await sandbox.close();  // or it ends at its deadline'];
  return `${[...head, ...body, ...tail].join('\n')}\n`;
}

function typescriptLines(action: Step, number: string): string[] {
  switch (action.do) {
    case 'create': {
      const options = chosen(action);
      const given = options.length ? typescriptValue(Object.fromEntries(options)) : '';
      return [`const sandbox = await Sandbox.create(${given});`];
    }
    case 'shell':
      return [
        `const result${number} = await sandbox.shell.run(${typescriptText(action.command)});`,
        `console.log(result${number}.output);`,
      ];
    case 'context':
      return [`await sandbox.createCodeContext(${typescriptText(action.context)});`];
    case 'code': {
      const options = action.context ? `, { context: ${typescriptText(action.context)} }` : '';
      const name = `execution${number}`;
      return [
        `const ${name} = await sandbox.runCode(${typescriptText(action.code)}${options});`,
        `console.log(${name}.logs.stdout, ${name}.text, ${name}.error);`,
      ];
    }
    case 'write':
      return [`await sandbox.files.write(${typescriptText(action.path)}, ${typescriptText(action.text)});`];
    case 'read':
      return [`console.log(await sandbox.files.read(${typescriptText(action.path)}));`];
    case 'fetch': {
      const init: Record<string, string> = {};
      if (action.method !== 'GET') init.method = action.method;
      if (isSet(action.body)) init.body = action.body!;
      const options = Object.keys(init).length ? `, ${typescriptValue(init)}` : '';
      return [
        `const response${number} = await sandbox.fetch(${action.port}, ${typescriptText(action.path)}${options});`,
        `console.log(response${number}.status, await response${number}.text());`,
      ];
    }
    case 'extend':
      return [`await sandbox.extend(${action.ttl});`];
    case 'hibernate':
      return ['await sandbox.hibernate();'];
    case 'wake':
      return ['await sandbox.wake();'];
    case 'close':
      return ['await sandbox.close();'];
  }
}

// --- curl -------------------------------------------------------------------------------

const UNITS: Record<string, number> = { '': 1, k: 1024, m: 1024 ** 2, g: 1024 ** 3, t: 1024 ** 4 };

/** The API takes bytes only. */
function bytesOf(size: string): number | string {
  const found = /^(\d+(?:\.\d+)?)\s*([kmgt]?)i?b?$/i.exec(size.trim());
  return found ? Math.floor(Number(found[1]) * UNITS[found[2]!.toLowerCase()]!) : size;
}

function requestOf(action: CreateAction): Record<string, unknown> {
  const request: Record<string, unknown> = {};
  const limits: Record<string, unknown> = {};
  for (const [name, value] of chosen(action)) {
    if (name === 'memory' || name === 'disk') limits[name] = bytesOf(String(value));
    else if (name === 'cpus' || name === 'pids') limits[name] = value;
    else if (name === 'ttl') request.ttl_seconds = value;
    else request[snake(name)] = value;
  }
  return Object.keys(limits).length ? { ...request, limits } : request;
}

function curl(actions: readonly Step[], url: string): string {
  const head = [
    '# needs curl and jq',
    `HUTCH_URL=${shellWord(url)}`,
    'HUTCH_API_KEY=${HUTCH_API_KEY:?set it to your key}',
    'auth="Authorization: Bearer $HUTCH_API_KEY"',
    'type="Content-Type: application/json"',
    '',
  ];
  return `${[...head, ...actions.flatMap((action) => curlLines(action))].join('\n')}\n`;
}

/** A path or a file name as it stands in an address. */
const quoted = (text: string) => encodeURIComponent(text.toWellFormed?.() ?? text);

/** What stands behind `…/http/`: a path and a query, as they were typed. */
const portPath = (path: string) =>
  path
    .replace(/^\/+/, '')
    .replace(/[^\x21-\x7e]|["<>\\^`{|}]/gu, (sign) => quoted(sign));

function curlLines(action: Step): string[] {
  const session = '$HUTCH_URL/v1/sessions/$id';
  const post = (path: string, body: unknown, more = '') =>
    `curl -sS ${more}-H "$auth" -H "$type" "${session}${path}" -d ${shellWord(json(body))}`;
  switch (action.do) {
    case 'create':
      return [
        'id=$(curl -sS -H "$auth" -H "$type" "$HUTCH_URL/v1/sessions" \\',
        `  -d ${shellWord(json(requestOf(action)))} | jq -r .id)`,
      ];
    case 'shell':
      return [post('/shells/main/run', { command: action.command })];
    case 'context':
      return [post('/contexts', { context: action.context })];
    case 'code':
      return [post(`/contexts/${quoted(action.context ?? 'main')}/run`, { code: action.code })];
    case 'write':
      return [
        `${contentOf(action.text)} |`,
        `  curl -sS -H "$auth" -T - "${session}/files/content?path=${quoted(action.path)}"`,
      ];
    case 'read':
      return [`curl -sS -H "$auth" "${session}/files/content?path=${quoted(action.path)}"`];
    case 'fetch': {
      const isPiped = isSet(action.body) && action.body!.includes('\0');
      const body = isPiped ? ' --data-binary @-' : ` --data-raw ${shellWord(action.body ?? '')}`;
      const data = isSet(action.body) ? body : '';
      const verb = action.method === 'GET' ? '' : `-X ${shellWord(action.method)} `;
      const path = portPath(action.path);
      const target = `"${session}/ports/${action.port}/http/"${path && shellWord(path)}`;
      const pipe = isPiped ? `${contentOf(action.body!)} | ` : '';
      return [`${pipe}curl -sS --path-as-is -g ${verb}-H "$auth" ${target}${data}`];
    }
    case 'extend':
      return [post('/extend', { ttl_seconds: action.ttl })];
    case 'hibernate':
    case 'wake':
      return [`curl -sS -H "$auth" -X POST "${session}/${action.do}"`];
    case 'close':
      return [`curl -sS -H "$auth" -X DELETE "${session}"`];
  }
}

/** A command that prints this text. An argument cannot hold NUL. */
const contentOf = (text: string): string =>
  text.includes('\0') ? `printf %s ${base64(text)} | base64 -d` : `printf %s ${shellWord(text)}`;

function base64(text: string): string {
  const bytes = new TextEncoder().encode(text);
  let letters = '';
  for (const byte of bytes) letters += String.fromCharCode(byte);
  return btoa(letters);
}

