import { toast } from './toast.js';

/** Copy text; says that it is copied. Without a secure origin the browser has only the old way. */
export async function copy(text: string, what = 'Copied'): Promise<void> {
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    const field = document.createElement('textarea');
    field.value = text;
    field.className = 'offscreen';
    document.body.append(field);
    field.select();
    const isCopied = document.execCommand('copy');
    field.remove();
    if (!isCopied) return toast('This browser does not allow copying: select the text instead.', { kind: 'error' });
  }
  toast(what);
}

/** A line or a block of code with a button that copies it. */
export function Code({ text, label = 'Copy' }: { text: string; label?: string }) {
  return (
    <div class="code">
      <pre tabIndex={0}>{text}</pre>
      <button type="button" class="button ghost small" onClick={() => void copy(text)}>{label}</button>
    </div>
  );
}
