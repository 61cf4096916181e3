/** Where the page is: what stands behind `#` in its address. Never a key. */
import { computed, signal } from '@preact/signals';

const hash = signal(location.hash);
addEventListener('hashchange', () => (hash.value = location.hash));

/** Take what stands behind `#` out of the address, without a trace in the history. */
export function clearAddress(): void {
  history.replaceState(null, '', `${location.pathname}${location.search}`);
  hash.value = '';
}

/** The parts of the path: `#/sandboxes/ID/files` is `['sandboxes', 'ID', 'files']`. */
export const route = computed(() =>
  hash.value
    .replace(/^#\/?/, '')
    .split('/')
    .filter(Boolean)
    .map((part) => {
      try {
        return decodeURIComponent(part);
      } catch {
        return part;
      }
    }),
);

export function link(...parts: string[]): string {
  return `#/${parts.map(encodeURIComponent).join('/')}`;
}

export function go(...parts: string[]): void {
  location.hash = link(...parts);
}
