/**
 * Values of a box as text and numbers. `String({toString: 1})` throws, and so does `Number` of the
 * like: what JSON can hold goes through here instead.
 */
import { safeText } from '../ui/words.js';

const DEEP = '…';

/** Never throws. Nothing is the empty text, lists and objects are JSON. */
export function textOf(value: unknown): string {
  if (value === null || value === undefined) return '';
  if (typeof value === 'string') return value;
  if (typeof value !== 'object') return typeof value === 'function' || typeof value === 'symbol' ? DEEP : `${value}`;
  try {
    return JSON.stringify(value) ?? DEEP;
  } catch {
    return DEEP; // too deep, or in a circle
  }
}

/** The same for one line of the page: what cannot be seen or moves other text is escaped. */
export const safeTextOf = (value: unknown): string => safeText(textOf(value));

/** Never throws. NaN for what is no number, so also for text that looks like one. */
export const numberOf = (value: unknown): number => (typeof value === 'number' ? value : NaN);
