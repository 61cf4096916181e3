import type { ComponentChildren } from 'preact';
import { useEffect, useId, useRef, useState } from 'preact/hooks';
import { connection } from '../server.js';
import { copy } from './copy.js';
import { Icon, type IconName } from './icons.js';
import { reason, sentence } from './words.js';

interface ButtonProps {
  children: ComponentChildren;
  onClick?: (event: MouseEvent) => void;
  kind?: 'plain' | 'primary' | 'danger' | 'ghost';
  icon?: IconName;
  isSmall?: boolean;
  /** What was pressed is under way: it cannot be pressed again. */
  isBusy?: boolean;
  isDisabled?: boolean;
  type?: 'button' | 'submit';
  title?: string;
  autofocus?: boolean;
}

export function Button(
  { children, onClick, kind = 'plain', icon, isSmall, isBusy, isDisabled, type = 'button', title, autofocus }: ButtonProps,
) {
  return (
    <button
      type={type}
      class={`button ${kind} ${isSmall ? 'small' : ''}`}
      onClick={onClick}
      disabled={isDisabled || isBusy}
      aria-busy={isBusy ?? false}
      title={title}
      autofocus={autofocus}
    >
      {icon && <Icon name={icon} />}
      {children}
    </button>
  );
}

interface IconButtonProps {
  icon: IconName;
  /** What it does: read aloud, and shown under the pointer. */
  label: string;
  onClick: (event: MouseEvent) => void;
  isPressed?: boolean;
  isDisabled?: boolean;
}

export function IconButton({ icon, label, onClick, isPressed, isDisabled }: IconButtonProps) {
  return (
    <button
      type="button"
      class="icon-button"
      aria-label={label}
      title={label}
      aria-pressed={isPressed}
      disabled={isDisabled}
      onClick={onClick}
    >
      <Icon name={icon} />
    </button>
  );
}

export function CopyButton({ text, label = 'Copy' }: { text: string; label?: string }) {
  return <IconButton icon="copy" label={label} onClick={(event) => (event.stopPropagation(), void copy(text))} />;
}

export function Badge({ kind = 'neutral', children }: { kind?: 'neutral' | 'good' | 'warning' | 'bad' | 'info' | 'asleep'; children: ComponentChildren }) {
  return <span class={`badge ${kind}`}>{children}</span>;
}

/** What there could be, and how to get it. */
export function EmptyState({ title, icon = 'box', children, action }: { title: string; icon?: IconName; children?: ComponentChildren; action?: ComponentChildren }) {
  return (
    <div class="empty">
      <Icon name={icon} size={32} />
      <h2>{title}</h2>
      {children && <div class="empty-text">{children}</div>}
      {action && <div class="empty-action">{action}</div>}
    </div>
  );
}

/** What went wrong, and a button that tries again. */
export function ErrorBox({ error, retry, title }: { error: unknown; retry?: () => void; title?: string }) {
  return (
    <div class="error-box" role="alert">
      <Icon name="alert" />
      <div>
        {title && <strong>{title}</strong>}
        <p>{sentence(reason(error))}</p>
      </div>
      {retry && <Button isSmall icon="refresh" onClick={retry}>Try again</Button>}
    </div>
  );
}

const PATIENCE = 10000; // milliseconds

/** Something is loaded. After ten seconds it says what may be wrong, and offers to try again. */
export function Loading({ what = 'Loading', retry }: { what?: string; retry?: () => void }) {
  const [isLate, setLate] = useState(false);
  useEffect(() => {
    const timer = setTimeout(() => setLate(true), PATIENCE);
    return () => clearTimeout(timer);
  }, []);
  if (!isLate) return <div class="loading" role="status"><span class="spinner" />{what}…</div>;
  const why = connection.value === 'lost'
    ? 'The server does not answer. It will be tried again by itself.'
    : `${what} takes longer than ten seconds: the server may be busy.`;
  return (
    <div class="loading late" role="status">
      {why}
      {retry && <Button isSmall onClick={() => (setLate(false), retry())}>Try again</Button>}
    </div>
  );
}

/** Keep what matches in sight, in a row that may be wider than the window; again when `current` changes. */
export function useInSight(row: { current: HTMLElement | null }, selector: string, current: unknown): void {
  useEffect(() => {
    const observer = new ResizeObserver(() => {
      const [all, one] = [row.current, row.current?.querySelector<HTMLElement>(selector)];
      if (all && one) all.scrollLeft += one.getBoundingClientRect().left - all.getBoundingClientRect().left - (all.clientWidth - one.offsetWidth) / 2;
    });
    if (row.current) observer.observe(row.current);
    return () => observer.disconnect();
  }, [current]);
}

interface TabsProps<T extends string> {
  tabs: { id: T; label: string; icon?: IconName }[];
  current: T;
  onChange: (id: T) => void;
  label: string;
}

/** Tabs; arrow keys move between them. */
export function Tabs<T extends string>({ tabs, current, onChange, label }: TabsProps<T>) {
  const list = useRef<HTMLDivElement>(null);
  useInSight(list, '[aria-selected=true]', current);
  const move = (step: number) => {
    const index = tabs.findIndex((tab) => tab.id === current);
    const next = tabs[(index + step + tabs.length) % tabs.length]!;
    onChange(next.id);
    requestAnimationFrame(() => list.current?.querySelector<HTMLElement>('[aria-selected=true]')?.focus());
  };
  return (
    <div
      class="tabs"
      role="tablist"
      aria-label={label}
      ref={list}
      onKeyDown={(event) => {
        if (event.key === 'ArrowRight') move(1);
        else if (event.key === 'ArrowLeft') move(-1);
        else return;
        event.preventDefault();
      }}
    >
      {tabs.map((tab) => (
        <button
          key={tab.id}
          type="button"
          role="tab"
          aria-selected={tab.id === current}
          tabIndex={tab.id === current ? 0 : -1}
          onClick={() => onChange(tab.id)}
        >
          {tab.icon && <Icon name={tab.icon} />}
          {tab.label}
        </button>
      ))}
    </div>
  );
}

/** A label over what it names. `hint` says what is allowed; `error` what is wrong. */
export function Field({ label, hint, error, children }: { label: string; hint?: ComponentChildren; error?: string | undefined; children: ComponentChildren }) {
  const id = useId();
  return (
    <label class="field" id={id}>
      <span>{label}</span>
      {children}
      {hint && !error && <small>{hint}</small>}
      {error && <small class="bad-text" role="alert">{error}</small>}
    </label>
  );
}

/** How much of something is used. */
export function Meter({ value, max, label }: { value: number; max: number | null | undefined; label: string }) {
  const part = max ? Math.min(1, value / max) : 0;
  return (
    <div class="meter" role="meter" aria-label={label} aria-valuenow={value} aria-valuemin={0} aria-valuemax={max ?? value}>
      <div class={part > 0.9 ? 'bad' : part > 0.75 ? 'warning' : ''} style={{ width: `${part * 100}%` }} />
    </div>
  );
}
