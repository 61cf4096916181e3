/** Keys, and what their owners may have. */
import type { Schemas } from 'hutch';
import { useMemo, useState } from 'preact/hooks';
import { identity, server } from '../server.js';
import {
  ago, ask, at, Badge, Button, Code, confirm, Dialog, EmptyState, ErrorBox, Field, Icon, Loading, reason, safeText, size, toast, until,
  useLoaded, useNow, useShortcuts,
} from '../ui/index.js';

type Key = Schemas['Key'];

const SCOPES = [
  ['run', 'Make and use sandboxes of the owner'],
  ['read', 'Look only, change nothing'],
  ['admin', 'Everything, also for other owners'],
  ['metrics', 'Read metrics only'],
] as const;
const EXPIRES = [
  ['', 'The server’s default'],
  ['12h', 'In 12 hours'],
  ['30d', 'In 30 days'],
  ['365d', 'In a year'],
  ['never', 'Never'],
] as const;

const stateOf = (key: Key, now: number) =>
  key.revokedAt ? 'revoked' : key.expiresAt && +key.expiresAt <= now ? 'expired' : 'valid';

export function Keys() {
  const { value, error, isLoading, reload } = useLoaded((signal) => server().keys({ signal }), []);
  const [isMaking, setMaking] = useState(false);
  const [made, setMade] = useState<Key | undefined>();
  const [quotaOf, setQuotaOf] = useState<string | undefined>();
  const [text, setText] = useState('');
  const [isAll, setAll] = useState(false);
  const now = useNow(10000);
  useShortcuts([{ keys: 'n', does: 'Make a key', run: () => setMaking(true) }]);

  const rows = useMemo(() => {
    const words = text.toLowerCase();
    return (value ?? [])
      .filter((key) => (isAll || stateOf(key, now) === 'valid') && `${key.id} ${key.owner} ${key.label} ${key.scope}`.toLowerCase().includes(words))
      .sort((a, b) => +b.createdAt - +a.createdAt);
  }, [value, text, isAll, now]);

  const act = async (what: string, run: () => Promise<void>) => {
    try {
      await run();
    } catch (failure) {
      toast(`${what}: ${reason(failure)}`, { kind: 'error' });
    }
    reload();
  };
  const revoke = async (key: Key) => {
    const own = key.id === identity.value?.key;
    const isSure = await confirm({
      title: `Revoke ${key.label || key.id}?`,
      body: `${own ? 'This is the key that you are logged in with. ' : ''}What is connected with it is cut off at once, and it never works again. Sandboxes of ${safeText(key.owner)} go on.`,
      action: 'Revoke',
      isDangerous: true,
    });
    if (isSure) await act('Not revoked', async () => (await server().revokeKey(key.id), toast(`${key.id} is revoked`)));
  };
  const extend = async (key: Key) => {
    const expires = await ask({ title: `When ${key.label || key.id} expires`, field: 'From now (12h, 30d), a date (2027-01-31), or never', value: '30d', action: 'Change' });
    if (expires) await act('Not changed', async () => {
      const changed = await server().extendKey(key.id, expires.trim());
      toast(`${key.id} expires ${until(changed.expiresAt)}`);
    });
  };
  const rotate = async (key: Key) => {
    const overlap = await ask({
      title: `Replace ${key.label || key.id}`,
      body: 'You get a new key with the same rights. The old one goes on working for a while, so that programs can be changed one by one.',
      field: 'How long the old one goes on (0s, 30m, 7d)',
      value: '1h',
      action: 'Make the new key',
    });
    if (overlap !== undefined) await act('Not replaced', async () => setMade(await server().rotateKey(key.id, { overlap: overlap.trim() || '1h' })));
  };
  return (
    <>
      <div class="page-head">
        <h1>Keys</h1>
        <span class="quiet">A key opens the sandboxes, workspaces and quota of its owner.</span>
        <div class="end"><Button kind="primary" icon="plus" onClick={() => setMaking(true)}>Make a key</Button></div>
      </div>
      {error ? <ErrorBox title="The keys could not be read." error={error} retry={reload} /> : null}
      {!value && isLoading && <Loading what="Reading the keys" retry={reload} />}
      {value?.length === 0 && <EmptyState icon="key" title="There are no keys" action={<Button kind="primary" onClick={() => setMaking(true)}>Make a key</Button>}>Without any, everyone who reaches this server may do everything. With the first one, all need one.</EmptyState>}
      {value && value.length > 0 && (
        <>
          <div class="row filters">
            <div class="search"><Icon name="search" /><input type="search" aria-label="Search keys" placeholder="Search" value={text} onInput={(event) => setText(event.currentTarget.value)} /></div>
            <label class="check-field"><input type="checkbox" checked={isAll} onChange={() => setAll(!isAll)} />Also revoked and expired</label>
          </div>
          <div class="card scroll-x">
            <table class="plain">
              <thead><tr><th>Key</th><th>Owner</th><th>Scope</th><th>Last used</th><th>Expires</th><th>Made</th><th><span class="offscreen">Actions</span></th></tr></thead>
              <tbody>
                {rows.map((key) => {
                  const state = stateOf(key, now);
                  return (
                    <tr key={key.id}>
                      <td>
                        <b>{safeText(key.label) || <span class="quiet">no label</span>}</b>{key.id === identity.value?.key && <> <Badge kind="info">yours</Badge></>}
                        <div class="mono quiet">{key.prefix}…</div>
                        {key.images.length > 0 && <small class="quiet">Images: {safeText(key.images.join(', '))}</small>}
                        {key.workspaces.length > 0 && <small class="quiet"> Workspaces: {safeText(key.workspaces.join(', '))}</small>}
                      </td>
                      <td><button type="button" class="link" title="See and set the quota" onClick={() => setQuotaOf(key.owner)}>{safeText(key.owner)}</button></td>
                      <td><Badge kind={key.scope === 'admin' ? 'warning' : 'neutral'}>{key.scope}</Badge></td>
                      <td class="nowrap" data-label="Used" title={at(key.lastUsedAt)}>{ago(key.lastUsedAt, now)}</td>
                      <td class="nowrap" data-label="Expires" title={at(key.expiresAt)}>{state === 'valid' ? until(key.expiresAt, now) : <Badge kind="bad">{state}</Badge>}</td>
                      <td class="nowrap" data-label="Made" title={at(key.createdAt)}>{ago(key.createdAt, now)}</td>
                      <td class="actions">
                        {state !== 'revoked' && (
                          <>
                            {!key.parent && <Button isSmall onClick={() => void extend(key)}>Extend</Button>}
                            {!key.parent && <Button isSmall onClick={() => void rotate(key)}>Rotate</Button>}
                            <Button isSmall kind="danger" onClick={() => void revoke(key)}>Revoke</Button>
                          </>
                        )}
                      </td>
                    </tr>
                  );
                })}
              </tbody>
            </table>
            {rows.length === 0 && <p class="quiet none">No key matches.</p>}
          </div>
        </>
      )}
      {isMaking && <MakeDialog onClose={() => setMaking(false)} onMade={(key) => (setMaking(false), setMade(key), reload())} />}
      {made && (
        <Dialog title="The new key" onClose={() => setMade(undefined)} actions={<Button kind="primary" onClick={() => setMade(undefined)}>I have copied it</Button>}>
          <div class="stack">
            <p class="notice warning">It is shown only now: the server keeps no more than a hash of it.</p>
            <Code text={made.key ?? ''} />
            <p class="quiet">It belongs to {safeText(made.owner)}, has the scope {made.scope} and expires {until(made.expiresAt)}. Programs take it as <code>HUTCH_API_KEY</code>.</p>
          </div>
        </Dialog>
      )}
      {quotaOf !== undefined && <QuotaDialog owner={quotaOf} onClose={() => setQuotaOf(undefined)} />}
    </>
  );
}

const names = (text: string): string[] => text.split(/[\s,]+/).filter(Boolean);

function MakeDialog({ onClose, onMade }: { onClose: () => void; onMade: (key: Key) => void }) {
  const [owner, setOwner] = useState('');
  const [label, setLabel] = useState('');
  const [scope, setScope] = useState<Key['scope']>('run');
  const [expires, setExpires] = useState('30d');
  const [images, setImages] = useState('');
  const [workspaces, setWorkspaces] = useState('');
  const [error, setError] = useState<unknown>();
  const [isBusy, setBusy] = useState(false);
  const make = async (event: Event) => {
    event.preventDefault();
    setBusy(true);
    try {
      onMade(await server().makeKey(owner.trim(), { label: label.trim(), scope, expires, images: names(images), workspaces: names(workspaces) }));
    } catch (failure) {
      setError(failure);
      setBusy(false);
    }
  };
  return (
    <Dialog title="Make a key" onClose={onClose}>
      <form class="stack" onSubmit={make}>
        <Field label="Owner" hint="A person, a team or a program: its sandboxes are seen by all of its keys.">
          <input value={owner} required autofocus spellcheck={false} onInput={(event) => setOwner(event.currentTarget.value)} />
        </Field>
        <Field label="Label" hint="What it is for, so that you know later which one to revoke.">
          <input value={label} onInput={(event) => setLabel(event.currentTarget.value)} />
        </Field>
        <div class="fields">
          <Field label="Scope" hint={SCOPES.find(([id]) => id === scope)?.[1]}>
            <select value={scope} onChange={(event) => setScope(event.currentTarget.value as Key['scope'])}>
              {SCOPES.map(([id]) => <option key={id} value={id}>{id}</option>)}
            </select>
          </Field>
          <Field label="Expires">
            <select value={expires} onChange={(event) => setExpires(event.currentTarget.value)}>
              {EXPIRES.map(([id, words]) => <option key={id} value={id}>{words}</option>)}
            </select>
          </Field>
        </div>
        <details>
          <summary>Limit it to images or workspaces</summary>
          <div class="fields">
            <Field label="Images" hint="Empty: all"><input value={images} spellcheck={false} onInput={(event) => setImages(event.currentTarget.value)} /></Field>
            <Field label="Workspaces" hint="Empty: all"><input value={workspaces} spellcheck={false} onInput={(event) => setWorkspaces(event.currentTarget.value)} /></Field>
          </div>
        </details>
        {error ? <ErrorBox error={error} /> : null}
        <div class="dialog-actions">
          <Button onClick={onClose}>Cancel</Button>
          <Button type="submit" kind="primary" isBusy={isBusy}>Make the key</Button>
        </div>
      </form>
    </Dialog>
  );
}

const FIELDS = [
  ['sessions', 'Sandboxes at once', 1, ''],
  ['memory', 'Memory of all sandboxes', 1024 ** 3, 'GiB'],
  ['cpus', 'CPUs of all sandboxes', 1, ''],
  ['disk', 'Disk of workspaces and sleeping sandboxes', 1024 ** 3, 'GiB'],
  ['rate', 'Requests per second', 1, ''],
] as const;

function QuotaDialog({ owner, onClose }: { owner: string; onClose: () => void }) {
  const { value, error, isLoading, reload } = useLoaded((signal) => server().quota(owner, { signal }), [owner]);
  const [changes, setChanges] = useState<Record<string, string>>({});
  const [failure, setFailure] = useState<unknown>();
  const save = async (event: Event) => {
    event.preventDefault();
    if (!value) return;
    const quota: Record<string, number | null> = {};
    for (const [name, words, unit] of FIELDS) {
      const text = changes[name];
      if (text === undefined) quota[name] = value.quota[name];
      else if (text.trim() === '') quota[name] = null;
      else if (!Number.isFinite(Number(text)) || Number(text) < 0) return setFailure(new Error(`${words} is a number, or empty for no limit.`));
      else quota[name] = Number(text) * unit;
    }
    try {
      await server().setQuota(owner, quota);
      toast(`The quota of ${safeText(owner)} is changed`);
      onClose();
    } catch (problem) {
      setFailure(problem);
    }
  };
  return (
    <Dialog title={`Quota of ${safeText(owner)}`} onClose={onClose}>
      {error ? <ErrorBox error={error} retry={reload} /> : null}
      {isLoading && !value && <Loading retry={reload} />}
      {value && (
        <form class="stack" onSubmit={save}>
          <p class="quiet">Uses {value.sessions} sandboxes, {size(value.memory)} of memory, {value.cpus} CPUs and {size(value.disk)} of disk. An empty field is no limit.</p>
          <div class="fields">
            {FIELDS.map(([name, words, unit, unitName]) => (
              <Field key={name} label={`${words}${unitName && `, ${unitName}`}`}>
                <input
                  inputMode="decimal"
                  placeholder="no limit"
                  value={changes[name] ?? (value.quota[name] === null ? '' : String(Math.round((value.quota[name]! / unit) * 100) / 100))}
                  onInput={(event) => setChanges({ ...changes, [name]: event.currentTarget.value })}
                />
              </Field>
            ))}
          </div>
          {failure ? <ErrorBox error={failure} /> : null}
          <div class="dialog-actions"><Button onClick={onClose}>Cancel</Button><Button type="submit" kind="primary">Set the quota</Button></div>
        </form>
      )}
    </Dialog>
  );
}
