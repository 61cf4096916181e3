/** The session that a page is about. */
import { createContext } from 'preact';
import { useContext } from 'preact/hooks';
import type { BoxInfo, Sandbox } from 'hutch';
import type { Action } from './codegen.js';

export const FINAL = ['destroyed', 'expired', 'crashed'];

export const hasEnded = (info: BoxInfo): boolean => FINAL.includes(info.status);
/** It has no box, and anything but reading its record would give it one. */
export const sleeps = (info: BoxInfo): boolean => info.status === 'asleep' || info.status === 'saving';

export interface Session {
  sandbox: Sandbox;
  info: BoxInfo;
  /** Ask again how it is. */
  refresh: () => Promise<void>;
  /** Note what was done, for the code beside the playground. */
  note: (action: Action) => void;
}

export const SessionContext = createContext<Session | undefined>(undefined);

export function useSession(): Session {
  const session = useContext(SessionContext);
  if (!session) throw new Error('this part of the page needs a session');
  return session;
}
