import { useState } from 'preact/hooks';
import { Unauthorized } from 'hutch';
import { goodbye, signIn } from './server.js';
import { Button, Icon, reason, sentence } from './ui/index.js';

export function Login() {
  const [text, setText] = useState('');
  const [problem, setProblem] = useState('');
  const [isBusy, setBusy] = useState(false);
  const submit = async (event: Event) => {
    event.preventDefault();
    const apiKey = text.trim();
    if (!apiKey) return setProblem('Paste a key: it begins with “hutch_”.');
    setBusy(true);
    try {
      await signIn(apiKey);
    } catch (error) {
      setProblem(
        error instanceof Unauthorized && !error.message.includes('metrics only')
          ? 'The server does not know this key, or it has expired. Check that it was copied whole, or make a new one with “hutch key create --owner NAME” on the server.'
          : sentence(reason(error)),
      );
    } finally {
      setBusy(false);
    }
  };
  return (
    <main class="login">
      <form class="card" onSubmit={submit}>
        <div class="brand"><Icon name="box" size={28} /><h1>Hutch</h1></div>
        {goodbye.value && <p class="notice" role="status">{goodbye.value}</p>}
        <label class="field">
          <span>API key</span>
          <input
            type="password"
            autocomplete="off"
            spellcheck={false}
            autofocus
            value={text}
            aria-invalid={problem !== ''}
            onInput={(event) => (setText(event.currentTarget.value), setProblem(''))}
          />
          {problem && <small class="bad-text" role="alert">{problem}</small>}
        </label>
        <Button type="submit" kind="primary" isBusy={isBusy}>{isBusy ? 'Logging in…' : 'Log in'}</Button>
        <p class="quiet">
          On the server’s own machine, <code>hutch dashboard</code> opens this page logged in. The key stays in
          this tab and is forgotten when you close it.
        </p>
      </form>
    </main>
  );
}
