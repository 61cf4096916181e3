/** Files of a box: a tree that is loaded as it is opened, and what was opened beside it. */
import { useEffect, useRef, useState } from 'preact/hooks';
import { Conflict, NotFound, type Entry } from 'hutch';
import {
  ago, ask, Button, confirm, EmptyState, ErrorBox, Icon, IconButton, Loading, reason, safeText, size, toast, useLoaded,
} from '../ui/index.js';
import { useSession } from './context.js';
import { DataTable, parseCsv } from './datatable.js';
import { saveAs } from './download.js';
import { CodeEditor } from './editor.js';
import { Picture, pictureOf } from './results.js';

const MOST_TEXT = 2 * 1024 * 1024; // bytes that are opened in the editor
const MOST_PICTURE = 16 * 1024 * 1024;
const MOST_SAVED = 1024 * 1024 * 1024; // bytes that this page holds for a download
const PICTURES: Record<string, 'png' | 'jpeg' | 'gif' | 'webp'> = { png: 'png', jpg: 'jpeg', jpeg: 'jpeg', gif: 'gif', webp: 'webp' };

const nameOf = (path: string): string => path.slice(path.lastIndexOf('/') + 1) || '/';
const parentOf = (path: string): string => path.slice(0, Math.max(1, path.lastIndexOf('/')));
const join = (folder: string, name: string): string => `${folder.replace(/\/$/, '')}/${name}`;
const endingOf = (path: string): string => /\.([^./]+)$/.exec(path)?.[1]?.toLowerCase() ?? '';

interface Upload {
  name: string;
  sent: number;
  total: number;
  error?: string;
}

export function FilesView() {
  const session = useSession();
  const { sandbox, info } = session;
  const [root, setRoot] = useState(info.workdir || '/workspace');
  const [open, setOpen] = useState<Entry>();
  const [uploads, setUploads] = useState<Upload[]>([]);
  const [isOver, setOver] = useState(false);
  /** Folders that changed, by a number that goes up. */
  const [rounds, setRounds] = useState<Record<string, number>>({});
  const isDirty = useRef(false);

  const touch = (folder: string) => setRounds((old) => ({ ...old, [folder]: (old[folder] ?? 0) + 1 }));
  const leave = async (): Promise<boolean> => {
    if (!isDirty.current) return true;
    const isMeant = await confirm({ title: 'Leave your changes?', body: 'This file has changes that are not saved.', action: 'Leave them', isDangerous: true });
    if (isMeant) isDirty.current = false;
    return isMeant;
  };
  const show = async (entry: Entry | undefined) => {
    if (entry?.path !== open?.path && (await leave())) setOpen(entry);
  };
  const fail = (error: unknown) => toast(reason(error), { kind: 'error' });

  const makeFile = async (folder: string) => {
    const name = await ask({ title: 'New file', body: <>In <code>{safeText(folder)}</code></>, field: 'Name', action: 'Make it' });
    if (!name) return;
    try {
      const path = join(folder, name);
      await sandbox.files.write(path, '', { expect: '' });
      session.note({ do: 'write', path, text: '' });
      touch(folder);
      await show(await sandbox.files.stat(path));
    } catch (error) {
      fail(error instanceof Conflict ? new Error(`there is a file ${name} already`) : error);
    }
  };
  const makeFolder = async (folder: string) => {
    const name = await ask({ title: 'New folder', body: <>In <code>{safeText(folder)}</code></>, field: 'Name', action: 'Make it' });
    if (!name) return;
    try {
      if (!(await sandbox.files.makeDir(join(folder, name)))) toast('It was there already.');
      touch(folder);
    } catch (error) {
      fail(error);
    }
  };
  const rename = async (entry: Entry) => {
    const old = nameOf(entry.path);
    const name = await ask({ title: 'Rename', body: <>A path moves it: <code>../other/name</code></>, field: 'New name', value: old, action: 'Rename' });
    if (!name || name === old) return;
    const to = name.startsWith('/') ? name : join(parentOf(entry.path), name);
    try {
      await sandbox.files.move(entry.path, to);
    } catch (error) {
      if (!(error instanceof Conflict)) return fail(error);
      if (!(await confirm({ title: 'Replace it?', body: reason(error), action: 'Replace', isDangerous: true }))) return;
      try {
        await sandbox.files.move(entry.path, to, { overwrite: true });
      } catch (failure) {
        return fail(failure);
      }
    }
    touch(parentOf(entry.path));
    touch(parentOf(to));
    if (open?.path === entry.path) setOpen(undefined);
    toast(`Renamed to ${safeText(name)}.`, {
      undo: () => void sandbox.files.move(to, entry.path).then(() => (touch(parentOf(entry.path)), touch(parentOf(to))), fail),
    });
  };
  const remove = async (entry: Entry) => {
    const isFolder = entry.kind === 'dir';
    const isMeant = await confirm({
      title: `Delete ${safeText(nameOf(entry.path))}?`,
      body: isFolder ? 'The folder and everything in it are deleted. This cannot be undone.' : 'This cannot be undone.',
      action: isFolder ? 'Delete folder' : 'Delete file',
      isDangerous: true,
    });
    if (!isMeant) return;
    try {
      await sandbox.files.remove(entry.path, { recursive: isFolder });
      touch(parentOf(entry.path));
      if (open && (open.path === entry.path || open.path.startsWith(`${entry.path}/`))) {
        isDirty.current = false;
        setOpen(undefined);
      }
    } catch (error) {
      fail(error);
    }
  };
  const download = async (entry: Entry) => {
    try {
      if (entry.size > MOST_SAVED && entry.kind === 'file') {
        return toast(`${size(entry.size)} is too much for a browser. Use: hutch cp ${sandbox.id}:${safeText(entry.path)} .`, { kind: 'error' });
      }
      toast('The download has begun.');
      const isFolder = entry.kind === 'dir';
      const stream = isFolder ? await sandbox.files.pack(entry.path) : await sandbox.files.read(entry.path, 'stream');
      const pieces: BlobPart[] = [];
      let got = 0;
      for await (const piece of stream) {
        pieces.push(piece as BlobPart);
        got += piece.length;
        if (got > MOST_SAVED) throw new Error(`this is more than ${size(MOST_SAVED)}: use hutch cp`);
      }
      saveAs(nameOf(entry.path) + (isFolder ? '.tar' : ''), pieces);
    } catch (error) {
      fail(error);
    }
  };
  const upload = async (folder: string, list: FileList | File[]) => {
    const files = [...list];
    for (const file of files) {
      const progress: Upload = { name: file.name, sent: 0, total: file.size };
      const report = (change: Partial<Upload>) => {
        Object.assign(progress, change);
        setUploads((old) => (old.includes(progress) ? [...old] : [...old, progress]));
      };
      report({});
      try {
        const path = join(folder, file.name);
        if (await sandbox.files.exists(path)) {
          const isMeant = await confirm({ title: `Replace ${safeText(file.name)}?`, body: 'There is a file of this name in the folder.', action: 'Replace', isDangerous: true });
          if (!isMeant) {
            setUploads((old) => old.filter((one) => one !== progress));
            continue;
          }
        }
        await sendFile(path, file, (sent) => report({ sent }));
        setUploads((old) => old.filter((one) => one !== progress));
        touch(folder);
      } catch (error) {
        report({ error: reason(error) });
      }
    }
  };
  /** In parts, so that there is progress to show; the name appears when all of it is there. */
  const sendFile = async (path: string, file: File, report: (sent: number) => void) => {
    const PART = 8 * 1024 * 1024;
    if (file.size <= PART) {
      await sandbox.files.write(path, file);
      return report(file.size);
    }
    const unfinished = `${path}.part-${Math.random().toString(36).slice(2, 8)}`;
    try {
      for (let at = 0; at < file.size; at += PART) {
        await sandbox.files.write(unfinished, file.slice(at, at + PART), { append: at > 0 });
        report(Math.min(file.size, at + PART));
      }
      await sandbox.files.move(unfinished, path, { overwrite: true });
    } catch (error) {
      await sandbox.files.remove(unfinished).catch(() => {});
      throw error;
    }
  };
  const drop = (folder: string) => (event: DragEvent) => {
    if (!event.dataTransfer?.files.length) return;
    event.preventDefault();
    event.stopPropagation();
    setOver(false);
    const items = [...event.dataTransfer.items];
    if (items.some((item) => item.webkitGetAsEntry?.()?.isDirectory)) {
      toast('Folders cannot be dropped here: pack them as a tar, or use hutch cp.', { kind: 'error' });
    }
    const files = [...event.dataTransfer.files].filter((_, at) => !items[at]?.webkitGetAsEntry?.()?.isDirectory);
    void upload(folder, files);
  };

  const actions: TreeActions = { show, makeFile, makeFolder, rename, remove, download, upload, drop };
  return (
    <div class={`files ${open ? 'has-open' : ''}`}>
      <div
        class={`files-tree ${isOver ? 'over' : ''}`}
        onDragOver={(event) => (event.preventDefault(), setOver(true))}
        onDragLeave={(event) => event.currentTarget.contains(event.relatedTarget as Node) || setOver(false)}
        onDrop={drop(root)}
      >
        <form class="files-root" onSubmit={(event) => {
          event.preventDefault();
          setRoot(String(new FormData(event.currentTarget).get('path')) || '/');
          setRounds({});
        }}>
          <input name="path" aria-label="Folder" key={root} defaultValue={safeText(root)} spellcheck={false} />
          {root !== '/' && <button type="button" class="icon-button up" aria-label="Folder above" title="Folder above" onClick={() => setRoot(parentOf(root))}><Icon name="chevron" /></button>}
          <IconButton icon="refresh" label="Load again" onClick={() => touch(root)} />
        </form>
        <div class="row files-actions">
          <Button isSmall icon="plus" onClick={() => void makeFile(root)}>File</Button>
          <Button isSmall icon="plus" onClick={() => void makeFolder(root)}>Folder</Button>
          <label class="button small file-button">
            <Icon name="upload" />Upload
            <input type="file" multiple onChange={(event) => {
              const { files } = event.currentTarget;
              if (files) void upload(root, files);
              event.currentTarget.value = '';
            }} />
          </label>
        </div>
        {uploads.map((one) => (
          <div key={one.name} class={`upload ${one.error ? 'failed' : ''}`} role="status">
            <span class="ellipsis">{safeText(one.name)}</span>
            {one.error ? (
              <><span class="bad-text">{one.error}</span><IconButton icon="close" label="Dismiss" onClick={() => setUploads((old) => old.filter((each) => each !== one))} /></>
            ) : (
              <progress max={one.total || 1} value={one.sent} aria-label={`Upload of ${safeText(one.name)}`} />
            )}
          </div>
        ))}
        <ul class="tree" role="tree" aria-label={`Files in ${safeText(root)}`}>
          <Folder path={root} depth={0} rounds={rounds} open={open} actions={actions} />
        </ul>
        <p class="quiet files-hint">Drop files here to upload them.</p>
      </div>
      <div class="files-open">
        {open ? (
          <OpenFile
            key={open.path}
            entry={open}
            onClose={() => void show(undefined)}
            onDownload={() => void download(open)}
            onDirty={(dirty) => (isDirty.current = dirty)}
            onSaved={() => touch(parentOf(open.path))}
          />
        ) : (
          <EmptyState title="No file is open" icon="file">Choose one at the left, or drop files to upload them.</EmptyState>
        )}
      </div>
    </div>
  );
}

interface TreeActions {
  show: (entry: Entry) => Promise<void>;
  makeFile: (folder: string) => Promise<void>;
  makeFolder: (folder: string) => Promise<void>;
  rename: (entry: Entry) => Promise<void>;
  remove: (entry: Entry) => Promise<void>;
  download: (entry: Entry) => Promise<void>;
  upload: (folder: string, files: FileList | File[]) => Promise<void>;
  drop: (folder: string) => (event: DragEvent) => void;
}

interface FolderProps {
  path: string;
  depth: number;
  rounds: Record<string, number>;
  open: Entry | undefined;
  actions: TreeActions;
}

const AT_ONCE = 300;

function Folder({ path, depth, rounds, open, actions }: FolderProps) {
  const { sandbox } = useSession();
  const found = useLoaded((signal) => sandbox.files.list(path, { signal }), [sandbox, path, rounds[path] ?? 0]);
  const [most, setMost] = useState(AT_ONCE);
  const entries = [...(found.value ?? [])].sort((a, b) =>
    Number(b.kind === 'dir') - Number(a.kind === 'dir') || nameOf(a.path).localeCompare(nameOf(b.path)));
  const indent = { paddingLeft: `${depth * 16 + 8}px` };
  if (found.error !== undefined && !found.value) {
    const isGone = found.error instanceof NotFound;
    return <li role="none" style={indent}>{isGone ? <span class="quiet">This folder is not there.</span> : <ErrorBox error={found.error} retry={found.reload} />}</li>;
  }
  if (!found.value) return <li role="none"><Loading what="Loading the folder" retry={found.reload} /></li>;
  if (!entries.length) return <li role="none" class="quiet tree-empty" style={indent}>empty</li>;
  return (
    <>
      {entries.slice(0, most).map((entry) => (
        <TreeEntry key={entry.path} entry={entry} depth={depth} rounds={rounds} open={open} actions={actions} />
      ))}
      {entries.length > most && (
        <li role="none" style={indent}><Button isSmall kind="ghost" onClick={() => setMost(most + 1000)}>{entries.length - most} more</Button></li>
      )}
    </>
  );
}

function TreeEntry({ entry, depth, rounds, open, actions }: Omit<FolderProps, 'path'> & { entry: Entry }) {
  const [isOpen, setIsOpen] = useState(false);
  const isFolder = entry.kind === 'dir';
  const name = safeText(nameOf(entry.path));
  const act = () => (isFolder ? setIsOpen(!isOpen) : void actions.show(entry));
  const move = (from: HTMLElement, step: number) => {
    const all = [...from.closest('.tree')!.querySelectorAll<HTMLElement>('[role=treeitem]')];
    all[all.indexOf(from) + step]?.focus();
  };
  return (
    <>
      <li
        role="treeitem"
        aria-level={depth + 1}
        aria-expanded={isFolder ? isOpen : undefined}
        aria-selected={open?.path === entry.path}
        aria-label={`${name}${entry.kind === 'link' ? ` → ${safeText(entry.target ?? '')}` : ''} ${isFolder ? 'folder' : size(entry.size)}`}
        tabIndex={0}
        class="tree-entry"
        style={{ paddingLeft: `${depth * 16 + 8}px` }}
        title={`${safeText(entry.path)}${entry.target ? ` → ${safeText(entry.target)}` : ''}`}
        onClick={act}
        onKeyDown={(event) => {
          if (event.target !== event.currentTarget) return;
          if (event.key === 'Enter' || event.key === ' ') act();
          else if (event.key === 'ArrowRight' && isFolder) setIsOpen(true);
          else if (event.key === 'ArrowLeft' && isFolder) setIsOpen(false);
          else if (event.key === 'ArrowDown') move(event.currentTarget, 1);
          else if (event.key === 'ArrowUp') move(event.currentTarget, -1);
          else if (event.key === 'Delete') void actions.remove(entry);
          else if (event.key === 'F2') void actions.rename(entry);
          else return;
          event.preventDefault();
        }}
        {...(isFolder && { onDrop: actions.drop(entry.path) })}
      >
        <span class={`tree-arrow ${isOpen ? 'open' : ''}`}>{isFolder && <Icon name="chevron" size={12} />}</span>
        <Icon name={isFolder ? 'folder' : 'file'} size={14} />
        <span class="tree-name">{name}{entry.kind === 'link' && <span class="quiet"> → {safeText(entry.target ?? '')}</span>}</span>{' '}
        <span class="tree-size">{isFolder ? '' : size(entry.size)}</span>
        <span class="tree-tools" onClick={(event) => event.stopPropagation()}>
          {isFolder && <IconButton icon="plus" label={`New file in ${name}`} onClick={() => (setIsOpen(true), void actions.makeFile(entry.path))} />}
          <IconButton icon="download" label={`Download ${name}`} onClick={() => void actions.download(entry)} />
          <IconButton icon="edit" label={`Rename ${name}`} onClick={() => void actions.rename(entry)} />
          <IconButton icon="trash" label={`Delete ${name}`} onClick={() => void actions.remove(entry)} />
        </span>
      </li>
      {isOpen && <Folder path={entry.path} depth={depth + 1} rounds={rounds} open={open} actions={actions} />}
    </>
  );
}

// --- the file that is open ------------------------------------------------------------------

type Content =
  | { kind: 'text'; text: string; entry: Entry; digest: string }
  | { kind: 'picture'; source: string; entry: Entry }
  | { kind: 'other'; why: string; entry: Entry };

/** SHA-256 as the server compares it. Pages that came over plain HTTP from afar have none. */
async function digestOf(data: Uint8Array): Promise<string> {
  if (!crypto.subtle) return '';
  const digest = new Uint8Array(await crypto.subtle.digest('SHA-256', data as BufferSource));
  return [...digest].map((byte) => byte.toString(16).padStart(2, '0')).join('');
}

function textOf(data: Uint8Array): string | undefined {
  if (data.subarray(0, 8192).includes(0)) return undefined;
  try {
    return new TextDecoder('utf-8', { fatal: true, ignoreBOM: true }).decode(data);
  } catch {
    return undefined;
  }
}

/** Whether all its lines end as on Windows: the editor has them without, and they come back. */
const hasCrlf = (text: string): boolean => text.includes('\r\n') && !/(^|[^\r])\n|\r(?!\n)/.test(text);

function OpenFile({ entry, onClose, onDownload, onDirty, onSaved }: { entry: Entry; onClose: () => void; onDownload: () => void; onDirty: (dirty: boolean) => void; onSaved: () => void }) {
  const session = useSession();
  const { sandbox } = session;
  const [text, setText] = useState('');
  const [saved, setSaved] = useState('');
  const [base, setBase] = useState<{ entry: Entry; digest: string }>();
  const [isSaving, setSaving] = useState(false);
  const [view, setView] = useState<'table' | 'text'>('table');
  const name = safeText(nameOf(entry.path));
  const separator = { csv: ',', tsv: '\t' }[endingOf(entry.path)];

  const loaded = useLoaded(async (signal): Promise<Content> => {
    // What a link leads to is what is read: its size is not known from here.
    const now = await sandbox.files.stat(entry.path, { signal });
    const picture = PICTURES[endingOf(entry.path)];
    const most = picture ? MOST_PICTURE : MOST_TEXT;
    if (now.kind === 'dir') return { kind: 'other', why: 'This is a folder.', entry: now };
    if (now.kind === 'file' && now.size > most) {
      return { kind: 'other', why: `${size(now.size)} is too large to open here.`, entry: now };
    }
    if (now.kind !== 'file' && now.kind !== 'link') {
      return { kind: 'other', why: 'This is not a regular file.', entry: now };
    }
    const data = await sandbox.files.read(entry.path, 'bytes', { length: most + 1, signal });
    if (data.length > most) return { kind: 'other', why: `More than ${size(most)} is too large to open here.`, entry: now };
    if (picture) {
      let letters = '';
      for (let at = 0; at < data.length; at += 32768) letters += String.fromCharCode(...data.subarray(at, at + 32768));
      const source = pictureOf(picture, btoa(letters));
      return source ? { kind: 'picture', source, entry: now } : { kind: 'other', why: 'This file is empty.', entry: now };
    }
    const found = textOf(data);
    if (found === undefined) return { kind: 'other', why: 'This file is not text.', entry: now };
    return { kind: 'text', text: found, entry: now, digest: await digestOf(data) };
  }, [sandbox, entry.path]);

  const content = loaded.value;
  useEffect(() => {
    if (content?.kind !== 'text') return;
    const plain = hasCrlf(content.text) ? content.text.replaceAll('\r\n', '\n') : content.text;
    setText(plain);
    setSaved(plain);
    setBase({ entry: content.entry, digest: content.digest });
  }, [content]);
  const isDirty = content?.kind === 'text' && text !== saved;
  useEffect(() => onDirty(isDirty), [isDirty]);
  useEffect(() => {
    if (!isDirty) return;
    const warn = (event: BeforeUnloadEvent) => event.preventDefault();
    addEventListener('beforeunload', warn);
    return () => removeEventListener('beforeunload', warn);
  }, [isDirty]);

  const save = async () => {
    if (isSaving || !base) return;
    setSaving(true);
    const isCrlf = content?.kind === 'text' && hasCrlf(content.text);
    const data = new TextEncoder().encode(isCrlf ? text.replaceAll('\n', '\r\n') : text);
    const write = async (checks: boolean) => {
      if (checks && !base.digest) {
        const now = await sandbox.files.stat(entry.path);
        if (now.modified !== base.entry.modified || now.size !== base.entry.size) throw new Conflict('it was changed in the meantime');
      }
      await sandbox.files.write(entry.path, data, checks && base.digest ? { expect: base.digest } : {});
    };
    try {
      try {
        await write(true);
      } catch (error) {
        if (!(error instanceof Conflict || error instanceof NotFound)) throw error;
        const isMeant = await confirm({
          title: `${name} was changed by something else`,
          body: 'It is not as it was when you opened it. Saving replaces what is there now.',
          action: 'Replace it',
          isDangerous: true,
        });
        if (!isMeant) return;
        await write(false);
      }
      setSaved(text);
      setBase({ entry: await sandbox.files.stat(entry.path), digest: await digestOf(data) });
      session.note({ do: 'write', path: entry.path, text });
      toast(`${name} is saved.`);
      onSaved();
    } catch (error) {
      toast(reason(error), { kind: 'error' });
    } finally {
      setSaving(false);
    }
  };

  const table = separator && content?.kind === 'text' ? parseCsv(saved || content.text, separator) : undefined;
  return (
    <section class="open-file" aria-label={name}>
      <header>
        <strong class="ellipsis" title={safeText(entry.path)}>{name}{isDirty && <span title="Not saved"> •</span>}</strong>
        <span class="quiet nowrap">{size(base?.entry.size ?? entry.size)} · {ago(new Date((base?.entry.modified ?? entry.modified) * 1000))}</span>
        <span class="grow" />
        {table && (
          <span class="result-views" role="group" aria-label="Form">
            <button type="button" aria-pressed={view === 'table'} onClick={() => setView('table')}>Table</button>
            <button type="button" aria-pressed={view === 'text'} onClick={() => setView('text')}>Text</button>
          </span>
        )}
        {content?.kind === 'text' && <Button isSmall kind={isDirty ? 'primary' : 'plain'} isBusy={isSaving} isDisabled={!isDirty} title="Ctrl+S" onClick={() => void save()}>Save</Button>}
        <IconButton icon="refresh" label="Load again" isDisabled={isDirty} onClick={loaded.reload} />
        <IconButton icon="download" label="Download" onClick={onDownload} />
        <IconButton icon="close" label="Close" onClick={onClose} />
      </header>
      {loaded.error !== undefined && <ErrorBox error={loaded.error} retry={loaded.reload} />}
      {loaded.isLoading && !content && <Loading what="Loading the file" retry={loaded.reload} />}
      {content?.kind === 'other' && (
        <EmptyState title={content.why} icon="file" action={<Button icon="download" onClick={onDownload}>Download</Button>}>
          {size(content.entry.size)}
        </EmptyState>
      )}
      {content?.kind === 'picture' && <div class="open-picture"><Picture source={content.source} label={name} /></div>}
      {table && view === 'table' && <div class="open-table"><DataTable data={table} label={name} /></div>}
      {content?.kind === 'text' && (!table || view === 'text') && base && (
        <CodeEditor
          key={`${content.entry.modified} ${content.digest}`}
          text={text}
          label={`Text of ${name}`}
          name={entry.path}
          hasLineNumbers
          takesFocus
          onChange={setText}
          onSave={() => void save()}
          onEscape={() => (document.activeElement as HTMLElement | null)?.blur()}
        />
      )}
    </section>
  );
}
