/** Text of a program for a page: colours kept, every other escape dropped. */

export interface Span {
  text: string;
  /** Names of CSS classes: "ansi-bold ansi-fg-1". */
  style: string;
  /** A colour beyond the sixteen, as "#rrggbb". */
  color?: string;
  background?: string;
}

const ESCAPE =
  // CSI, then OSC, DCS, SOS, PM and APC up to their end (or a line's, if they have none), then others.
  /\u001b\[([0-9:;<=>?]*)[ -/]*([@-~])|\u001b[\]PX^_][^\u0007\u001b\n]*(?:\u0007|\u001b\\|(?=\n)|$)|\u001b[ -/]*[0-~]?|[\u0000-\u0008\u000b\u000c\u000e-\u001a\u001c-\u001f\u007f-\u009f]/g;

interface State {
  bold: boolean;
  faint: boolean;
  italic: boolean;
  underline: boolean;
  strike: boolean;
  inverse: boolean;
  fg: string;
  bg: string;
}
const plain = (): State => ({
  bold: false, faint: false, italic: false, underline: false, strike: false, inverse: false, fg: '', bg: '',
});

/**
 * Spans of text with their style. A carriage return begins the line again, as a progress bar does;
 * a backspace takes a letter back.
 */
export function spansOf(source: string): Span[] {
  const spans: Span[] = [];
  const state = plain();
  let at = 0;
  const add = (text: string) => {
    if (text) spans.push({ text, ...styleOf(state) });
  };
  const text = overwritten(source);
  for (const found of text.matchAll(ESCAPE)) {
    add(text.slice(at, found.index));
    at = found.index + found[0].length;
    if (found[2] === 'm') apply(state, found[1] ?? '');
  }
  add(text.slice(at));
  return spans;
}

/** Lines as they look after their carriage returns. */
function overwritten(text: string): string {
  if (!/[\r\b]/.test(text)) return text;
  return text
    .replaceAll('\r\n', '\n')
    .split('\n')
    .map((line) => {
      if (line.includes('\b')) line = line.replace(/[^\b]\b/g, '');
      if (!line.includes('\r')) return line;
      const parts = line.split('\r');
      let last = parts.pop()!;
      // "50 %\r" still shows what stands there.
      while (last === '' && parts.length) last = parts.pop()!;
      return last;
    })
    .join('\n');
}

function styleOf(state: State): Omit<Span, 'text'> {
  const names: string[] = [];
  let [fg, bg] = [state.fg, state.bg];
  if (state.inverse) [fg, bg] = [bg || 'bg', fg || 'fg'];
  if (state.bold) names.push('ansi-bold');
  if (state.faint) names.push('ansi-faint');
  if (state.italic) names.push('ansi-italic');
  if (state.underline) names.push('ansi-underline');
  if (state.strike) names.push('ansi-strike');
  const style: Omit<Span, 'text'> = { style: '' };
  if (fg.startsWith('#')) style.color = fg;
  else if (fg) names.push(`ansi-fg-${fg}`);
  if (bg.startsWith('#')) style.background = bg;
  else if (bg) names.push(`ansi-bg-${bg}`);
  return { ...style, style: names.join(' ') };
}

function apply(state: State, parameters: string): void {
  const codes = parameters.split(/[;:]/).map((code) => (code === '' ? 0 : Number(code)));
  for (let at = 0; at < codes.length; at++) {
    const code = codes[at]!;
    if (code === 0) Object.assign(state, plain());
    else if (code === 1) state.bold = true;
    else if (code === 2) state.faint = true;
    else if (code === 3) state.italic = true;
    else if (code === 4) state.underline = true;
    else if (code === 7) state.inverse = true;
    else if (code === 9) state.strike = true;
    else if (code === 22) state.bold = state.faint = false;
    else if (code === 23) state.italic = false;
    else if (code === 24) state.underline = false;
    else if (code === 27) state.inverse = false;
    else if (code === 29) state.strike = false;
    else if (code >= 30 && code <= 37) state.fg = String(code - 30);
    else if (code === 39) state.fg = '';
    else if (code >= 40 && code <= 47) state.bg = String(code - 40);
    else if (code === 49) state.bg = '';
    else if (code >= 90 && code <= 97) state.fg = String(code - 82);
    else if (code >= 100 && code <= 107) state.bg = String(code - 92);
    else if (code === 38 || code === 48) {
      const [color, used] = wide(codes, at + 1);
      if (code === 38) state.fg = color;
      else state.bg = color;
      at += used;
    }
  }
}

const CUBE = [0, 95, 135, 175, 215, 255];
const two = (value: number) => Math.max(0, Math.min(255, value | 0)).toString(16).padStart(2, '0');

/** A colour of 256, or red, green and blue; and how many codes it took. */
function wide(codes: number[], at: number): [color: string, used: number] {
  if (codes[at] === 2) {
    const [red = 0, green = 0, blue = 0] = codes.slice(at + 1, at + 4);
    return [`#${two(red)}${two(green)}${two(blue)}`, 4];
  }
  const index = codes[at + 1] ?? 0;
  if (index < 16) return [String(index), 2];
  if (index >= 232) {
    const grey = two(8 + (index - 232) * 10);
    return [`#${grey}${grey}${grey}`, 2];
  }
  const rest = index - 16;
  const parts = [Math.floor(rest / 36) % 6, Math.floor(rest / 6) % 6, rest % 6];
  return [`#${parts.map((part) => two(CUBE[part]!)).join('')}`, 2];
}
