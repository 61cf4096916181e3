/** Charts over time. uPlot is fetched when the first one is shown. */
import { useEffect, useRef, useState } from 'preact/hooks';
import type uPlot from 'uplot';
import { ErrorBox, isDark } from './ui/index.js';

export interface Line {
  label: string;
  /** Of the theme: 1 to 4. */
  color: number;
  values: (number | null)[];
}

export interface ChartProps {
  title: string;
  times: number[];
  lines: Line[];
  format: (value: number) => string;
  isFilled?: boolean;
  /** Has gaps, which are bridged. */
  isSparse?: boolean;
  /** What the values are of: their axis has steps that are round in it. */
  of: keyof typeof STEPS;
  height?: number;
}

const powers = (base: number, from: number, to: number) => Array.from({ length: to - from + 1 }, (_, at) => base ** (from + at));
const decimals = (from: number, to: number) => powers(10, from, to).flatMap((power) => [power, 2 * power, 5 * power]);
/** Of the vertical axes. The first is about a quarter of the least axis. */
const STEPS = { counts: decimals(0, 12), seconds: decimals(-3, 5), bytes: powers(2, 20, 50) } as const;
const MINUTES = [1, 2, 5, 10, 15, 30, 60, 120, 240, 360, 720].map((minutes) => minutes * 60);
const SHORTEST = 600; // seconds: fewer would have the same minute at each line

const clock = (seconds: number, more: Intl.DateTimeFormatOptions = {}) =>
  new Date(seconds * 1000).toLocaleTimeString(undefined, { hour: '2-digit', minute: '2-digit', hourCycle: 'h23', ...more });

type Library = typeof uPlot;
let library: Promise<Library> | undefined;

function loadLibrary(): Promise<Library> {
  library ??= Promise.all([import('uplot'), import('uplot/dist/uPlot.min.css')]).then(([module]) => module.default);
  library.catch(() => (library = undefined));
  return library;
}

const style = (name: string) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

export function Chart({ title, times, lines, format, isFilled, isSparse = false, of, height = 120 }: ChartProps) {
  const place = useRef<HTMLDivElement>(null);
  const chart = useRef<uPlot | undefined>(undefined);
  const [error, setError] = useState<unknown>();
  const [at, setAt] = useState<number | null>(null);
  const theme = isDark.value;
  const shape = lines.map((line) => line.label).join('\n');
  const data = [times, ...lines.map((line) => line.values)] as uPlot.AlignedData;
  const newest = useRef(data);
  newest.current = data;

  useEffect(() => {
    let isLeft = false;
    let observer: ResizeObserver | undefined;
    loadLibrary().then((UPlot) => {
      const element = place.current;
      if (isLeft || !element) return;
      const grid = { stroke: style('--line'), width: 1 };
      const axis = { stroke: style('--quiet'), grid, ticks: { show: false }, font: '11px system-ui' };
      const made = new UPlot(
        {
          width: element.clientWidth || 300,
          height,
          padding: [8, 8, 4, 0],
          legend: { show: false },
          cursor: { y: false, drag: { x: false, y: false }, points: { size: 6 } },
          scales: {
            x: { range: (_, min, max) => (max > 0 ? [Math.min(min, max - SHORTEST), max] : [0, SHORTEST]) },
            y: { range: (_, __, max) => [0, Math.max(max * 1.1, STEPS[of][0]! * 4)] },
          },
          axes: [
            { ...axis, size: 26, space: 70, incrs: MINUTES, values: (_, splits) => splits.map((each) => clock(each)) },
            { ...axis, size: 56, space: 24, incrs: STEPS[of], values: (_, splits) => splits.map((each) => format(each)) },
          ],
          series: [
            {},
            ...lines.map((line, index) => ({
              label: line.label,
              stroke: style(`--chart-${line.color}`),
              width: 1.6,
              fill: isFilled && index === 0 ? `${style(`--chart-${line.color}`)}28` : undefined,
              // A line of one point is nothing to see.
              points: {
                show: (self: uPlot, at: number) => isSparse || Array.from(self.data[at]!).filter((value) => value != null).length === 1,
                size: 4,
                fill: style(`--chart-${line.color}`),
              },
              spanGaps: isSparse,
            })),
          ],
          hooks: { setCursor: [(self) => setAt(self.cursor.idx ?? null)] },
        },
        newest.current,
        element,
      );
      chart.current = made;
      observer = new ResizeObserver(() => element.clientWidth > 0 && made.setSize({ width: element.clientWidth, height }));
      observer.observe(element);
    }, setError);
    return () => {
      isLeft = true;
      observer?.disconnect();
      chart.current?.destroy();
      chart.current = undefined;
    };
  }, [theme, shape, height]);

  useEffect(() => chart.current?.setData(data), [times, lines]);

  const shown = lines.map((line) => ({
    ...line,
    value: at === null ? line.values.findLast((value) => value !== null) : line.values[at],
  }));
  const isEmpty = lines.every((line) => line.values.every((value) => value == null));
  const said = shown.map((line) => `${line.label}: ${line.value == null ? 'nothing' : format(line.value)}`).join(', ');
  return (
    <figure class="chart card">
      <figcaption>
        <h2>{title}</h2>
        <span class="legend">
          {shown.map((line) => (
            <span key={line.label}>
              <i class={`dot chart-${line.color}`} />{line.label} <b>{line.value == null ? '–' : format(line.value)}</b>
            </span>
          ))}
          {at !== null && times[at] !== undefined && <span>{clock(times[at], { second: '2-digit' })}</span>}
        </span>
      </figcaption>
      {error ? <ErrorBox error={new Error('The chart could not be fetched. Reload the page.')} /> : (
        <>
          {isEmpty && <p class="plot quiet">Nothing was measured yet.</p>}
          <div ref={place} class="plot" role="img" aria-label={`${title}. ${said}`} hidden={isEmpty} />
        </>
      )}
    </figure>
  );
}
