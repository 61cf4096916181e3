/** Keys of the page: "?" shows those that work where the user is. */
import { signal } from '@preact/signals';
import { useEffect } from 'preact/hooks';
import { useLatest } from './hooks.js';

export interface Shortcut {
  /** One key, or two after each other: "j", "g s", "Escape". */
  keys: string;
  does: string;
  run: () => void;
}

const active = signal<{ list: () => Shortcut[] }[]>([]);
let before = '';
let timer: ReturnType<typeof setTimeout> | undefined;

/** What can be pressed now, the innermost page first. */
export function shortcuts(): Shortcut[] {
  return [...active.value].reverse().flatMap((each) => each.list());
}

export function useShortcuts(list: Shortcut[]): void {
  const latest = useLatest(list);
  useEffect(() => {
    const mine = { list: () => latest.current };
    active.value = [...active.peek(), mine];
    return () => {
      active.value = active.peek().filter((each) => each !== mine);
    };
  }, []);
}

/** Whether keys are text there: a field, an editor, a terminal. */
function takesText(target: EventTarget | null): boolean {
  return target instanceof HTMLElement
    && (target.isContentEditable || /^(INPUT|TEXTAREA|SELECT)$/.test(target.tagName) || target.closest('.xterm, .cm-editor') !== null);
}

addEventListener('keydown', (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || event.defaultPrevented) return;
  if (takesText(event.target) || document.querySelector('dialog[open]')) return;
  const pair = before ? `${before} ${event.key}` : event.key;
  const found = shortcuts().find((each) => each.keys === pair) ?? shortcuts().find((each) => each.keys === event.key);
  clearTimeout(timer);
  before = '';
  if (found) {
    // Enter and the space bar on a button or a link are what the button says.
    if (event.key === 'Enter' && event.target instanceof HTMLElement && event.target.closest('button, a')) return;
    event.preventDefault();
    found.run();
  } else if (event.key.length === 1) {
    before = event.key;
    timer = setTimeout(() => (before = ''), 1200);
  }
});
