/** Ports that something in the box listens on: open them, or send a request. */
import { useState } from 'preact/hooks';
import { Badge, Button, Code, EmptyState, ErrorBox, Field, Loading, reason, safeText, size, toast, useLoaded } from '../ui/index.js';
import { useSession } from './context.js';
import { saveAs } from './download.js';
import { Output } from './output.js';

interface Answer {
  status: number;
  headers: [string, string][];
  body: Uint8Array;
  isCut: boolean;
  milliseconds: number;
}

const MOST_BODY = 4 * 1024 * 1024;
const METHODS = ['GET', 'POST', 'PUT', 'PATCH', 'DELETE', 'HEAD', 'OPTIONS'];

export function PortsView() {
  const { sandbox } = useSession();
  const found = useLoaded((signal) => sandbox.ports({ signal }), [sandbox]);
  const [port, setPort] = useState<number>();
  const ports = found.value ?? [];
  const chosen = port ?? ports[0]?.port;

  const open = async (number: number) => {
    // Before the answer: later, the browser would block it as a pop-up that the user did not ask for.
    const tab = window.open('about:blank', '_blank');
    try {
      const preview = await sandbox.preview(number);
      const target = new URL(preview.path, location.origin);
      if (target.origin !== location.origin) throw new Error('the server named an address that is not its own');
      if (!tab) return toast('The browser did not allow a new tab.', { kind: 'error' });
      tab.opener = null;
      tab.location.replace(target.href);
    } catch (error) {
      tab?.close();
      toast(reason(error), { kind: 'error' });
    }
  };
  return (
    <div class="ports">
      <div class="row">
        <h2>Ports</h2>
        <Button isSmall icon="refresh" onClick={found.reload}>Look again</Button>
      </div>
      {found.error !== undefined && <ErrorBox error={found.error} retry={found.reload} />}
      {found.isLoading && !found.value && <Loading what="Looking for ports" retry={found.reload} />}
      {found.value && !ports.length && (
        <EmptyState title="Nothing listens in this sandbox" icon="arrow">
          Start a server, for example <code>python3 -m http.server 8000</code> under Programs or in the terminal, and look again.
        </EmptyState>
      )}
      {ports.length > 0 && (
        <table class="plain">
          <thead><tr><th scope="col">Port</th><th scope="col">Address</th><th scope="col">Use it</th></tr></thead>
          <tbody>
            {ports.map((each) => (
              <tr key={`${each.address} ${each.port}`}>
                <td><strong>{each.port}</strong></td>
                <td class="mono">{safeText(each.address)}</td>
                <td>
                  <span class="row">
                    <Button isSmall icon="arrow" onClick={() => void open(each.port)}>Open</Button>
                    <Button isSmall kind="ghost" onClick={() => setPort(each.port)}>Send a request</Button>
                  </span>
                </td>
              </tr>
            ))}
          </tbody>
        </table>
      )}
      {ports.length > 0 && <p class="quiet">A page that is opened is kept apart from this one by the browser. Its address works for an hour: keep it to yourself.</p>}
      {chosen !== undefined && <RequestTester key={chosen} port={chosen} />}
    </div>
  );
}

function RequestTester({ port }: { port: number }) {
  const session = useSession();
  const { sandbox } = session;
  const [method, setMethod] = useState('GET');
  const [path, setPath] = useState('/');
  const [body, setBody] = useState('');
  const [answer, setAnswer] = useState<Answer>();
  const [error, setError] = useState<unknown>();
  const [isBusy, setBusy] = useState(false);
  const hasBody = !['GET', 'HEAD', 'OPTIONS'].includes(method);

  const send = async (event: Event) => {
    event.preventDefault();
    setBusy(true);
    setError(undefined);
    const begun = performance.now();
    try {
      const response = await sandbox.fetch(port, path, { method, ...(hasBody && body && { body }) });
      const pieces: Uint8Array[] = [];
      let got = 0;
      const reader = response.body?.getReader();
      for (let next; reader && got <= MOST_BODY && !(next = await reader.read()).done; ) {
        pieces.push(next.value);
        got += next.value.length;
      }
      void reader?.cancel();
      const whole = new Uint8Array(got);
      let at = 0;
      for (const piece of pieces) {
        whole.set(piece, at);
        at += piece.length;
      }
      setAnswer({
        status: response.status, headers: [...response.headers], body: whole, isCut: got > MOST_BODY,
        milliseconds: performance.now() - begun,
      });
      session.note({ do: 'fetch', port, path, method, ...(hasBody && body && { body }) });
    } catch (failure) {
      setError(failure);
    } finally {
      setBusy(false);
    }
  };
  const isText = answer && !answer.body.subarray(0, 4096).includes(0);
  return (
    <section class="card request" aria-label={`Request to port ${port}`}>
      <h2>Request to port {port}</h2>
      <form onSubmit={(event) => void send(event)}>
        <div class="request-line">
          <Field label="Method">
            <select value={method} onChange={(event) => setMethod(event.currentTarget.value)}>
              {METHODS.map((each) => <option key={each}>{each}</option>)}
            </select>
          </Field>
          <Field label="Path"><input class="mono" value={path} spellcheck={false} onInput={(event) => setPath(event.currentTarget.value)} /></Field>
          <Button type="submit" kind="primary" isBusy={isBusy}>Send</Button>
        </div>
        {hasBody && <Field label="Body"><textarea class="mono" rows={4} value={body} onInput={(event) => setBody(event.currentTarget.value)} /></Field>}
      </form>
      {error !== undefined && <ErrorBox error={error} />}
      {answer && (
        <div class="answer">
          <div class="row">
            <Badge kind={answer.status < 400 ? 'good' : 'bad'}>{answer.status}</Badge>
            <span class="quiet">{Math.round(answer.milliseconds)} ms · {answer.isCut ? `more than ${size(MOST_BODY)}` : size(answer.body.length)}</span>
            <Button isSmall kind="ghost" icon="download" onClick={() => saveAs(`port-${port}`, answer.body as BlobPart)}>Save the answer</Button>
          </div>
          <details><summary>Headers</summary><Code text={answer.headers.map(([name, value]) => `${safeText(name)}: ${safeText(value)}`).join('\n')} /></details>
          {isText ? <Output text={new TextDecoder().decode(answer.body)} label="Answer" /> : <p class="quiet">The answer is not text.</p>}
        </div>
      )}
    </section>
  );
}
