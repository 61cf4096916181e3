/** Settings: each key explained, a change checked and shown as a diff before it is written. */
import { Conflict, type Schemas } from 'hutch';
import { useEffect, useMemo, useRef, useState } from 'preact/hooks';
import { server } from '../server.js';
import { Badge, Button, Dialog, EmptyState, ErrorBox, Icon, Loading, reason, safeText, sentence, toast, useLoaded, useShortcuts } from '../ui/index.js';

type Setting = Schemas['Setting'];
type Check = Schemas['SettingsCheck'];
/** By key: text as the file has it, or null for the default. */
type Changes = Record<string, string | null>;

const CHECK_AFTER = 400; // milliseconds without a key pressed

export function Settings() {
  const { value, error, isLoading, reload } = useLoaded((signal) => server().settings({ signal }), []);
  const [text, setText] = useState('');
  const [isChangedOnly, setChangedOnly] = useState(false);
  const [changes, setChanges] = useState<Changes>({});
  const [check, setCheck] = useState<Check | undefined>();
  const [isReviewed, setReviewed] = useState(false);
  const [pending, setPending] = useState<string[]>([]);
  const search = useRef<HTMLInputElement>(null);
  useShortcuts([{ keys: '/', does: 'Search the settings', run: () => search.current?.focus() }]);
  const many = Object.keys(changes).length;

  useEffect(() => {
    setCheck(undefined);
    if (!many) return;
    const control = new AbortController();
    const timer = setTimeout(() => {
      server().checkSettings(changes, { signal: control.signal }).then(
        setCheck,
        (failure: unknown) => !control.signal.aborted && toast(`The change could not be checked: ${reason(failure)}`, { kind: 'error' }),
      );
    }, CHECK_AFTER);
    return () => {
      clearTimeout(timer);
      control.abort();
    };
  }, [changes]);

  const groups = useMemo(() => {
    const words = text.toLowerCase().split(/\s+/).filter(Boolean);
    const found = new Map<string, Setting[]>();
    for (const setting of value?.settings ?? []) {
      const all = `${setting.key} ${setting.about} ${setting.value}`.toLowerCase();
      if (!words.every((word) => all.includes(word))) continue;
      if (isChangedOnly && setting.origin === 'default' && !(setting.key in changes)) continue;
      found.set(setting.section, [...(found.get(setting.section) ?? []), setting]);
    }
    return found;
  }, [value, text, isChangedOnly, changes]);

  const change = (setting: Setting, next: string | null) => {
    const rest = { ...changes };
    if (next === (setting.pending ?? setting.value)) delete rest[setting.key];
    else rest[setting.key] = next;
    setChanges(rest);
  };
  const problems = Object.keys(check?.problems ?? {}).length;

  const write = async () => {
    if (!check) return;
    try {
      const written = await server().changeSettings(changes, check.digest);
      setPending(written.needsRestart);
      setChanges({});
      setReviewed(false);
      toast('The settings are written');
      reload();
    } catch (failure) {
      if (failure instanceof Conflict) {
        toast('The file was changed by someone else: look at the difference again.', { kind: 'error' });
        setReviewed(false);
        setChanges({ ...changes });
        reload();
      } else toast(`Not written: ${reason(failure)}`, { kind: 'error' });
    }
  };
  return (
    <>
      <div class="page-head">
        <h1>Settings</h1>
        <span class="quiet">{value?.file ? <>Kept in <code>{safeText(value.file)}</code></> : 'This server has no config file.'}</span>
      </div>
      {value && !value.editable && <p class="notice">{value.whyNot ? `${sentence(value.whyNot)}.` : 'They cannot be changed from here.'}</p>}
      {pending.length > 0 && <p class="notice warning" role="status">Restart the server for {pending.length === 1 ? <code>{pending[0]}</code> : `${pending.length} changes`} to take effect: <code>hutch stop && hutch serve --detach</code>. Sandboxes keep running.</p>}
      {error ? <ErrorBox title="The settings could not be read." error={error} retry={reload} /> : null}
      {!value && isLoading && <Loading what="Reading the settings" retry={reload} />}
      {value && (
        <div class="row filters">
          <div class="search"><Icon name="search" /><input ref={search} type="search" aria-label="Search settings" placeholder="Search names and explanations" value={text} onInput={(event) => setText(event.currentTarget.value)} /></div>
          <label class="check-field"><input type="checkbox" checked={isChangedOnly} onChange={() => setChangedOnly(!isChangedOnly)} />Only those that are not the default</label>
        </div>
      )}
      {value && groups.size === 0 && <EmptyState icon="search" title="No setting matches">Try other words: names, explanations and values are searched.</EmptyState>}
      {[...groups].map(([section, settings]) => (
        <section key={section} class="card settings" aria-label={section || 'General'}>
          <h2>{section || 'General'}</h2>
          {settings.map((setting) => (
            <Row
              key={setting.key}
              setting={setting}
              isEditable={value!.editable && !setting.fixed}
              changed={changes[setting.key]}
              problem={check?.problems[setting.key]}
              onChange={(next) => change(setting, next)}
              onUndo={() => setChanges(Object.fromEntries(Object.entries(changes).filter(([key]) => key !== setting.key)))}
            />
          ))}
        </section>
      ))}
      {many > 0 && (
        <div class="change-bar" role="region" aria-label="Changes">
          <b>{many === 1 ? '1 change' : `${many} changes`}</b>
          <span class={problems ? 'bad-text' : 'quiet'} role="status">{check ? (problems ? `${problems} invalid` : 'checked') : 'checking…'}</span>
          <Button kind="ghost" onClick={() => setChanges({})}>Discard</Button>
          <Button kind="primary" isDisabled={!check || problems > 0} onClick={() => setReviewed(true)}>Show the difference</Button>
        </div>
      )}
      {isReviewed && check && (
        <Dialog
          title="Write these changes?"
          isWide
          onClose={() => setReviewed(false)}
          actions={<><Button onClick={() => setReviewed(false)}>Go back</Button><Button kind="primary" onClick={() => void write()}>Write the file</Button></>}
        >
          <div class="stack">
            <Diff text={check.diff} />
            <p class="quiet">
              {check.needsRestart.length ? <>They take effect after a restart of the server: <code>{check.needsRestart.join(', ')}</code>.</> : 'They take effect at once.'} Comments in the file stay.
            </p>
          </div>
        </Dialog>
      )}
    </>
  );
}

function Diff({ text }: { text: string }) {
  if (!text) return <p class="quiet">The file stays as it is.</p>;
  return (
    <pre class="diff" tabIndex={0}>
      {text.replace(/\n$/, '').split('\n').map((line, index) => (
        <span key={index} class={/^(\+\+\+|---)/.test(line) ? 'quiet' : line.startsWith('+') ? 'added' : line.startsWith('-') ? 'removed' : line.startsWith('@@') ? 'quiet' : ''}>{safeText(line)}{'\n'}</span>
      ))}
    </pre>
  );
}

interface RowProps {
  setting: Setting;
  isEditable: boolean;
  changed: string | null | undefined;
  problem: string | undefined;
  onChange: (next: string | null) => void;
  onUndo: () => void;
}

function Row({ setting, isEditable, changed, problem, onChange, onUndo }: RowProps) {
  const isChanged = changed !== undefined;
  const text = changed === null ? setting.default : (changed ?? setting.pending ?? setting.value);
  const id = `setting-${setting.key}`;
  const props = { id, disabled: !isEditable, 'aria-describedby': `${id}-about`, 'aria-invalid': problem !== undefined };
  const field = {
    ...props,
    autocomplete: 'off',
    spellcheck: false,
    placeholder: setting.secret && setting.value ? 'is set; type to replace it' : setting.default || 'nothing',
    value: setting.secret && !isChanged ? '' : text,
    onInput: (event: InputEvent) => onChange((event.currentTarget as HTMLInputElement).value),
  };
  return (
    <div class={`setting ${isChanged ? 'changed' : ''}`}>
      <div class="setting-name">
        <label for={id}><code>{setting.key}</code></label>
        <div id={`${id}-about`} class="quiet">{sentence(setting.about)}.{setting.needsRestart ? '' : ' Counts at once.'}</div>
        <small class="quiet">{setting.allowed}{setting.secret ? '' : `; default ${setting.default === '' ? 'nothing' : setting.default}`}</small>
      </div>
      <div class="setting-value">
        {setting.kind === 'truth' ? (
          <select {...props} value={text} onChange={(event) => onChange(event.currentTarget.value)}><option value="true">true</option><option value="false">false</option></select>
        ) : setting.kind === 'choice' && setting.choices.length ? (
          <select {...props} value={text} onChange={(event) => onChange(event.currentTarget.value)}>{[...new Set([...setting.choices, text])].map((choice) => <option key={choice} value={choice}>{choice || 'none'}</option>)}</select>
        ) : (
          setting.secret
            ? <form onSubmit={(event) => event.preventDefault()}><input {...field} type="password" autocomplete="new-password" /></form>
            : <input {...field} />
        )}
        <div class="row setting-origin">
          {setting.origin !== 'default' && <Badge kind="info">{safeText(setting.origin)}</Badge>}
          {setting.pending !== null && !isChanged && <Badge kind="warning">{`after a restart; now ${setting.value}`}</Badge>}
          {setting.fixed && <small class="quiet">Fixed by the variable or option: the file has no effect.</small>}
          {isChanged && <Button isSmall kind="ghost" onClick={onUndo}>Undo</Button>}
          {isEditable && !isChanged && setting.origin !== 'default' && <Button isSmall kind="ghost" onClick={() => onChange(null)}>Use the default</Button>}
        </div>
        {problem && <small class="bad-text" role="alert">{problem}</small>}
      </div>
    </div>
  );
}
