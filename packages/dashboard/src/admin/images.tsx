/** Images: what boxes begin with. */
import type { Schemas } from 'hutch';
import type { ComponentChildren } from 'preact';
import { useRef, useState } from 'preact/hooks';
import { link } from '../route.js';
import { server } from '../server.js';
import {
  Badge, Button, confirm, Dialog, EmptyState, ErrorBox, Field, Icon, Loading, reason, safeText, size, toast, useLoaded, useShortcuts,
} from '../ui/index.js';

type ImageInfo = Schemas['ImageInfo'];

export function Images() {
  const { value, error, isLoading, reload } = useLoaded((signal) => server().images({ signal }), []);
  const [building, setBuilding] = useState<{ name: string } | undefined>();
  const [isPulling, setPulling] = useState(false);
  useShortcuts([{ keys: 'n', does: 'Build an image', run: () => setBuilding({ name: '' }) }]);
  const remove = async (image: ImageInfo) => {
    const isSure = await confirm({
      title: `Remove ${image.name}?`,
      body: 'Sandboxes that use it keep running. New ones can be made of it once it is built again.',
      action: 'Remove',
      isDangerous: true,
    });
    if (!isSure) return;
    try {
      await server().removeImage(image.name);
      toast(`${image.name} is removed`);
    } catch (failure) {
      toast(`${image.name} was not removed: ${reason(failure)}`, { kind: 'error' });
    }
    reload();
  };
  return (
    <>
      <div class="page-head">
        <h1>Images</h1>
        <span class="quiet">What sandboxes begin with: a Linux with programs and packages.</span>
        <div class="end">
          <Button icon="download" onClick={() => setPulling(true)}>Pull an image</Button>
          <Button kind="primary" icon="plus" onClick={() => setBuilding({ name: '' })}>Build an image</Button>
        </div>
      </div>
      {error ? <ErrorBox title="The images could not be read." error={error} retry={reload} /> : null}
      {!value && isLoading && <Loading what="Reading the images" retry={reload} />}
      {value?.length === 0 && <EmptyState title="There are no images" action={<Button kind="primary" onClick={() => setBuilding({ name: '' })}>Build an image</Button>}>Sandboxes have the programs of this machine. Build an image for a Python with the packages that your agents need.</EmptyState>}
      {value && value.length > 0 && (
        <div class="card scroll-x">
          <table class="plain">
            <thead><tr><th>Name</th><th>State</th><th>Packages</th><th class="number">Size</th><th><span class="offscreen">Actions</span></th></tr></thead>
            <tbody>
              {value.map((image) => (
                <tr key={image.name}>
                  <td><b>{safeText(image.name)}</b></td>
                  <td>{image.built ? <Badge kind="good">ready</Badge> : <Badge>not built</Badge>}</td>
                  <td class="quiet wide" data-label="Packages">{image.packages.length ? <Packages names={image.packages} /> : '–'}</td>
                  <td class="number nowrap" data-label="Size">{size(image.size)}</td>
                  <td class="actions">
                    {image.built && <a class="button small" href={link('playground')}>Try</a>}
                    {image.name !== 'host' && <Button isSmall onClick={() => setBuilding(image)}>{image.built ? 'Build again' : 'Build'}</Button>}
                    {image.built && image.name !== 'host' && <Button isSmall kind="danger" onClick={() => void remove(image)}>Remove</Button>}
                  </td>
                </tr>
              ))}
            </tbody>
          </table>
        </div>
      )}
      {building && <BuildDialog image={building} onClose={() => (setBuilding(undefined), reload())} />}
      {isPulling && <PullDialog onClose={() => (setPulling(false), reload())} />}
    </>
  );
}

function Packages({ names }: { names: string[] }) {
  const [isWhole, setWhole] = useState(false);
  const shown = isWhole ? names : names.slice(0, 6);
  return (
    <>
      {safeText(shown.join(', '))}
      {names.length > shown.length && <> <button type="button" class="link" onClick={() => setWhole(true)}>and {names.length - shown.length} more</button></>}
    </>
  );
}

const split = (text: string): string[] => text.split(/[\s,]+/).filter(Boolean);

function BuildDialog({ image, onClose }: { image: Partial<ImageInfo>; onClose: () => void }) {
  const [name, setName] = useState(image.name ?? '');
  const [packages, setPackages] = useState('');
  const [preload, setPreload] = useState('');
  return (
    <WorkDialog
      title={image.name ? `Build ${image.name}` : 'Build an image'}
      action="Build"
      failed="The image was not built."
      done={`${name} is ready: sandboxes can be made of it.`}
      isReady={Boolean(name.trim())}
      begin={(signal) => server().buildImage(name.trim(), { packages: split(packages), preload: split(preload), signal })}
      onClose={onClose}
    >
      <Field label="Name" hint="Letters, digits, “-”, “_” and “.”. “python”, “data” and “chem” are recipes that come with Hutch.">
        <input value={name} disabled={Boolean(image.name)} spellcheck={false} onInput={(event) => setName(event.currentTarget.value)} />
      </Field>
      <Field label="Python packages" hint="As pip takes them, separated by spaces. Leave it empty for those of the recipe.">
        <textarea rows={3} value={packages} spellcheck={false} placeholder="numpy pandas==2.3.3" onInput={(event) => setPackages(event.currentTarget.value)} />
      </Field>
      <Field label="Modules to preload" hint="Cells that import them start at once.">
        <input value={preload} spellcheck={false} placeholder="numpy pandas" onInput={(event) => setPreload(event.currentTarget.value)} />
      </Field>
    </WorkDialog>
  );
}

function PullDialog({ onClose }: { onClose: () => void }) {
  const [reference, setReference] = useState('');
  return (
    <WorkDialog
      title="Pull an image"
      action="Pull"
      failed="The image was not pulled."
      done={`${reference} is ready: sandboxes can be made of it.`}
      isReady={Boolean(reference.trim())}
      begin={(signal) => server().pullImage(reference.trim(), { signal })}
      onClose={onClose}
    >
      <Field label="Reference" hint="As for docker pull: a name, or a registry with a name, with a tag or a digest.">
        <input value={reference} spellcheck={false} placeholder="alpine:3.22" onInput={(event) => setReference(event.currentTarget.value)} />
      </Field>
    </WorkDialog>
  );
}

type Progress = Schemas['BuildProgress'];

/** The same step again says how far it is by now. */
const withStep = (steps: Progress[], step: Progress): Progress[] =>
  [...(steps.at(-1)?.step === step.step ? steps.slice(0, -1) : steps), step].slice(-200);

/** Asks with `children`, then shows what `begin` does, step by step. Closing it stops that. */
function WorkDialog({ title, action, failed, done, isReady, begin, onClose, children }: {
  title: string; action: string; failed: string; done: string; isReady: boolean;
  begin: (signal: AbortSignal) => AsyncIterable<Progress>; onClose: () => void; children: ComponentChildren;
}) {
  const [steps, setSteps] = useState<Progress[] | undefined>();
  const [error, setError] = useState<unknown>();
  const control = useRef<AbortController | undefined>(undefined);
  const isDone = steps?.at(-1)?.done ?? false;
  const isRunning = steps !== undefined && !error && !isDone;

  const run = async () => {
    const { signal } = (control.current = new AbortController());
    setError(undefined);
    setSteps([]);
    try {
      for await (const step of begin(signal)) setSteps((old) => withStep(old ?? [], step));
    } catch (failure) {
      setError(signal.aborted ? new Error('You stopped it. Nothing is left of it.') : failure);
    }
  };
  const leave = async () => {
    if (isRunning) {
      const isSure = await confirm({ title: 'Stop it?', body: 'What was done so far is thrown away.', action: 'Stop it', isDangerous: true });
      if (!isSure) return;
      control.current?.abort();
    }
    onClose();
  };
  return (
    <Dialog
      title={title}
      onClose={() => void leave()}
      actions={
        isRunning ? <Button kind="danger" onClick={() => control.current?.abort()}>Stop</Button>
          : isDone ? <Button kind="primary" onClick={onClose}>Close</Button>
            : <><Button onClick={onClose}>Cancel</Button><Button kind="primary" isDisabled={!isReady} onClick={() => void run()}>{error ? 'Try again' : action}</Button></>
      }
    >
      <div class="stack">
        {steps === undefined || error ? children : null}
        {steps !== undefined && (
          <ol class="steps" aria-live="polite">
            {steps.map((step, index) => {
              const isLast = index === steps.length - 1;
              return (
                <li key={index}>
                  {isLast && isRunning ? <span class="spinner" /> : <Icon name={isLast && error ? 'alert' : 'check'} />}
                  <span>{safeText(step.step)}{step.bytesDone != null && ` · ${size(step.bytesDone)}${step.bytesTotal != null ? ` of ${size(step.bytesTotal)}` : ''}`}</span>
                </li>
              );
            })}
            {steps.length === 0 && isRunning && <li><span class="spinner" /><span>Starting…</span></li>}
          </ol>
        )}
        {error ? <ErrorBox title={failed} error={error} /> : null}
        {isDone && <p class="good-text">{done}</p>}
      </div>
    </Dialog>
  );
}
