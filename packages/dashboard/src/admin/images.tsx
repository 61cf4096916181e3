/** Images: what boxes begin with. */
import type { Schemas } from 'hutch';
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
  useShortcuts([{ keys: 'n', does: 'Build an image', run: () => setBuilding({ name: '' }) }]);
  const remove = async (image: ImageInfo) => {
    const isSure = await confirm({
      title: `Remove ${image.name}?`,
      body: 'Boxes that use it keep running. New ones can be made of it once it is built again.',
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
        <span class="quiet">What boxes begin with: a Linux with programs and packages.</span>
        <div class="end"><Button kind="primary" icon="plus" onClick={() => setBuilding({ name: '' })}>Build an image</Button></div>
      </div>
      {error ? <ErrorBox title="The images could not be read." error={error} retry={reload} /> : null}
      {!value && isLoading && <Loading what="Reading the images" retry={reload} />}
      {value?.length === 0 && <EmptyState title="There are no images" action={<Button kind="primary" onClick={() => setBuilding({ name: '' })}>Build an image</Button>}>Boxes have the programs of this machine. Build an image for a Python with the packages that your agents need.</EmptyState>}
      {value && value.length > 0 && (
        <div class="card scroll-x">
          <table class="plain">
            <thead><tr><th>Name</th><th>State</th><th>Packages</th><th class="number">Size</th><th><span class="offscreen">Actions</span></th></tr></thead>
            <tbody>
              {value.map((image) => (
                <tr key={image.name}>
                  <td><b>{safeText(image.name)}</b></td>
                  <td>{image.built ? <Badge kind="good">ready</Badge> : <Badge>not built</Badge>}</td>
                  <td class="quiet">{image.packages.length ? <Packages names={image.packages} /> : '–'}</td>
                  <td class="number nowrap">{size(image.size)}</td>
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
  const [steps, setSteps] = useState<Schemas['BuildProgress'][] | undefined>();
  const [error, setError] = useState<unknown>();
  const control = useRef<AbortController | undefined>(undefined);
  const isRunning = steps !== undefined && !error && !steps.at(-1)?.done;
  const isDone = steps?.at(-1)?.done ?? false;

  const begin = async () => {
    control.current = new AbortController();
    setError(undefined);
    setSteps([]);
    try {
      const options = { packages: split(packages), preload: split(preload), signal: control.current.signal };
      for await (const step of server().buildImage(name.trim(), options)) setSteps((old) => [...(old ?? []), step].slice(-200));
    } catch (failure) {
      setError(control.current.signal.aborted ? new Error('You stopped it. Nothing is left of it.') : failure);
    }
  };
  const leave = async () => {
    if (isRunning) {
      const isSure = await confirm({ title: 'Stop building?', body: 'What was done so far is thrown away.', action: 'Stop it', isDangerous: true });
      if (!isSure) return;
      control.current?.abort();
    }
    onClose();
  };
  return (
    <Dialog
      title={image.name ? `Build ${image.name}` : 'Build an image'}
      onClose={() => void leave()}
      actions={
        isRunning ? <Button kind="danger" onClick={() => control.current?.abort()}>Stop</Button>
          : isDone ? <Button kind="primary" onClick={onClose}>Close</Button>
            : <><Button onClick={onClose}>Cancel</Button><Button kind="primary" isDisabled={!name.trim()} onClick={() => void begin()}>{error ? 'Try again' : 'Build'}</Button></>
      }
    >
      <div class="stack">
        {steps === undefined || error ? (
          <>
            <Field label="Name" hint="Letters, digits, “-”, “_” and “.”. “python”, “data” and “chem” are recipes that come with Hutch.">
              <input value={name} disabled={Boolean(image.name)} spellcheck={false} onInput={(event) => setName(event.currentTarget.value)} />
            </Field>
            <Field label="Python packages" hint="As pip takes them, separated by spaces. Leave it empty for those of the recipe.">
              <textarea rows={3} value={packages} spellcheck={false} placeholder="numpy pandas==2.3.3" onInput={(event) => setPackages(event.currentTarget.value)} />
            </Field>
            <Field label="Modules that are loaded beforehand" hint="Cells that import them start at once.">
              <input value={preload} spellcheck={false} placeholder="numpy pandas" onInput={(event) => setPreload(event.currentTarget.value)} />
            </Field>
          </>
        ) : null}
        {steps !== undefined && (
          <ol class="steps" aria-live="polite">
            {steps.map((step, index) => {
              const isLast = index === steps.length - 1;
              return (
                <li key={index}>
                  {isLast && isRunning ? <span class="spinner" /> : <Icon name={isLast && error ? 'alert' : 'check'} />}
                  <span>{safeText(step.step)}</span>
                </li>
              );
            })}
            {steps.length === 0 && isRunning && <li><span class="spinner" /><span>Beginning…</span></li>}
          </ol>
        )}
        {error ? <ErrorBox title="The image was not built." error={error} /> : null}
        {isDone && <p class="good-text">{name} is ready: boxes can be made of it.</p>}
      </div>
    </Dialog>
  );
}
