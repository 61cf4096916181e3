/** A terminal on the screen. What a box sends can draw in it, and nothing else. */
import '@xterm/xterm/css/xterm.css';
import { FitAddon } from '@xterm/addon-fit';
import { Terminal as XTerm, type ITheme } from '@xterm/xterm';
import { copy } from '../ui/index.js';
import { styleNonce } from './nonce.js';

/** OSC sequences that reach beyond the screen: titles, links, notifications, the clipboard. */
const DISARMED = [0, 1, 2, 7, 8, 9, 52, 99, 133, 633, 777, 1337];

const LIGHT: ITheme = {
  background: '#ffffff', foreground: '#1b1e27', cursor: '#4f46e5', cursorAccent: '#ffffff',
  selectionBackground: '#c7cbf7', black: '#1b1e27', red: '#b3201f', green: '#12703a', yellow: '#8a4b00',
  blue: '#1357a6', magenta: '#8b2fa0', cyan: '#0b6b7a', white: '#6b7280', brightBlack: '#5a6172',
  brightRed: '#c92a2a', brightGreen: '#1a7f45', brightYellow: '#996000', brightBlue: '#1d63c0',
  brightMagenta: '#9c36b5', brightCyan: '#0c7a8a', brightWhite: '#3b4150',
};
const DARK: ITheme = {
  background: '#12141b', foreground: '#e7e9ef', cursor: '#9ea2ff', cursorAccent: '#12141b',
  selectionBackground: '#3d4270', black: '#3a4050', red: '#ff7b7b', green: '#6bd68f', yellow: '#e9bc62',
  blue: '#7db4ff', magenta: '#dd9bf5', cyan: '#6ad3e3', white: '#d5d9e3', brightBlack: '#8d95a8',
  brightRed: '#ff9a9a', brightGreen: '#8ae6a8', brightYellow: '#f5d48a', brightBlue: '#a3ccff',
  brightMagenta: '#e9b9fa', brightCyan: '#93e4f0', brightWhite: '#ffffff',
};

export class Screen {
  readonly #terminal: XTerm;
  readonly #fit = new FitAddon();
  readonly #observer: ResizeObserver;
  /** While old output is shown again, what the terminal answers to it must not be typed. */
  isReplaying = false;

  constructor(
    parent: HTMLElement,
    { isDark, onInput, onSize }: {
      isDark: boolean;
      onInput: (data: string | Uint8Array) => void;
      onSize: (columns: number, rows: number) => void;
    },
  ) {
    prepareDocument();
    const terminal = new XTerm({
      allowProposedApi: false,
      cursorBlink: !matchMedia('(prefers-reduced-motion: reduce)').matches,
      fontFamily: getComputedStyle(document.documentElement).getPropertyValue('--mono').trim() || 'monospace',
      fontSize: 13,
      scrollback: 5000,
      theme: isDark ? DARK : LIGHT,
      minimumContrastRatio: 4.5,
      screenReaderMode: false,
    });
    this.#terminal = terminal;
    for (const code of DISARMED) terminal.parser.registerOscHandler(code, () => true);
    terminal.loadAddon(this.#fit);
    terminal.open(parent);
    terminal.textarea?.setAttribute('aria-label', 'Terminal: what you type goes to the program. Ctrl+Shift+Esc leaves it.');
    terminal.onData((data) => this.isReplaying || onInput(data));
    terminal.onBinary((data) => this.isReplaying || onInput(Uint8Array.from(data, (sign) => sign.charCodeAt(0))));
    terminal.onResize(({ cols, rows }) => onSize(cols, rows));
    terminal.attachCustomKeyEventHandler((event) => this.#isForProgram(event));
    this.#observer = new ResizeObserver(() => this.fit());
    this.#observer.observe(parent);
    this.fit();
  }

  get size(): { columns: number; rows: number } {
    return { columns: this.#terminal.cols, rows: this.#terminal.rows };
  }

  write(data: Uint8Array | string, done?: () => void): void {
    this.#terminal.write(data, done);
  }

  /** A line of the page's own, between those of the program. */
  say(text: string): void {
    this.#terminal.write(`\r\n\x1b[0;2;3m— ${text} —\x1b[0m\r\n`);
  }

  set isDark(isDark: boolean) {
    this.#terminal.options.theme = isDark ? DARK : LIGHT;
  }

  fit(): void {
    const parent = this.#terminal.element?.parentElement;
    if (parent && parent.clientWidth > 40 && parent.clientHeight > 40) this.#fit.fit();
  }

  focus(): void {
    this.#terminal.focus();
  }

  dispose(): void {
    this.#observer.disconnect();
    this.#terminal.dispose();
  }

  /** The keys of the page: copy, paste (which the browser does), and the way out. */
  #isForProgram(event: KeyboardEvent): boolean {
    if (event.type !== 'keydown') return true;
    const letter = event.key.toLowerCase();
    const isShifted = (event.ctrlKey || event.metaKey) && event.shiftKey;
    if (isShifted && letter === 'escape') {
      this.#terminal.blur();
      return false;
    }
    const copies = (isShifted && letter === 'c') || (event.ctrlKey && event.key === 'Insert')
      || ((event.ctrlKey || event.metaKey) && !event.shiftKey && letter === 'c' && this.#terminal.hasSelection());
    if (copies) {
      event.preventDefault();
      if (this.#terminal.hasSelection()) void copy(this.#terminal.getSelection());
      this.#terminal.clearSelection();
      return false;
    }
    const pastes = ((event.ctrlKey || event.metaKey) && letter === 'v') || (event.shiftKey && event.key === 'Insert');
    return !pastes;
  }
}

let isPrepared = false;

/**
 * The policy of the page allows style elements with its nonce only, and no style attributes. xterm
 * makes some of both with the page's own document, whatever `documentOverride` says.
 */
function prepareDocument(): void {
  if (isPrepared) return;
  isPrepared = true;
  const nonce = styleNonce();
  const create = document.createElement.bind(document) as (name: string, options?: ElementCreationOptions) => HTMLElement;
  document.createElement = ((name: string, options?: ElementCreationOptions) => {
    const element = create(name, options);
    if (element instanceof HTMLStyleElement) element.nonce = nonce;
    return element;
  }) as typeof document.createElement;
  // Colours beyond the sixteen. Set as properties, they are allowed.
  HTMLSpanElement.prototype.setAttribute = function (name, value) {
    if (name === 'style') this.style.cssText = value;
    else Element.prototype.setAttribute.call(this, name, value);
  };
}
