/** Files that the browser saves. */

/** A name as a file may have it, whatever a box called it. */
const fileName = (name: string): string =>
  name.replace(/[\u0000-\u001f\u007f-\u009f\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff<>:"/\\|?*]/g, '_').slice(-120) || 'file';

export function saveAs(name: string, content: BlobPart | BlobPart[], type = 'application/octet-stream'): void {
  const blob = new Blob(Array.isArray(content) ? content : [content], { type });
  const link = document.createElement('a');
  link.href = URL.createObjectURL(blob);
  link.download = fileName(name);
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 60_000);
}
