/** Times, sizes and names in words. */

const UNITS: [number, string][] = [
  [86400, 'day'],
  [3600, 'hour'],
  [60, 'minute'],
  [1, 'second'],
];

/** `90` is "1 minute"; with two parts, "1 minute 30 seconds". */
export function duration(seconds: number, parts = 1): string {
  if (seconds > 0 && seconds < 1) return `${Math.max(1, Math.round(seconds * 1000))} ms`;
  let rest = Math.max(0, Math.round(seconds));
  const words: string[] = [];
  for (const [length, name] of UNITS) {
    const count = Math.floor(rest / length);
    if (count === 0) {
      if (words.length) break;
      continue;
    }
    words.push(`${count} ${name}${count === 1 ? '' : 's'}`);
    rest -= count * length;
    if (words.length === parts) break;
  }
  return words.join(' ') || '0 seconds';
}

/** The shortest form, for tables: "2 h", "35 s". */
export function brief(seconds: number): string {
  if (seconds > 0 && seconds < 1) return `${Math.max(1, Math.round(seconds * 1000))} ms`;
  const rest = Math.max(0, Math.round(seconds));
  if (rest >= 172800) return `${Math.floor(rest / 86400)} d`;
  if (rest >= 5400) return `${Math.floor(rest / 3600)} h`;
  return rest >= 90 ? `${Math.floor(rest / 60)} min` : `${rest} s`;
}

export function ago(when: Date | null | undefined, now = Date.now()): string {
  if (!when) return 'never';
  const seconds = (now - when.getTime()) / 1000;
  // The server's clock may be ahead of this one.
  if (seconds < -60) return until(when, now);
  return seconds < 5 ? 'just now' : `${duration(seconds)} ago`;
}

export function until(when: Date | null | undefined, now = Date.now()): string {
  if (!when) return 'never';
  const seconds = (when.getTime() - now) / 1000;
  return seconds <= 0 ? 'now' : `in ${duration(seconds)}`;
}

export function at(when: Date | null | undefined): string {
  return when ? when.toLocaleString() : '';
}

const SIZES = ['B', 'KiB', 'MiB', 'GiB', 'TiB'];

export function size(bytes: number | null | undefined): string {
  if (bytes === null || bytes === undefined) return '–';
  let value = bytes;
  let unit = 0;
  while (value >= 1024 && unit < SIZES.length - 1) {
    value /= 1024;
    unit++;
  }
  return `${unit && value < 10 ? value.toFixed(1) : Math.round(value)} ${SIZES[unit]}`;
}

export function count(number: number, one: string, many = one + (one.endsWith('x') ? 'es' : 's')): string {
  return `${number.toLocaleString('en')} ${number === 1 ? one : many}`;
}

export function percent(part: number): string {
  return `${Math.round(part * 100)} %`;
}

// Control characters, zero-width ones, and those that turn the direction of what follows.
const UNSAFE = /[\u0000-\u001f\u007f-\u009f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb]/gu;
const UNSAFE_BUT_LINES = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb]/gu;
const LONE = /[\ud800-\udbff](?![\udc00-\udfff])|(?<![\ud800-\udbff])[\udc00-\udfff]/g;

function escape(character: string): string {
  const code = character.charCodeAt(0);
  return code < 256 ? `\\x${code.toString(16).padStart(2, '0')}` : `\\u${code.toString(16).padStart(4, '0')}`;
}

/** Text of a box, for one line: what cannot be seen or moves other text is shown escaped. */
export function safeText(text: string): string {
  return text.replace(UNSAFE, escape).replace(LONE, escape);
}

/** The same for text of several lines: tabs and newlines stay. */
export function safeLines(text: string): string {
  return text.replace(UNSAFE_BUT_LINES, escape).replace(LONE, escape);
}

/** The sentence of an error. Messages may quote what a box wrote. */
export function reason(error: unknown): string {
  return safeLines(error instanceof Error ? error.message : String(error)).slice(0, 2000);
}

/** With a capital letter, for what the server says in the middle of its own sentences. */
export function sentence(text: string): string {
  return text.charAt(0).toUpperCase() + text.slice(1);
}
