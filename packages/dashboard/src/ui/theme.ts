/** Light or dark: what the system says, unless this browser was told otherwise. */
import { computed, effect, signal } from '@preact/signals';

export type Theme = 'system' | 'light' | 'dark';
const KEPT = 'hutch-theme';
const darkness = matchMedia('(prefers-color-scheme: dark)');
const systemIsDark = signal(darkness.matches);
darkness.addEventListener('change', () => (systemIsDark.value = darkness.matches));

export const theme = signal<Theme>(read());
export const isDark = computed(() => (theme.value === 'system' ? systemIsDark.value : theme.value === 'dark'));

function read(): Theme {
  const kept = localStorage.getItem(KEPT);
  return kept === 'light' || kept === 'dark' ? kept : 'system';
}

export function applyTheme(): void {
  effect(() => {
    document.documentElement.dataset['theme'] = isDark.value ? 'dark' : 'light';
    if (theme.value === 'system') localStorage.removeItem(KEPT);
    else localStorage.setItem(KEPT, theme.value);
  });
}
