/** A table of a data frame: it can be sorted and searched, and taken along as CSV. */
import { useMemo, useState } from 'preact/hooks';
import { Button } from '../ui/index.js';
import { saveAs } from './download.js';
import { safeTextOf, numberOf, textOf } from './plain.js';

export interface TableData {
  columns: unknown[];
  dtypes?: string[];
  index?: unknown[];
  rows: unknown[][];
  /** Of the whole frame: its rows and columns. */
  shape?: number[];
  truncated?: boolean;
}

const AT_ONCE = 50;
const MOST_COLUMNS = 200; // more than any reader follows, and fewer than a page can bear

export function tableOf(data: unknown): TableData | undefined {
  if (typeof data !== 'object' || data === null) return undefined;
  const { columns, rows, dtypes, index, shape, truncated } = data as Record<string, unknown>;
  if (!Array.isArray(columns) || !Array.isArray(rows) || !rows.every(Array.isArray)) return undefined;
  return {
    columns,
    rows: rows as unknown[][],
    dtypes: Array.isArray(dtypes) ? dtypes.map(safeTextOf) : undefined,
    index: Array.isArray(index) ? index : undefined,
    shape: Array.isArray(shape) ? shape.map(numberOf) : undefined,
    truncated: truncated === true,
  };
}

export function cellText(value: unknown): string {
  if (typeof value === 'number') return Number.isInteger(value) ? String(value) : String(Number(value.toPrecision(8)));
  return safeTextOf(value);
}

function compare(a: unknown, b: unknown): number {
  const [noA, noB] = [a === null || a === undefined || a === '', b === null || b === undefined || b === ''];
  if (noA || noB) return Number(noA) - Number(noB); // what is missing comes last
  if (typeof a === 'number' && typeof b === 'number') return a - b;
  return textOf(a).localeCompare(textOf(b), undefined, { numeric: true });
}

export function DataTable({ data, label }: { data: TableData; label: string }) {
  const [sort, setSort] = useState<{ by: number; isDescending: boolean }>();
  const [shown, setShown] = useState(AT_ONCE);
  const [words, setWords] = useState('');
  const hasIndex = data.index !== undefined && data.index.length === data.rows.length;
  const columns = data.columns.slice(0, MOST_COLUMNS);
  const isNumber = useMemo(() => columns.map((_, column) =>
    data.rows.some((row) => typeof row[column] === 'number')
    && data.rows.every((row) => row[column] === null || row[column] === undefined || typeof row[column] === 'number')), [data]);
  const order = useMemo(() => {
    const wanted = words.trim().toLowerCase();
    const places = data.rows.map((_, at) => at).filter((at) =>
      !wanted || data.rows[at]!.some((value) => cellText(value).toLowerCase().includes(wanted)));
    if (!sort) return places;
    const value = (at: number) => (sort.by < 0 ? data.index?.[at] : data.rows[at]![sort.by]);
    const isMissing = (at: number) => value(at) === null || value(at) === undefined || value(at) === '';
    return places.sort((a, b) => {
      const way = compare(value(a), value(b));
      return isMissing(a) || isMissing(b) || !sort.isDescending ? way || a - b : -way || a - b;
    });
  }, [data, sort, words]);
  const head = (by: number, text: string, type: string | undefined) => (
    <th
      key={by}
      scope="col"
      class={by >= 0 && isNumber[by] ? 'number' : ''}
      aria-sort={sort?.by === by ? (sort.isDescending ? 'descending' : 'ascending') : 'none'}
    >
      <button
        type="button"
        title={type && `${text}: ${type}`}
        onClick={() => setSort((old) =>
          old?.by !== by ? { by, isDescending: false } : old.isDescending ? undefined : { by, isDescending: true })}
      >
        {text || '\u00a0'}<span aria-hidden="true">{sort?.by === by ? (sort.isDescending ? ' ↓' : ' ↑') : ''}</span>
      </button>
    </th>
  );
  const count = (given: number | undefined, here: number) => (given !== undefined && given >= here && Number.isFinite(given) ? given : here);
  const total = count(data.shape?.[0], data.rows.length);
  const wide = count(data.shape?.[1], data.columns.length);
  return (
    <div class="data-table">
      <div class="data-scroll" role="region" aria-label={label} tabIndex={0}>
        <table>
          <thead>
            <tr>
              {hasIndex && head(-1, 'index', undefined)}
              {columns.map((column, at) => head(at, cellText(column), data.dtypes?.[at]))}
            </tr>
          </thead>
          <tbody>
            {order.slice(0, shown).map((at) => (
              <tr key={at}>
                {hasIndex && <th scope="row">{cellText(data.index![at])}</th>}
                {columns.map((_, column) => (
                  <td key={column} class={isNumber[column] ? 'number' : ''}>{cellText(data.rows[at]![column])}</td>
                ))}
              </tr>
            ))}
          </tbody>
        </table>
      </div>
      <div class="data-foot">
        <span>
          {total.toLocaleString('en')} rows × {wide.toLocaleString('en')} columns
          {(total > data.rows.length || wide > data.columns.length) && `, of which ${data.rows.length} × ${data.columns.length} came here`}
          {data.columns.length > MOST_COLUMNS && `, the first ${MOST_COLUMNS} columns are shown`}
        </span>
        {order.length > shown && <Button isSmall kind="ghost" onClick={() => setShown(shown + 500)}>Show more</Button>}
        {data.rows.length > 10 && (
          <input
            type="search"
            value={words}
            placeholder="Search in these rows"
            aria-label="Search in these rows"
            onInput={(event) => setWords(event.currentTarget.value)}
          />
        )}
        <Button isSmall kind="ghost" icon="download" onClick={() => saveAs('table.csv', csvOf(data), 'text/csv')}>CSV</Button>
      </div>
    </div>
  );
}

function csvOf(data: TableData): string {
  const field = (value: unknown) => {
    const text = textOf(value);
    return /[",\r\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
  };
  return [data.columns, ...data.rows].map((row) => row.map(field).join(',')).join('\r\n') + '\r\n';
}

/** CSV or TSV as a table; at most so many rows. */
export function parseCsv(text: string, separator: string, most = 5000): TableData {
  const rows: string[][] = [];
  let row: string[] = [];
  let field = '';
  let isQuoted = false;
  const endRow = () => {
    row.push(field);
    if (row.length > 1 || row[0] !== '') rows.push(row);
    row = [];
    field = '';
  };
  for (let at = text.startsWith('\ufeff') ? 1 : 0; at < text.length && rows.length <= most; at++) {
    const sign = text[at]!;
    if (isQuoted) {
      if (sign !== '"') field += sign;
      else if (text[at + 1] === '"') field += text[++at];
      else isQuoted = false;
    } else if (sign === '"' && field === '') isQuoted = true;
    else if (sign === separator) {
      row.push(field);
      field = '';
    } else if (sign === '\n') endRow();
    else if (sign !== '\r' || text[at + 1] !== '\n') field += sign;
  }
  if (rows.length <= most && (field !== '' || row.length)) endRow();
  const [columns = [], ...rest] = rows;
  const numeric = columns.map((_, column) => rest.every((each) => {
    const value = each[column];
    return value === undefined || value === '' || (value.trim() !== '' && Number.isFinite(Number(value)));
  }));
  const value = (text: string | undefined, column: number) =>
    text === undefined || text === '' ? null : numeric[column] ? Number(text) : text;
  return {
    columns,
    rows: rest.slice(0, most).map((each) => columns.map((_, column) => value(each[column], column))),
    truncated: rest.length > most,
  };
}
