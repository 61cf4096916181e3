/** What `hutch doctor` says, as a page. */
import { GRADES } from '../grades.js';
import { server } from '../server.js';
import { Badge, Button, Code, ErrorBox, Loading, safeText, useLoaded } from '../ui/index.js';

const STATUS = { active: 'good', degraded: 'warning', missing: 'bad' } as const;

export function Report() {
  const { value, error, isLoading, reload } = useLoaded((signal) => server().report({ signal }), []);
  const grade = value && GRADES[value.grade];
  const wrong = value?.layers.filter((layer) => layer.status !== 'active') ?? [];
  return (
    <>
      <div class="page-head">
        <h1>Report</h1>
        <span class="quiet">What each layer of isolation does on this machine: each one was tried, not looked up.</span>
        <div class="end"><Button icon="refresh" isBusy={isLoading} onClick={reload}>{isLoading ? 'Trying…' : 'Try them again'}</Button></div>
      </div>
      {error ? <ErrorBox title="The report could not be made." error={error} retry={reload} /> : null}
      {!value && isLoading && <Loading what="Trying each layer" retry={reload} />}
      {value && (
        <>
          <div class="card row">
            <Badge kind={grade?.kind ?? 'neutral'}>{grade?.words ?? value.grade}</Badge>
            <span class="grow">{grade?.about} <span class="quiet">Backend: {value.backend}.</span></span>
            <b class={wrong.length ? 'warning-text' : 'good-text'}>{wrong.length ? `${wrong.length} of ${value.layers.length} layers need a look` : `All ${value.layers.length} layers are active`}</b>
          </div>
          <div class="card scroll-x">
            <table class="plain report">
              <thead><tr><th>Layer</th><th>State</th><th>Why, and what to do</th></tr></thead>
              <tbody>
                {[...wrong, ...value.layers.filter((layer) => layer.status === 'active')].map((layer) => (
                  <tr key={layer.name}>
                    <td><b>{layer.name}</b>{layer.required && <small class="quiet"> required</small>}</td>
                    <td><Badge kind={STATUS[layer.status as keyof typeof STATUS] ?? 'neutral'}>{layer.status}</Badge></td>
                    <td class="wide">
                      {layer.why && <p>{safeText(layer.why)}</p>}
                      {layer.fix && <Code text={layer.fix} />}
                      {!layer.why && !layer.fix && <span class="quiet">–</span>}
                    </td>
                  </tr>
                ))}
              </tbody>
            </table>
          </div>
        </>
      )}
    </>
  );
}
