/** Dialogs, and questions that wait for an answer. */
import { signal } from '@preact/signals';
import type { ComponentChildren } from 'preact';
import { useEffect, useRef, useState } from 'preact/hooks';
import { Button, IconButton } from './basics.js';

interface DialogProps {
  title: string;
  onClose: () => void;
  children: ComponentChildren;
  /** Buttons at the foot. */
  actions?: ComponentChildren;
  isWide?: boolean;
}

/** Shown as long as it is rendered. Esc and the cross call `onClose`. */
export function Dialog({ title, onClose, children, actions, isWide }: DialogProps) {
  const element = useRef<HTMLDialogElement>(null);
  useEffect(() => {
    const before = document.activeElement;
    element.current?.showModal();
    return () => before instanceof HTMLElement && before.focus();
  }, []);
  return (
    <dialog
      ref={element}
      class={isWide ? 'wide' : ''}
      aria-label={title}
      onCancel={(event) => {
        event.preventDefault();
        onClose();
      }}
      onMouseDown={(event) => event.target === element.current && onClose()}
    >
      <div class="dialog-body">
        <header>
          <h2>{title}</h2>
          <IconButton icon="close" label="Close" onClick={onClose} />
        </header>
        <div class="dialog-content">{children}</div>
        {actions && <footer>{actions}</footer>}
      </div>
    </dialog>
  );
}

interface Question {
  title: string;
  body?: ComponentChildren;
  /** What the button does, in words: "End 3 sessions". */
  action: string;
  isDangerous?: boolean;
  /** With a field: what it is called. */
  field?: string;
  value?: string;
  answer: (value: string | undefined) => void;
}

const question = signal<Question | undefined>(undefined);

/** Ask before something is done. */
export function confirm(about: Omit<Question, 'answer' | 'field' | 'value'>): Promise<boolean> {
  return new Promise((resolve) => {
    question.value?.answer(undefined);
    question.value = { ...about, answer: (value) => resolve(value !== undefined) };
  });
}

/** Ask for one line of text; undefined if the user leaves. */
export function ask(about: Omit<Question, 'answer'> & { field: string }): Promise<string | undefined> {
  return new Promise((resolve) => {
    question.value?.answer(undefined);
    question.value = { ...about, answer: resolve };
  });
}

export function DialogHost() {
  const asked = question.value;
  return asked ? <Asked key={asked.title} {...asked} /> : null;
}

function Asked({ title, body, action, isDangerous, field, value = '', answer }: Question) {
  const [text, setText] = useState(value);
  const close = (result: string | undefined) => {
    question.value = undefined;
    answer(result);
  };
  return (
    <Dialog title={title} onClose={() => close(undefined)}>
      <form
        onSubmit={(event) => {
          event.preventDefault();
          close(text);
        }}
      >
        {body && <div class="dialog-text">{body}</div>}
        {field && (
          <label class="field">
            <span>{field}</span>
            <input value={text} onInput={(event) => setText(event.currentTarget.value)} autofocus />
          </label>
        )}
        <div class="dialog-actions">
          <Button onClick={() => close(undefined)}>Cancel</Button>
          <Button type="submit" kind={isDangerous ? 'danger' : 'primary'} autofocus={!field}>{action}</Button>
        </div>
      </form>
    </Dialog>
  );
}
