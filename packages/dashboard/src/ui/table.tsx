/** A table of which only the rows in sight exist: 10,000 rows scroll like ten. */
import { Component, type ComponentChildren } from 'preact';
import { useEffect, useLayoutEffect, useRef, useState } from 'preact/hooks';
import { useLatest } from './hooks.js';

export interface Column<T> {
  id: string;
  label: string;
  /** Of a CSS grid: "2fr", "120px", "minmax(80px, 1fr)". */
  width: string;
  cell: (row: T) => ComponentChildren;
  isNumber?: boolean;
  /** Whether the table may be sorted by it. */
  isSortable?: boolean;
  /** Left out where the window is narrow. */
  isExtra?: boolean;
}

interface TableProps<T> {
  label: string;
  columns: Column<T>[];
  rows: T[];
  keyOf: (row: T) => string;
  /** What Enter and a click on a row do. */
  onOpen?: (row: T) => void;
  sort?: { by: string; isDescending: boolean };
  onSort?: (by: string) => void;
  /** With a column of check boxes. */
  selected?: ReadonlySet<string>;
  onSelect?: (selected: Set<string>) => void;
  /** The row that j and k move; -1: no row. */
  cursor?: number;
  empty?: ComponentChildren;
  /** Told which rows are in sight, when that changes. */
  onRows?: (rows: T[]) => void;
}

const ROW = 40; // pixels: each row is as high as the other
const BEYOND = 8; // rows above and under those in sight
const STEP = 4; // rows that are exchanged together
const SETTLED = 150; // milliseconds without scrolling, until it is told what is in sight

export function Table<T>(
  { label, columns, rows, keyOf, onOpen, sort, onSort, selected, onSelect, cursor = -1, empty, onRows }: TableProps<T>,
) {
  const scroller = useRef<HTMLDivElement>(null);
  const [view, setView] = useState({ top: 0, height: 800 });
  const anchor = useRef<number | undefined>(undefined);

  useLayoutEffect(() => {
    const element = scroller.current!;
    const measure = () => {
      // As long as the same rows are in sight, there is nothing to draw.
      const top = Math.floor(element.scrollTop / ROW / STEP) * ROW * STEP;
      const height = element.clientHeight || 800;
      setView((old) => (old.top === top && old.height === height ? old : { top, height }));
    };
    const observer = new ResizeObserver(measure);
    observer.observe(element);
    element.addEventListener('scroll', measure, { passive: true });
    measure();
    return () => {
      observer.disconnect();
      element.removeEventListener('scroll', measure);
    };
  }, []);

  useEffect(() => {
    const element = scroller.current;
    if (cursor < 0 || !element) return;
    const top = cursor * ROW;
    const room = element.clientHeight - ROW * 2; // without the head
    if (top < element.scrollTop) element.scrollTop = top;
    else if (top > element.scrollTop + room) element.scrollTop = top - room;
  }, [cursor]);

  const first = Math.max(0, Math.floor(view.top / ROW) - BEYOND);
  const last = Math.min(rows.length, Math.ceil((view.top + view.height) / ROW) + STEP + BEYOND);
  const inSight = rows.slice(first, last);
  // A row that leaves one end is used again at the other: far cheaper than a new one.
  const slots = Math.ceil(view.height / ROW) + STEP + BEYOND * 2 + 2;
  const seen = inSight.map(keyOf).join();
  useEffect(() => {
    if (!onRows) return;
    const timer = setTimeout(() => onRows(inSight), SETTLED);
    return () => clearTimeout(timer);
  }, [seen, onRows !== undefined]);
  const template = [selected ? '36px' : '', ...columns.map((column) => column.width)].join(' ').trim();
  const narrow = [selected ? '36px' : '', ...columns.filter((each) => !each.isExtra).map((each) => each.width)].join(' ').trim();
  const isAll = selected !== undefined && rows.length > 0 && rows.every((row) => selected.has(keyOf(row)));

  const toggle = (index: number, isRange: boolean) => {
    const next = new Set(selected);
    const isOn = !next.has(keyOf(rows[index]!));
    const from = isRange && anchor.current !== undefined ? anchor.current : index;
    for (let at = Math.min(from, index); at <= Math.max(from, index); at++) {
      const row = rows[at];
      if (row === undefined) continue;
      if (isOn) next.add(keyOf(row));
      else next.delete(keyOf(row));
    }
    anchor.current = index;
    onSelect?.(next);
  };
  const acts = useLatest({ open: (row: T) => onOpen?.(row), toggle });

  return (
    <div class="table-scroller" ref={scroller} tabIndex={0} role="region" aria-label={label}>
      <div
        class="table"
        role="table"
        aria-label={label}
        aria-rowcount={rows.length + 1}
        style={{ '--columns': template, '--narrow-columns': narrow }}
      >
        <div class="table-row table-head" role="row" aria-rowindex={1}>
          {selected && (
            <div role="columnheader" class="check">
              <input
                type="checkbox"
                aria-label="Select all"
                checked={isAll}
                onChange={() => onSelect?.(isAll ? new Set() : new Set(rows.map(keyOf)))}
              />
            </div>
          )}
          {columns.map((column) => (
            <div
              key={column.id}
              role="columnheader"
              class={`${column.isNumber ? 'number' : ''} ${column.isExtra ? 'extra' : ''}`}
              aria-sort={sort?.by === column.id ? (sort.isDescending ? 'descending' : 'ascending') : undefined}
            >
              {column.isSortable && onSort ? (
                <button type="button" onClick={() => onSort(column.id)}>
                  {column.label}
                  <span aria-hidden="true">{sort?.by === column.id ? (sort.isDescending ? ' ↓' : ' ↑') : ''}</span>
                </button>
              ) : (
                column.label
              )}
            </div>
          ))}
        </div>
        <div role="rowgroup" class="table-body" style={{ height: `${rows.length * ROW}px` }}>
          {inSight.map((row, offset) => {
            const index = first + offset;
            const id = keyOf(row);
            return (
              <Row
                key={index % slots}
                row={row}
                id={id}
                index={index}
                columns={columns}
                opens={onOpen !== undefined}
                isCursor={index === cursor}
                isSelected={selected?.has(id)}
                acts={acts}
              />
            );
          })}
        </div>
      </div>
      {rows.length === 0 && empty}
    </div>
  );
}

interface RowProps<T> {
  row: T;
  id: string;
  index: number;
  columns: Column<T>[];
  opens: boolean;
  isCursor: boolean;
  /** undefined in a table without check boxes. */
  isSelected: boolean | undefined;
  acts: { current: { open: (row: T) => void; toggle: (index: number, isRange: boolean) => void } };
}

/** While the table is scrolled, only the rows that come into sight are drawn. */
class Row<T> extends Component<RowProps<T>> {
  override shouldComponentUpdate(next: RowProps<T>): boolean {
    // They are the same object if what a cell reads has changed by itself.
    if (next === this.props) return true;
    return (Object.keys(next) as (keyof RowProps<T>)[]).some((name) => next[name] !== this.props[name]);
  }

  override render({ row, id, index, columns, opens, isCursor, isSelected, acts }: RowProps<T>): ComponentChildren {
    return (
      <div
        class={`table-row ${opens ? 'opens' : ''} ${isCursor ? 'cursor' : ''} ${isSelected ? 'selected' : ''}`}
        role="row"
        aria-rowindex={index + 2}
        style={{ transform: `translateY(${index * ROW}px)` }}
        onClick={(event) => {
          if ((event.target as HTMLElement).closest('button, a, input, .check')) return;
          if (!getSelection()?.toString()) acts.current.open(row);
        }}
      >
        {isSelected !== undefined && (
          <div role="cell" class="check">
            <input
              type="checkbox"
              aria-label={`Select ${id}`}
              checked={isSelected}
              onClick={(event) => acts.current.toggle(index, event.shiftKey)}
            />
          </div>
        )}
        {columns.map((column) => (
          <div key={column.id} role="cell" class={`${column.isNumber ? 'number' : ''} ${column.isExtra ? 'extra' : ''}`}>
            {column.cell(row)}
          </div>
        ))}
      </div>
    );
  }
}
