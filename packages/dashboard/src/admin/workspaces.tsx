/** Workspaces: folders that outlive sessions. */
import { Workspace, type Schemas } from 'hutch';
import { useMemo, useState } from 'preact/hooks';
import { go, link } from '../route.js';
import { identity, options, server } from '../server.js';
import { saveAs } from '../session/download.js';
import {
  ago, at, ask, Button, confirm, EmptyState, ErrorBox, Icon, Loading, Meter, reason, safeLines, safeText, size, toast, useLoaded,
} from '../ui/index.js';

type Info = Schemas['Workspace'];
const MOST_SHOWN = 262144; // bytes of a file
const MOST_OWNERS = 200;

/** "10g" in bytes; null for nothing, and undefined for what is no size. */
function bytesOf(text: string): number | null | undefined {
  if (!text.trim()) return null;
  const [, value, unit] = /^(\d+(?:\.\d+)?)\s*([kmgt]?)i?b?$/i.exec(text.trim()) ?? [];
  return value === undefined ? undefined : Math.floor(Number(value) * 1024 ** ' kmgt'.indexOf(unit?.toLowerCase() || ' '));
}

/** Those of every owner that is known: the server lists them one owner at a time. */
async function listAll(signal: AbortSignal): Promise<Info[]> {
  const own = await Workspace.list({ ...options(), signal });
  const keys = await server().keys({ signal });
  const others = [...new Set(keys.map((key) => key.owner))].filter((owner) => owner !== identity.peek()?.owner).slice(0, MOST_OWNERS);
  const lists = await Promise.all(others.map((owner) => Workspace.list({ ...options(), owner, signal })));
  return [...own, ...lists.flat()];
}

/** The workspace of an owner, and its files. */
function workspaceOf(owner: string, id: string): Workspace {
  return new Workspace(id, { ...options(), owner: owner === identity.peek()?.owner ? undefined : owner });
}

export function Workspaces({ rest: [owner, id] }: { rest: string[] }) {
  return owner && id ? <Browse key={`${owner}/${id}`} owner={owner} id={id} /> : <List />;
}

function List() {
  const { value, error, isLoading, reload } = useLoaded(listAll, []);
  const [text, setText] = useState('');
  const rows = useMemo(
    () => (value ?? []).filter((each) => `${each.id} ${each.owner}`.toLowerCase().includes(text.toLowerCase())),
    [value, text],
  );
  const own = identity.value!.owner;
  const of = (each: Info) => workspaceOf(each.owner, each.id);

  const make = async () => {
    const name = await ask({ title: 'Make a workspace', body: 'A folder that sandboxes have at /workspace, and that stays when they end.', field: 'Name', action: 'Make it' });
    if (!name) return;
    try {
      await new Workspace(name.trim(), options()).create();
      toast(`${name.trim()} is made`);
    } catch (failure) {
      toast(`Not made: ${reason(failure)}`, { kind: 'error' });
    }
    reload();
  };
  const remove = async (each: Info) => {
    const isSure = await confirm({
      title: `Remove ${each.id} and all its files?`,
      body: `It belongs to ${safeText(each.owner)}${each.size === null ? '' : ` and has ${size(each.size)}`}. This cannot be undone: export it first if you are not sure.`,
      action: 'Remove it',
      isDangerous: true,
    });
    if (!isSure) return;
    try {
      await of(each).remove();
      toast(`${each.id} is removed`);
    } catch (failure) {
      toast(`Not removed: ${reason(failure)}`, { kind: 'error' });
    }
    reload();
  };
  const limit = async (each: Info) => {
    const given = await ask({
      title: `Quota of ${each.id}`,
      body: 'What its files may take on disk, such as 500m or 10g. Empty is the server’s default.',
      field: 'Size',
      value: each.quota === null ? '' : String(each.quota),
      action: 'Set it',
    });
    if (given === undefined) return;
    const quota = bytesOf(given);
    if (quota === undefined) return toast(`“${given}” is not a size: 500m and 10g are.`, { kind: 'error' });
    try {
      await server().setWorkspaceQuota(each.id, quota, { owner: each.owner === own ? undefined : each.owner });
      toast(`The quota of ${each.id} is set`);
    } catch (failure) {
      toast(`Not set: ${reason(failure)}`, { kind: 'error' });
    }
    reload();
  };
  const download = async (each: Info) => {
    try {
      const pieces: BlobPart[] = [];
      for await (const piece of await of(each).export()) pieces.push(piece as Uint8Array<ArrayBuffer>);
      saveAs(`${each.id}.tar`, pieces, 'application/x-tar');
    } catch (failure) {
      toast(`Not exported: ${reason(failure)}`, { kind: 'error' });
    }
  };
  return (
    <>
      <div class="page-head">
        <h1>Workspaces</h1>
        <span class="quiet">Folders that outlive sandboxes.</span>
        <div class="end"><Button kind="primary" icon="plus" onClick={() => void make()}>Make a workspace</Button></div>
      </div>
      {error ? <ErrorBox title="The workspaces could not be read." error={error} retry={reload} /> : null}
      {!value && isLoading && <Loading what="Reading the workspaces" retry={reload} />}
      {value?.length === 0 && (
        <EmptyState icon="folder" title="There are no workspaces" action={<Button kind="primary" onClick={() => void make()}>Make a workspace</Button>}>
          A sandbox that names one has it at <code>/workspace</code>: <code>Sandbox.create(workspace_id="thesis")</code>. Its files stay when the sandbox ends.
        </EmptyState>
      )}
      {value && value.length > 0 && (
        <>
          <div class="row filters"><div class="search"><Icon name="search" /><input type="search" aria-label="Search workspaces" placeholder="Search" value={text} onInput={(event) => setText(event.currentTarget.value)} /></div></div>
          <div class="card scroll-x">
            <table class="plain">
              <thead><tr><th>Name</th><th>Owner</th><th>Used by</th><th>Made</th><th class="number">Size</th><th><span class="offscreen">Actions</span></th></tr></thead>
              <tbody>
                {rows.map((each) => (
                  <tr key={`${each.owner}/${each.id}`}>
                    <td>
                      <a href={link('admin', 'workspaces', each.owner, each.id)}><b>{safeText(each.id)}</b></a>
                      {Object.entries(each.labels).map(([name, label]) => <small key={name} class="quiet"> {safeText(`${name}=${label}`)}</small>)}
                    </td>
                    <td data-label="of">{safeText(each.owner)}</td>
                    <td data-label="Used by">{each.sessions.length ? each.sessions.slice(0, 3).map((session) => <a key={session} class="mono" href={link('sandboxes', session)}>{session} </a>) : <span class="quiet">nothing now</span>}{each.sessions.length > 3 && ` and ${each.sessions.length - 3} more`}</td>
                    <td class="nowrap" data-label="Made" title={at(each.createdAt)}>{ago(each.createdAt)}</td>
                    <td class="number nowrap" data-label="Size"><Size of={each} load={(signal) => of(each).info({ signal })} /></td>
                    <td class="actions">
                      <a class="button small" href={link('admin', 'workspaces', each.owner, each.id)}>Browse</a>
                      <Button isSmall onClick={() => void limit(each)}>Quota</Button>
                      <Button isSmall onClick={() => void download(each)}>Export</Button>
                      <Button isSmall kind="danger" isDisabled={each.sessions.length > 0} title={each.sessions.length ? 'End the sandboxes that use it first' : undefined} onClick={() => void remove(each)}>Remove</Button>
                    </td>
                  </tr>
                ))}
              </tbody>
            </table>
            {rows.length === 0 && <p class="quiet none">No workspace matches.</p>}
          </div>
        </>
      )}
    </>
  );
}

/** A list has no sizes: measuring one takes time, so it is done where someone asks. */
function Size({ of, load }: { of: Info; load: (signal: AbortSignal) => Promise<Info> }) {
  const [info, setInfo] = useState(of);
  const measure = () => {
    load(new AbortController().signal).then(setInfo, (failure: unknown) => toast(reason(failure), { kind: 'error' }));
  };
  if (info.size === null) return <button type="button" class="link" onClick={measure}>Measure</button>;
  return (
    <>
      {size(info.size)}{info.quota !== null && <span class="quiet"> of {size(info.quota)}</span>}
      {info.quota !== null && <Meter value={info.size} max={info.quota} label="Used of its quota" />}
    </>
  );
}

function Browse({ owner, id }: { owner: string; id: string }) {
  const [path, setPath] = useState('.');
  const [file, setFile] = useState<string | undefined>();
  const workspace = useMemo(() => workspaceOf(owner, id), [owner, id]);
  const { value, error, isLoading, reload } = useLoaded((signal) => workspace.files.list(path, { signal }), [workspace, path]);
  const rows = [...(value ?? [])].sort((a, b) => Number(b.kind === 'dir') - Number(a.kind === 'dir') || a.path.localeCompare(b.path));
  const parts = path === '.' ? [] : path.split('/').filter((part) => part !== '.');
  const name = (full: string) => full.slice(full.lastIndexOf('/') + 1);
  const inside = (full: string) => [...parts, name(full)].join('/');

  const download = async (full: string) => {
    try {
      const pieces: BlobPart[] = [];
      for await (const piece of await workspace.files.read(inside(full), 'stream')) pieces.push(piece as Uint8Array<ArrayBuffer>);
      saveAs(name(full), pieces);
    } catch (failure) {
      toast(`Not downloaded: ${reason(failure)}`, { kind: 'error' });
    }
  };
  const remove = async (full: string) => {
    const isSure = await confirm({ title: `Remove ${safeText(name(full))}?`, body: 'This cannot be undone.', action: 'Remove it', isDangerous: true });
    if (!isSure) return;
    try {
      await workspace.files.remove(inside(full), { recursive: true });
    } catch (failure) {
      toast(`Not removed: ${reason(failure)}`, { kind: 'error' });
    }
    reload();
  };
  return (
    <>
      <div class="page-head">
        <h1><a href={link('admin', 'workspaces')}>Workspaces</a> / {safeText(id)}</h1>
        {owner !== identity.value?.owner && <span class="quiet">It belongs to {safeText(owner)}: what you change, you change for them.</span>}
        <div class="end"><Button icon="refresh" onClick={reload}>Refresh</Button></div>
      </div>
      <nav class="row" aria-label="Folder">
        <button type="button" class="link" onClick={() => setPath('.')}>{safeText(id)}</button>
        {parts.map((part, index) => (
          <span key={index}>/ <button type="button" class="link" onClick={() => setPath(parts.slice(0, index + 1).join('/'))}>{safeText(part)}</button></span>
        ))}
      </nav>
      {error ? <ErrorBox title="The folder could not be read." error={error} retry={reload} /> : null}
      {!value && isLoading && <Loading what="Reading the folder" retry={reload} />}
      {value?.length === 0 && <EmptyState icon="folder" title="This folder is empty" action={path !== '.' ? <Button onClick={() => setPath(parts.slice(0, -1).join('/') || '.')}>Go up</Button> : <Button onClick={() => go('playground')}>Go to the playground</Button>}>Sandboxes write to it at <code>/workspace</code>.</EmptyState>}
      {rows.length > 0 && (
        <div class="card scroll-x">
          <table class="plain">
            <thead><tr><th>Name</th><th class="number">Size</th><th>Changed</th><th><span class="offscreen">Actions</span></th></tr></thead>
            <tbody>
              {rows.map((entry) => {
                const isFolder = entry.kind === 'dir';
                return (
                  <tr key={entry.path}>
                    <td><Icon name={isFolder ? 'folder' : 'file'} /> <button type="button" class="link" onClick={() => (isFolder ? setPath(inside(entry.path)) : setFile(inside(entry.path)))}>{safeText(name(entry.path))}</button>{entry.target && <span class="quiet"> → {safeText(entry.target)}</span>}</td>
                    <td class="number nowrap">{isFolder ? '' : size(entry.size)}</td>
                    <td class="nowrap quiet">{ago(new Date(Number(entry.modified) * 1000))}</td>
                    <td class="actions">{entry.kind === 'file' && <Button isSmall onClick={() => void download(entry.path)}>Download</Button>}<Button isSmall kind="danger" onClick={() => void remove(entry.path)}>Remove</Button></td>
                  </tr>
                );
              })}
            </tbody>
          </table>
        </div>
      )}
      {file !== undefined && <FileView workspace={workspace} path={file} onClose={() => setFile(undefined)} />}
    </>
  );
}

function FileView({ workspace, path, onClose }: { workspace: Workspace; path: string; onClose: () => void }) {
  const { value, error, isLoading, reload } = useLoaded((signal) => workspace.files.read(path, 'bytes', { length: MOST_SHOWN, signal }), [path]);
  const isText = value !== undefined && !value.slice(0, 8192).includes(0);
  return (
    <section class="card" aria-label={`File ${safeText(path)}`}>
      <div class="row"><h2 class="grow">{safeText(path)}</h2><Button isSmall onClick={onClose}>Close</Button></div>
      {error ? <ErrorBox error={error} retry={reload} /> : null}
      {isLoading && <Loading what="Reading the file" retry={reload} />}
      {value && (isText ? <pre class="file-text" tabIndex={0}>{safeLines(new TextDecoder().decode(value))}</pre> : <p class="quiet">It is not text: download it to open it.</p>)}
      {value && value.length >= MOST_SHOWN && <p class="quiet">Only the first {size(MOST_SHOWN)} are shown.</p>}
    </section>
  );
}
