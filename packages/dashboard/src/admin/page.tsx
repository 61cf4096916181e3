/** What an operator looks after. */
import type { ComponentChildren } from 'preact';
import { useRef } from 'preact/hooks';
import { lazyPage } from '../lazy.js';
import { go, link } from '../route.js';
import { EmptyState, Icon, useInSight, useShortcuts, type IconName } from '../ui/index.js';
import { Audit } from './audit.js';
import { Images } from './images.js';
import { Keys } from './keys.js';
import { Log } from './log.js';
import { Report } from './report.js';
import { Workspaces } from './workspaces.js';

const Settings = lazyPage(async () => (await import('./settings.js')).Settings);

const PARTS: { id: string; label: string; icon: IconName; Page: (props: { rest: string[] }) => ComponentChildren }[] = [
  { id: 'images', label: 'Images', icon: 'box', Page: Images },
  { id: 'workspaces', label: 'Workspaces', icon: 'folder', Page: Workspaces },
  { id: 'keys', label: 'Keys', icon: 'key', Page: Keys },
  { id: 'settings', label: 'Settings', icon: 'gear', Page: () => <Settings /> },
  { id: 'report', label: 'Report', icon: 'shield', Page: Report },
  { id: 'log', label: 'Log', icon: 'list', Page: Log },
  { id: 'audit', label: 'Audit', icon: 'clock', Page: Audit },
];

export function Administration({ part, rest }: { part: string; rest: string[] }) {
  const found = PARTS.find((each) => each.id === part) ?? (part === 'server' ? PARTS[0] : undefined);
  useShortcuts(PARTS.map((each, index) => ({ keys: String(index + 1), does: `Go to ${each.label}`, run: () => go('admin', each.id) })));
  const side = useRef<HTMLElement>(null);
  useInSight(side, '[aria-current]', found);
  return (
    <div class="admin">
      <nav class="side" aria-label="Administration" ref={side}>
        {PARTS.map((each) => (
          <a key={each.id} href={link('admin', each.id)} aria-current={each === found ? 'page' : undefined}>
            <Icon name={each.icon} /><span>{each.label}</span>
          </a>
        ))}
      </nav>
      <div class="page">
        {found ? <found.Page rest={rest} /> : <EmptyState icon="search" title="There is no such page">Choose one of those listed.</EmptyState>}
      </div>
    </div>
  );
}
