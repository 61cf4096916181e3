/** What is done with sessions, one or many: each outcome is told. */
import { Sandbox, type BoxInfo } from 'hutch';
import { signal } from '@preact/signals';
import { useEffect, useState } from 'preact/hooks';
import { isEnded, note } from './live.js';
import { go } from './route.js';
import { options } from './server.js';
import { Badge, Button, count, Dialog, Icon, reason, toast } from './ui/index.js';

const STATES: Record<string, { words: string; kind: 'good' | 'info' | 'asleep' | 'bad' | 'warning' | 'neutral' }> = {
  starting: { words: 'starting', kind: 'info' },
  running: { words: 'running', kind: 'good' },
  saving: { words: 'falling asleep', kind: 'asleep' },
  asleep: { words: 'asleep', kind: 'asleep' },
  waking: { words: 'waking', kind: 'info' },
  destroying: { words: 'ending', kind: 'warning' },
  destroyed: { words: 'ended', kind: 'neutral' },
  expired: { words: 'expired', kind: 'neutral' },
  crashed: { words: 'crashed', kind: 'bad' },
};

export function StateBadge({ state }: { state: string }) {
  const { words, kind } = STATES[state] ?? { words: state, kind: 'neutral' as const };
  return <Badge kind={kind}>{words}</Badge>;
}

export const stateWords = (state: string): string => STATES[state]?.words ?? state;

export const isMaking = signal(false);

/** One click: a box as the server makes them, and then its page. */
export async function makeBox(): Promise<void> {
  if (isMaking.value) return;
  isMaking.value = true;
  try {
    const sandbox = await Sandbox.create(options());
    note(sandbox.info);
    go('sandboxes', sandbox.id);
  } catch (error) {
    toast(`No sandbox was made: ${reason(error)}`, { kind: 'error' });
  } finally {
    isMaking.value = false;
  }
}

export function MakeButton({ isLarge }: { isLarge?: boolean }) {
  return (
    <button type="button" class={`button primary ${isLarge ? 'large' : ''}`} disabled={isMaking.value} aria-busy={isMaking.value} onClick={() => void makeBox()}>
      <Icon name="plus" />{isMaking.value ? 'Making a sandbox…' : isLarge ? 'Make a sandbox' : 'New sandbox'}
    </button>
  );
}

export type Act = 'end' | 'extend' | 'sleep' | 'wake';

const WORDS: Record<Act, { title: string; action: string; done: string; about: string }> = {
  end: { title: 'End', action: 'End', done: 'ended', about: 'Everything in them is lost: programs, variables, and files outside of workspaces.' },
  extend: { title: 'Extend', action: 'Extend', done: 'extended', about: 'Their deadline moves to this time from now, if that is later than it was.' },
  sleep: { title: 'Put to sleep', action: 'Put to sleep', done: 'asleep', about: 'Variables, shells and files are saved. Programs that run are stopped, as the next use of the sandbox will tell.' },
  wake: { title: 'Wake', action: 'Wake', done: 'awake', about: 'They use memory and processors again.' },
};

const SPANS = [
  ['15 minutes', 900],
  ['1 hour', 3600],
  ['8 hours', 28800],
  ['1 day', 86400],
] as const;
const AT_ONCE = 6; // a browser has no more connections to one server

/** Whether it makes sense for a session as it is. */
export function canDo(act: Act, session: BoxInfo): boolean {
  if (isEnded(session)) return false;
  if (act === 'sleep') return session.status === 'running';
  return act !== 'wake' || session.status === 'asleep';
}

async function perform(act: Act, id: string, ttl: number): Promise<string> {
  const sandbox = await Sandbox.connect(id, options());
  if (act === 'end') await sandbox.close();
  else if (act === 'extend') note(await sandbox.extend(ttl));
  else if (act === 'sleep') {
    const { lost } = await sandbox.hibernate();
    return lost.length ? `asleep; could not be saved: ${lost.map(([what]) => what).join(', ')}` : 'asleep';
  } else await sandbox.wake();
  return WORDS[act].done;
}

interface Outcome {
  words: string;
  isBad?: boolean;
}

/** Asks first, then does it, and says how it went for each. */
export function ActDialog({ act, sessions, onClose, onDone }: { act: Act; sessions: BoxInfo[]; onClose: () => void; onDone?: () => void }) {
  const [able] = useState(() => sessions.filter((session) => canDo(act, session)));
  const [ttl, setTtl] = useState(3600);
  const [outcomes, setOutcomes] = useState<Record<string, Outcome> | undefined>();
  const words = WORDS[act];
  const many = count(able.length, 'sandbox');
  const left = sessions.length - able.length;
  const finished = outcomes ? Object.values(outcomes).filter((one) => one.words).length : 0;
  const isDone = outcomes !== undefined && finished === able.length;
  const failed = outcomes ? Object.values(outcomes).filter((one) => one.isBad).length : 0;

  useEffect(() => {
    if (!isDone) return;
    onDone?.();
    // With nothing to read, there is nothing to dismiss.
    if (!failed && !Object.values(outcomes!).some((one) => one.words !== words.done)) {
      toast(`${many}: ${words.done}`);
      onClose();
    }
  }, [isDone]);

  const begin = async () => {
    const state: Record<string, Outcome> = {};
    let timer: ReturnType<typeof setTimeout> | undefined;
    const show = () => (timer = undefined, setOutcomes({ ...state }));
    show();
    const waiting = [...able];
    const work = async () => {
      for (let session = waiting.shift(); session; session = waiting.shift()) {
        try {
          state[session.id] = { words: await perform(act, session.id, ttl) };
        } catch (error) {
          state[session.id] = { words: reason(error), isBad: true };
        }
        timer ??= setTimeout(show, 100);
      }
    };
    await Promise.all(Array.from({ length: Math.min(AT_ONCE, able.length) }, work));
    clearTimeout(timer);
    show();
  };

  const actions = outcomes === undefined ? (
    <>
      <Button onClick={onClose}>Cancel</Button>
      <Button kind={act === 'end' ? 'danger' : 'primary'} isDisabled={!able.length} onClick={() => void begin()} autofocus>
        {words.action} {able.length === 1 ? 'it' : many}
      </Button>
    </>
  ) : (
    <Button onClick={onClose} kind={isDone ? 'primary' : 'plain'}>{isDone ? 'Close' : 'Continue in the background'}</Button>
  );
  return (
    <Dialog title={`${words.title} ${able.length === 1 ? able[0]!.id : many}?`} onClose={onClose} actions={actions}>
      {outcomes === undefined ? (
        <div class="stack">
          <p>{words.about}</p>
          {left > 0 && <p class="quiet">{count(left, 'other sandbox')} that you selected cannot be {words.done} as {left === 1 ? 'it is' : 'they are'} now, and {left === 1 ? 'stays' : 'stay'} so.</p>}
          {act === 'extend' && (
            <div class="row" role="radiogroup" aria-label="Time from now">
              {SPANS.map(([label, seconds]) => (
                <label key={label} class="check-field">
                  <input type="radio" name="ttl" checked={ttl === seconds} onChange={() => setTtl(seconds)} />{label}
                </label>
              ))}
            </div>
          )}
        </div>
      ) : (
        <div class="stack">
          <p role="status">{finished} of {able.length} done{failed ? `, ${failed} failed` : ''}.</p>
          <div class="outcomes">
            <table class="plain">
              <tbody>
                {able.slice(0, 500).map((session) => (
                  <tr key={session.id}>
                    <td class="mono">{session.id}</td>
                    <td class={outcomes[session.id]?.isBad ? 'bad-text' : 'quiet'}>{outcomes[session.id]?.words ?? 'waiting'}</td>
                  </tr>
                ))}
              </tbody>
            </table>
          </div>
        </div>
      )}
    </Dialog>
  );
}
