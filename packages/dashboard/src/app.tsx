import { useState } from 'preact/hooks';
import { lazyPage } from './lazy.js';
import { Login } from './login.js';
import { Overview } from './overview.js';
import { go, link, route } from './route.js';
import { connection, identity, isAdmin, isBeginning, key, logOut, nextAttempt, tryNow } from './server.js';
import {
  Button, Dialog, DialogHost, EmptyState, ErrorBox, Guard, Icon, IconButton, isDark, Loading, shortcuts, theme, ToastHost, useNow,
  useShortcuts, type IconName,
} from './ui/index.js';

const SessionPage = lazyPage(async () => (await import('./session/page.js')).SessionPage);
const Playground = lazyPage(async () => (await import('./playground.js')).Playground);
const Administration = lazyPage(async () => (await import('./admin/page.js')).Administration);

export function App() {
  return (
    <>
      {connection.value === 'lost' && <LostBanner />}
      {identity.value ? <Shell /> : isBeginning.value || key.value !== undefined ? <main class="center"><Loading what="Logging in" /></main> : <Login />}
      <DialogHost />
      <ToastHost />
    </>
  );
}

function LostBanner() {
  const seconds = Math.max(0, Math.ceil((nextAttempt.value - useNow()) / 1000));
  return (
    <div class="banner" role="alert">
      <Icon name="alert" />
      <span>The server does not answer. {seconds ? `Next attempt in ${seconds} s.` : 'Trying…'}</span>
      <Button isSmall onClick={tryNow}>Try now</Button>
    </div>
  );
}

const PAGES: { id: string; label: string; icon: IconName; keys: string; isForAdmins?: boolean }[] = [
  { id: 'sandboxes', label: 'Sandboxes', icon: 'list', keys: 'g s' },
  { id: 'playground', label: 'Playground', icon: 'play', keys: 'g p' },
  { id: 'admin', label: 'Administration', icon: 'gear', keys: 'g a', isForAdmins: true },
];

function Shell() {
  const [isHelpShown, showHelp] = useState(false);
  const pages = PAGES.filter((page) => !page.isForAdmins || isAdmin.value);
  const [first = 'sandboxes'] = route.value;
  useShortcuts([
    { keys: '?', does: 'Show the keyboard shortcuts', run: () => showHelp(true) },
    ...pages.map((page) => ({ keys: page.keys, does: `Go to ${page.label}`, run: () => go(page.id) })),
  ]);
  const who = identity.value!;
  return (
    <div class="shell">
      <a class="skip" href="#content" onClick={(event) => (event.preventDefault(), document.getElementById('content')?.focus())}>Skip to content</a>
      <header class="topbar">
        <a class="brand" href={link('sandboxes')} aria-label="Hutch: sandboxes"><Icon name="box" size={20} /><span>Hutch</span></a>
        <nav aria-label="Pages">
          {pages.map((page) => (
            <a key={page.id} href={link(page.id)} aria-current={first === page.id ? 'page' : undefined} title={`${page.label} (${page.keys})`}>
              <Icon name={page.icon} /><span>{page.label}</span>
            </a>
          ))}
        </nav>
        <div class="topbar-end">
          <span class="who" title={who.label ?? ''}>{who.owner} · {who.scope}</span>
          <IconButton
            icon={isDark.value ? 'sun' : 'moon'}
            label={isDark.value ? 'Use the light theme' : 'Use the dark theme'}
            onClick={() => (theme.value = isDark.value ? 'light' : 'dark')}
          />
          <IconButton icon="logout" label="Log out" onClick={() => void logOut()} />
        </div>
      </header>
      <main id="content" tabIndex={-1}>
        <Guard of={route.value.join('/')} instead={(error) => <div class="page"><ErrorBox title="This page failed. Reload it, or open another." error={error} /></div>}>
          <Page />
        </Guard>
      </main>
      {isHelpShown && (
        <Dialog title="Keyboard shortcuts" onClose={() => showHelp(false)}>
          <dl class="keys">
            {shortcuts().map((each) => (
              <div key={each.keys + each.does}><dt>{each.keys.split(' ').map((one) => <kbd key={one}>{one}</kbd>)}</dt><dd>{each.does}</dd></div>
            ))}
          </dl>
        </Dialog>
      )}
    </div>
  );
}

function Page() {
  const [first = 'sandboxes', second, ...rest] = route.value;
  if (first === 'sandboxes') return second ? <SessionPage id={second} /> : <Overview />;
  if (first === 'playground') return <Playground />;
  if (first === 'admin' && isAdmin.value) return <Administration part={second ?? 'server'} rest={rest} />;
  return (
    <EmptyState title="There is no such page" icon="search" action={<a class="button primary" href={link('sandboxes')}>Go to the sandboxes</a>}>
      Its address may be mistyped, or your key may not open it.
    </EmptyState>
  );
}
