/** Short messages at the edge. One with `undo` waits before what it tells is final. */
import { signal } from '@preact/signals';
import { IconButton } from './basics.js';

interface Toast {
  id: number;
  text: string;
  kind: 'info' | 'error';
  undo?: (() => void) | undefined;
}

const shown = signal<Toast[]>([]);
let last = 0;
const STAYS = 6000; // milliseconds
const ERROR_STAYS = 15000;

export function toast(
  text: string,
  { kind = 'info', undo }: { kind?: 'info' | 'error'; undo?: () => void } = {},
): void {
  const id = ++last;
  shown.value = [...shown.value.slice(-4), { id, text, kind, undo }];
  setTimeout(() => dismiss(id), kind === 'error' ? ERROR_STAYS : STAYS);
}

function dismiss(id: number): void {
  shown.value = shown.value.filter((each) => each.id !== id);
}

export function ToastHost() {
  return (
    <div class="toasts" role="status" aria-live="polite">
      {shown.value.map((each) => (
        <div key={each.id} class={`toast ${each.kind}`}>
          <span>{each.text}</span>
          {each.undo && (
            <button type="button" class="button small" onClick={() => (dismiss(each.id), each.undo!())}>
              Undo
            </button>
          )}
          <IconButton icon="close" label="Dismiss" onClick={() => dismiss(each.id)} />
        </div>
      ))}
    </div>
  );
}
