/** What a cell showed, in the form that says most. */
import type { ComponentChildren } from 'preact';
import { useEffect, useErrorBoundary, useState } from 'preact/hooks';
import type { CellResult } from 'hutch';
import { Button, Guard, safeLines, safeText } from '../ui/index.js';
import { Chart, isDrawable } from './chart.js';
import { DataTable, tableOf } from './datatable.js';
import { saveAs } from './download.js';
import { Frame } from './frame.js';
import { Output } from './output.js';
import { safeTextOf, textOf } from './plain.js';

export type Forms = Pick<
  CellResult,
  'text' | 'html' | 'markdown' | 'svg' | 'png' | 'jpeg' | 'pdf' | 'latex' | 'json' | 'javascript' | 'data' | 'chart' | 'extra' | 'files'
>;

/** A data URL of a base64 picture, of a kind that cannot hold script; undefined if it is not base64. */
export function pictureOf(kind: 'png' | 'jpeg' | 'gif' | 'webp', base64: unknown): string | undefined {
  if (typeof base64 !== 'string') return undefined;
  const plain = base64.replace(/\s+/g, '');
  return /^[A-Za-z0-9+/]+={0,2}$/.test(plain) ? `data:image/${kind};base64,${plain}` : undefined;
}

type View = 'table' | 'chart' | 'picture' | 'html' | 'svg' | 'markdown' | 'latex' | 'json' | 'javascript' | 'text';
const NAMES: Record<View, string> = {
  table: 'Table', chart: 'Chart', picture: 'Picture', html: 'HTML', svg: 'SVG', markdown: 'Markdown',
  latex: 'Formula', json: 'JSON', javascript: 'JavaScript', text: 'Text',
};

function viewsOf(forms: Forms): View[] {
  const views: View[] = [];
  const picture = pictureOf('png', forms.png) ?? pictureOf('jpeg', forms.jpeg);
  if (tableOf(forms.data)) views.push('table');
  if (picture) views.push('picture');
  if (isDrawable(forms.chart)) views.push('chart');
  if (forms.html) views.push('html');
  if (forms.svg) views.push('svg');
  if (forms.markdown) views.push('markdown');
  if (forms.latex) views.push('latex');
  if (forms.json !== null && forms.json !== undefined) views.push('json');
  if (forms.javascript) views.push('javascript');
  if (forms.text) views.push('text');
  return views;
}

export function ResultView({ forms, label }: { forms: Forms; label: string }) {
  return (
    <Guard of={forms} instead={() => <AsText forms={forms} label={label} />}>
      <Views forms={forms} label={label} />
    </Guard>
  );
}

/** What is left of a result that cannot be drawn. */
function AsText({ forms, label }: { forms: Forms; label: string }) {
  return (
    <div class="result">
      <p class="quiet">This result could not be drawn.</p>
      <Output text={(textOf(forms.text) || textOf(forms.data ?? forms.chart ?? forms.json)).slice(0, 20_000)} label={label} />
    </div>
  );
}

function Views({ forms, label }: { forms: Forms; label: string }) {
  const views = viewsOf(forms);
  const [chosen, choose] = useState<View>();
  const view = chosen && views.includes(chosen) ? chosen : views[0];
  const files = Object.entries(forms.files ?? {});
  const extra = Object.keys(forms.extra ?? {});
  return (
    <div class="result">
      {views.length > 1 && (
        <div class="result-views" role="group" aria-label="Forms of this result">
          {views.map((each) => (
            <button key={each} type="button" aria-pressed={each === view} onClick={() => choose(each)}>{NAMES[each]}</button>
          ))}
        </div>
      )}
      {view && <Guarded key={view}><OneView view={view} forms={forms} label={label} /></Guarded>}
      {forms.pdf && (
        <Button isSmall icon="download" onClick={() => savePdf(forms.pdf!)}>Download the PDF</Button>
      )}
      {files.map(([kind, path]) => (
        <p key={kind} class="quiet">{safeText(kind)} is too large to be sent: it is in the sandbox at <code>{safeTextOf(path)}</code></p>
      ))}
      {!views.length && !forms.pdf && extra.length > 0 && <p class="quiet">A result of a kind that this page cannot show: {safeText(extra.join(', '))}</p>}
    </div>
  );
}

function savePdf(base64: string): void {
  try {
    saveAs('result.pdf', Uint8Array.from(atob(base64), (letter) => letter.charCodeAt(0)), 'application/pdf');
  } catch {
    // It is not base64: there is nothing to save.
  }
}

/** A box can send anything: a result that cannot be shown must not take the page with it. */
function Guarded({ children }: { children: ComponentChildren }) {
  const [error] = useErrorBoundary();
  return error === undefined ? <>{children}</> : <p class="quiet">This result is damaged: it cannot be shown in this form.</p>;
}

function OneView({ view, forms, label }: { view: View; forms: Forms; label: string }) {
  switch (view) {
    case 'table':
      return <DataTable data={tableOf(forms.data)!} label={label} />;
    case 'chart':
      return <Chart chart={forms.chart as Record<string, unknown>} />;
    case 'picture':
      return <Picture source={pictureOf('png', forms.png) ?? pictureOf('jpeg', forms.jpeg)!} label={label} />;
    case 'html':
      return <Frame html={forms.html!} label={`${label}: HTML`} />;
    case 'svg':
      return <Frame html={forms.svg!} label={`${label}: SVG`} />;
    case 'markdown':
      return <Converted source={forms.markdown!} convert={htmlOfMarkdown} label={`${label}: Markdown`} />;
    case 'latex':
      return <Converted source={forms.latex!} convert={htmlOfLatex} label={`${label}: formula`} />;
    case 'json':
      return <Json value={forms.json} />;
    case 'javascript':
      return <><p class="quiet">JavaScript of a sandbox is shown, and not run.</p><pre class="output">{safeLines(forms.javascript!)}</pre></>;
    case 'text':
      return <Output text={forms.text!} label={label} />;
  }
}

export function Picture({ source, label }: { source: string; label: string }) {
  const [isLarge, setLarge] = useState(false);
  const [isBroken, setBroken] = useState(false);
  if (isBroken) return <p class="quiet">This picture is damaged.</p>;
  return (
    <button type="button" class={`picture ${isLarge ? 'large' : ''}`} title={isLarge ? 'Fit' : 'Full size'} onClick={() => setLarge(!isLarge)}>
      <img src={source} alt={label} onError={() => setBroken(true)} />
    </button>
  );
}

/** Made into HTML here, as text, and shown in the frame: the page never parses it. */
function Converted({ source, convert, label }: { source: string; convert: (source: string) => Promise<string>; label: string }) {
  const [html, setHtml] = useState<string>();
  const [isPlain, setPlain] = useState(false);
  useEffect(() => {
    let isGone = false;
    convert(source).then((made) => isGone || setHtml(made), () => isGone || setPlain(true));
    return () => {
      isGone = true;
    };
  }, [source]);
  if (isPlain) return <Output text={source} label={label} />;
  return html === undefined ? null : <Frame html={html} label={label} />;
}

export async function htmlOfMarkdown(source: string): Promise<string> {
  const { marked } = await import('marked');
  return marked.parse(source, { async: false, gfm: true });
}

async function htmlOfLatex(source: string): Promise<string> {
  const { default: katex } = await import('katex');
  const found = /^\s*(\$\$?|\\\[|\\\()([^]*?)(\$\$?|\\\]|\\\))\s*$/.exec(source);
  return katex.renderToString(found ? found[2]! : source, {
    displayMode: !found || found[1] === '$$' || found[1] === '\\[',
    output: 'mathml',
    throwOnError: false,
    trust: false,
    maxExpand: 1000,
    maxSize: 50,
  });
}

const MOST_KEYS = 200;

/** JSON as a tree that opens. */
export function Json({ value, name, depth = 0 }: { value: unknown; name?: string; depth?: number }) {
  const head = name === undefined ? '' : `${safeText(name)}: `;
  if (typeof value !== 'object' || value === null) {
    const kind = value === null ? 'null' : typeof value;
    return <div class="json-leaf">{head}<span class={`json-${kind}`}>{(kind === 'string' ? safeText(JSON.stringify(value)) : value === null ? 'null' : safeTextOf(value)).slice(0, 20_000)}</span></div>;
  }
  const entries = Object.entries(value);
  const isList = Array.isArray(value);
  return (
    <details class="json" open={depth < 2 && entries.length <= 50}>
      <summary>{head}<span class="quiet">{isList ? `list of ${entries.length}` : `object of ${entries.length}`}</span></summary>
      {depth < 40 && entries.slice(0, MOST_KEYS).map(([key, each]) => <Json key={key} name={key} value={each} depth={depth + 1} />)}
      {entries.length > MOST_KEYS && <div class="quiet">{entries.length - MOST_KEYS} more</div>}
    </details>
  );
}
