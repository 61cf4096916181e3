/** A box in a second, to try things; and the code for what was just done. */
import './session/session.css';
import { signal } from '@preact/signals';
import { useState } from 'preact/hooks';
import { Sandbox, type CreateOptions } from 'hutch';
import { link } from './route.js';
import { mayRun, options, server } from './server.js';
import { StateBadge } from './sessions.js';
import { generate, type Action, type CreateAction, type Language } from './session/codegen.js';
import { hasEnded, SessionContext, sleeps, type Session } from './session/context.js';
import { FilesView } from './session/files.js';
import { NotebookView } from './session/notebook.js';
import { useOneSession } from './session/page.js';
import { PortsView } from './session/ports.js';
import { ShellPane } from './session/shell-pane.js';
import {
  brief, Button, confirm, copy, EmptyState, ErrorBox, Field, Icon, Loading, reason, safeText, Tabs, toast, until, useLoaded,
  useNow,
} from './ui/index.js';

const current = signal<string | undefined>(undefined);
const actions = signal<readonly Action[]>([]);
const tookMilliseconds = signal(0);
const note = (action: Action) => (actions.value = [...actions.value, action]);

const DEFAULTS = { image: '', memory: '1g', cpus: '2', ttl: '1800', disk: '', network: '', pids: '', idle: '', onIdle: 'kill', workspaceId: '', labels: '' };
const TIMES: [string, string][] = [['600', '10 minutes'], ['1800', '30 minutes'], ['3600', '1 hour'], ['14400', '4 hours'], ['86400', '1 day']];

export function Playground() {
  const id = current.value;
  return (
    <div class="page playground">
      <div class="playground-main">{!mayRun.value ? <p class="notice">Your key may only look. Ask for one with the scope “run” to create a sandbox.</p> : id === undefined ? <Create /> : <Use key={id} id={id} />}</div>
      <CodePanel />
    </div>
  );
}

function Create() {
  const [form, setForm] = useState(DEFAULTS);
  const [isOpen, setOpen] = useState(false);
  const [isBusy, setBusy] = useState(false);
  const [error, setError] = useState<unknown>();
  const found = useLoaded(async (signal) => {
    const [info, images] = await Promise.all([server().info({ signal }), server().images({ signal })]);
    return { info, images };
  }, []);
  const set = (name: keyof typeof DEFAULTS) => (event: { currentTarget: { value: string } }) => {
    const next = { ...form, [name]: event.currentTarget.value };
    setForm(next);
    actions.value = [{ do: 'create', ...chosen(next) }];
  };
  const create = async (event: Event) => {
    event.preventDefault();
    setBusy(true);
    setError(undefined);
    const begun = performance.now();
    try {
      const asked = chosen(form);
      const sandbox = await Sandbox.create({ ...options(), ...asked } as CreateOptions);
      tookMilliseconds.value = performance.now() - begun;
      actions.value = [{ do: 'create', ...asked }];
      current.value = sandbox.id;
    } catch (failure) {
      setError(failure);
    } finally {
      setBusy(false);
    }
  };
  const names = [...new Set([...(found.value?.info.images ?? []), ...(found.value?.images ?? []).filter(({ built }) => built).map(({ name }) => name)])];
  const byDefault = found.value?.info.defaultImage;
  return (
    <form class="card create" onSubmit={(event) => void create(event)}>
      <div>
        <h1>Playground</h1>
        <p class="quiet">A sandbox of your own in a second. The code for what you do is written beside it.</p>
      </div>
      {found.error !== undefined && <ErrorBox error={found.error} retry={found.reload} />}
      <div class="fields">
        <Field label="Image">
          <select value={form.image} onChange={set('image')}>
            <option value="">{byDefault ? `${safeText(byDefault)} (the default)` : 'the default'}</option>
            {names.filter((name) => name && name !== '-' && name !== byDefault).map((name) => <option key={name} value={name}>{safeText(name)}</option>)}
          </select>
        </Field>
        <Field label="Memory">
          <select value={form.memory} onChange={set('memory')}>
            {['256m', '512m', '1g', '2g', '4g', '8g'].map((each) => <option key={each}>{each}</option>)}
          </select>
        </Field>
        <Field label="Processors"><input type="number" min="0.1" max="64" step="0.1" value={form.cpus} onInput={set('cpus')} /></Field>
        <Field label="Ends after">
          <select value={form.ttl} onChange={set('ttl')}>{TIMES.map(([seconds, name]) => <option key={seconds} value={seconds}>{name}</option>)}</select>
        </Field>
        <Field label="Network">
          <select value={form.network} onChange={set('network')}>
            <option value="">none</option>
            {found.value?.info.relax.includes('network') && <option value="network">that of the engine</option>}
          </select>
        </Field>
      </div>
      <details open={isOpen} onToggle={(event) => setOpen(event.currentTarget.open)}>
        <summary>More</summary>
        <div class="fields">
          <Field label="Disk" hint="such as 512m; empty: half of the memory"><input value={form.disk} pattern="[0-9.]+\s*[kKmMgGtT]?[iI]?[bB]?" onInput={set('disk')} /></Field>
          <Field label="Processes" hint="empty: 512"><input type="number" min="1" max="32768" value={form.pids} onInput={set('pids')} /></Field>
          <Field label="When idle for" hint="seconds; empty: never"><input type="number" min="1" value={form.idle} onInput={set('idle')} /></Field>
          <Field label="then"><select value={form.onIdle} onChange={set('onIdle')}><option value="kill">end it</option><option value="hibernate">let it sleep</option></select></Field>
          <Field label="Workspace" hint="files that outlive the sandbox"><input value={form.workspaceId} onInput={set('workspaceId')} /></Field>
          <Field label="Labels" hint="name=value, with commas between"><input value={form.labels} onInput={set('labels')} /></Field>
        </div>
      </details>
      {error !== undefined && <ErrorBox error={error} title="No sandbox could be made" />}
      <div class="row"><Button type="submit" kind="primary" icon="play" isBusy={isBusy} autofocus>{isBusy ? 'Making a sandbox…' : 'Create a sandbox'}</Button></div>
    </form>
  );
}

/** What differs from what a server does by itself. */
function chosen(form: typeof DEFAULTS): CreateAction {
  const number = (text: string) => (text.trim() === '' || !Number.isFinite(Number(text)) ? undefined : Number(text));
  const labels = Object.fromEntries(
    form.labels.split(',').map((each) => each.trim()).filter(Boolean).map((each) => {
      const at = each.indexOf('=');
      return at < 0 ? [each, ''] : [each.slice(0, at).trim(), each.slice(at + 1).trim()];
    }),
  );
  const idle = number(form.idle);
  const all: CreateAction = {
    image: form.image || undefined,
    memory: form.memory === DEFAULTS.memory ? undefined : form.memory,
    cpus: form.cpus === DEFAULTS.cpus ? undefined : number(form.cpus),
    pids: number(form.pids),
    disk: form.disk.trim() || undefined,
    relax: form.network ? [form.network] : undefined,
    ttl: number(form.ttl),
    idle,
    onIdle: idle === undefined || form.onIdle === 'kill' ? undefined : form.onIdle,
    workspaceId: form.workspaceId.trim() || undefined,
    labels: Object.keys(labels).length ? labels : undefined,
  };
  return Object.fromEntries(Object.entries(all).filter(([, value]) => value !== undefined));
}

const PARTS = [
  { id: 'shell', label: 'Shell', icon: 'terminal' },
  { id: 'python', label: 'Python', icon: 'edit' },
  { id: 'files', label: 'Files', icon: 'folder' },
  { id: 'ports', label: 'Ports', icon: 'arrow' },
] as const;

function Use({ id }: { id: string }) {
  const one = useOneSession(id);
  const now = useNow();
  const [part, setPart] = useState<(typeof PARTS)[number]['id']>('shell');
  const [isBusy, setBusy] = useState(false);
  const startAgain = () => {
    current.value = undefined;
    actions.value = [];
  };
  if (one.error !== undefined && !one.info) {
    return <><ErrorBox error={one.error} retry={one.reload} /><Button onClick={startAgain}>Make another</Button></>;
  }
  const { sandbox, info } = one;
  if (!sandbox || !info) return <Loading what="Opening the sandbox" retry={one.reload} />;
  const perform = async (what: Action, work: () => Promise<unknown>) => {
    setBusy(true);
    try {
      await work();
      note(what);
    } catch (error) {
      toast(reason(error), { kind: 'error' });
    }
    await sandbox.refresh().then(one.accept, () => one.reload());
    setBusy(false);
  };
  const end = async () => {
    if (!(await confirm({ title: 'End this sandbox?', body: 'Everything in it is removed.', action: 'End it', isDangerous: true }))) return;
    await perform({ do: 'close' }, () => sandbox.close());
  };
  const session: Session = { sandbox, info, refresh: async () => one.accept(await sandbox.refresh()), note };
  const isOver = hasEnded(info);
  return (
    <SessionContext.Provider value={session}>
      <header class="session-head">
        <h1>Playground</h1>
        <a class="mono" href={link('sandboxes', id)} title="Everything about this sandbox">{safeText(id)}</a>
        <StateBadge state={info.status} />
        {tookMilliseconds.value > 0 && <span class="quiet nowrap"><Icon name="clock" size={13} /> made in {brief(tookMilliseconds.value / 1000)}</span>}
        {!isOver && info.expiresAt && <span class="quiet nowrap">ends {until(info.expiresAt, now)}</span>}
        <span class="end">
          {!isOver && <Button isSmall icon="clock" isDisabled={isBusy} onClick={() => void perform({ do: 'extend', ttl: 3600 }, () => sandbox.extend(3600))}>1 hour more</Button>}
          {info.status === 'running' && <Button isSmall icon="moon" isDisabled={isBusy} onClick={() => void perform({ do: 'hibernate' }, () => sandbox.hibernate())}>Sleep</Button>}
          {info.status === 'asleep' && <Button isSmall icon="sun" isDisabled={isBusy} onClick={() => void perform({ do: 'wake' }, () => sandbox.wake())}>Wake</Button>}
          {!isOver && <Button isSmall kind="danger" icon="stop" isDisabled={isBusy} onClick={() => void end()}>End</Button>}
          <Button isSmall kind={isOver ? 'primary' : 'plain'} icon="plus" onClick={startAgain}>Another</Button>
        </span>
      </header>
      <Tabs label="Ways to use it" tabs={[...PARTS]} current={part} onChange={setPart} />
      {isOver || sleeps(info) ? (
        <EmptyState title={isOver ? 'This sandbox has ended' : 'This sandbox is asleep'} icon={isOver ? 'stop' : 'moon'}>
          {isOver ? 'The code beside this makes another one and does the same in it.' : 'Wake it to go on: everything is kept.'}
        </EmptyState>
      ) : (
        PARTS.map((each) => (
          <div key={each.id} class={`session-part part-${each.id}`} role="tabpanel" aria-label={each.label} hidden={each.id !== part}>
            {each.id === 'shell' && <ShellPane />}
            {each.id === 'python' && part === 'python' && <NotebookView />}
            {each.id === 'files' && part === 'files' && <FilesView />}
            {each.id === 'ports' && part === 'ports' && <PortsView />}
          </div>
        ))
      )}
    </SessionContext.Provider>
  );
}

const LANGUAGES = [
  { id: 'python', label: 'Python' },
  { id: 'typescript', label: 'TypeScript' },
  { id: 'curl', label: 'curl' },
] as const satisfies { id: Language; label: string }[];

function CodePanel() {
  const [language, setLanguage] = useState<Language>('python');
  const code = generate(language, actions.value, location.origin);
  return (
    <aside class="card code-panel" aria-label="Code for what you did">
      <div class="row">
        <h2>As code</h2>
        <span class="grow" />
        <Button isSmall icon="copy" onClick={() => void copy(code, 'The code is copied.')}>Copy</Button>
        {actions.value.length > 1 && <Button isSmall kind="ghost" onClick={() => (actions.value = actions.value.slice(0, 1))}>Clear</Button>}
      </div>
      <Tabs label="Language" tabs={[...LANGUAGES]} current={language} onChange={setLanguage} />
      <pre class="code-text" tabIndex={0} aria-label={`Code in ${language}`}>{code}</pre>
    </aside>
  );
}
