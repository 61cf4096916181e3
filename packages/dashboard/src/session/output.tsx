import { useMemo, useState } from 'preact/hooks';
import type { Piece } from 'hutch';
import { Button, reason, safeLines, size } from '../ui/index.js';
import { spansOf } from './ansi.js';

const MOST_SHOWN = 200_000; // letters at once: more makes the page slow

/** What a program printed, with its colours. */
export function Output({ text, label, isError }: { text: string; label?: string; isError?: boolean }) {
  const [isAll, setAll] = useState(false);
  const cut = !isAll && text.length > MOST_SHOWN;
  const shown = cut ? text.slice(-MOST_SHOWN) : text;
  const spans = useMemo(() => spansOf(shown), [shown]);
  if (!text) return null;
  return (
    <>
      {cut && (
        <p class="output-cut">
          The last {MOST_SHOWN.toLocaleString('en')} of {text.length.toLocaleString('en')} letters.{' '}
          <Button isSmall kind="ghost" onClick={() => setAll(true)}>Show all</Button>
        </p>
      )}
      <pre class={`output ${isError ? 'stderr' : ''}`} aria-label={label} tabIndex={0}>
        {spans.map((span, index) => (
          <span
            key={index}
            class={span.style || undefined}
            style={span.color || span.background ? { color: span.color, backgroundColor: span.background } : undefined}
          >
            {safeLines(span.text)}
          </span>
        ))}
      </pre>
    </>
  );
}

const PIECE = 256 * 1024;

/** An output that is read part by part, from its beginning. */
export function LongOutput({ read, label }: { read: (offset: number, length: number) => Promise<Piece>; label: string }) {
  const [text, setText] = useState('');
  const [at, setAt] = useState<{ next: number; total: number; first: number }>();
  const [error, setError] = useState<unknown>();
  const [isBusy, setBusy] = useState(false);
  const more = async () => {
    setBusy(true);
    setError(undefined);
    try {
      const piece = await read(at?.next ?? 0, PIECE);
      setText((old) => old + piece.text);
      setAt((old) => ({ next: piece.start + piece.data.length, total: piece.total, first: old?.first ?? piece.start }));
    } catch (failure) {
      setError(failure);
    } finally {
      setBusy(false);
    }
  };
  const isDone = at !== undefined && at.next >= at.total;
  return (
    <div class="long-output">
      {at !== undefined && at.first > 0 && <p class="output-cut">The first {size(at.first)} are not kept.</p>}
      <Output text={text} label={label} />
      {error !== undefined && <p class="output-cut bad-text">{reason(error)}</p>}
      {!isDone && (
        <Button isSmall isBusy={isBusy} onClick={() => void more()}>
          {at === undefined ? 'Show the whole output' : `Show more (${size(at.next)} of ${size(at.total)})`}
        </Button>
      )}
    </div>
  );
}
