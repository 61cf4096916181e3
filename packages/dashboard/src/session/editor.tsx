import { useEffect, useRef, useState } from 'preact/hooks';
import { Loading, useLatest } from '../ui/index.js';
import type { Editor, EditorOptions } from './highlight.js';

export type { Editor } from './highlight.js';

type Props = Omit<EditorOptions, 'parent'> & {
  /** Called with the editor when it is there. */
  onReady?: (editor: Editor) => void;
  takesFocus?: boolean;
};

/** Code that can be edited. `text` is what it begins with: for another text, give it another key. */
export function CodeEditor({ onReady, takesFocus, ...options }: Props) {
  const parent = useRef<HTMLDivElement>(null);
  const editor = useRef<Editor | undefined>(undefined);
  const latest = useLatest({ onReady, ...options });
  const [isReady, setReady] = useState(false);
  useEffect(() => {
    let isGone = false;
    void import('./highlight.js').then(({ Editor }) => {
      if (isGone || !parent.current) return;
      const now = latest.current;
      editor.current = new Editor({
        ...now,
        parent: parent.current,
        onChange: (text) => latest.current.onChange?.(text),
        ...(now.onRun && { onRun: (stays) => latest.current.onRun?.(stays) }),
        ...(now.onSave && { onSave: () => latest.current.onSave?.() }),
        ...(now.onEscape && { onEscape: () => latest.current.onEscape?.() }),
        ...(now.onArrowOut && { onArrowOut: (direction) => latest.current.onArrowOut?.(direction) }),
      });
      setReady(true);
      if (takesFocus) editor.current.focus();
      latest.current.onReady?.(editor.current);
    });
    return () => {
      isGone = true;
      editor.current?.destroy();
    };
  }, [options.name, options.isReadOnly]);
  return (
    <div class="code-editor" ref={parent}>
      {!isReady && <Loading what="Loading the editor" />}
    </div>
  );
}
