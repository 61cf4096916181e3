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

interface ChartProps {
  title: string;
  times: number[];
  lines: Line[];
  format: (value: number) => string;
  isFilled?: boolean;
  /** Has gaps, which are bridged. */
  isSparse?: boolean;
  /** The height of the axis while there is nothing to show. */
  least?: number;
  height?: number;
}

const clock = (seconds: number) =>
  new Date(seconds * 1000).toLocaleTimeString('en-GB', { hour: '2-digit', minute: '2-digit' });

type Library = typeof uPlot;
let library: Promise<Library> | undefined;

function loadLibrary(): Promise<Library> {
  library ??= Promise.all([import('uplot'), import('uplot/dist/uPlot.min.css')]).then(([module]) => module.default);
  library.catch(() => (library = undefined));
  return library;
}

const style = (name: string) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

export function Chart({ title, times, lines, format, isFilled, isSparse = false, least = 1, height = 120 }: ChartProps) {
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
          padding: [8, 8, 0, 0],
          legend: { show: false },
          cursor: { y: false, drag: { x: false, y: false }, points: { size: 6 } },
          scales: { y: { range: (_, __, max) => [0, max > 0 ? max * 1.1 : least] } },
          axes: [
            { ...axis, size: 26, space: 70, values: (_, splits) => splits.map(clock) },
            { ...axis, size: 56, space: 28, values: (_, splits) => splits.map(format) },
          ],
          series: [
            {},
            ...lines.map((line, index) => ({
              label: line.label,
              stroke: style(`--chart-${line.color}`),
              width: 1.6,
              fill: isFilled && index === 0 ? `${style(`--chart-${line.color}`)}28` : undefined,
              // What is measured now and then would be a line of one point: nothing to see.
              points: { show: isSparse, size: 4, fill: style(`--chart-${line.color}`) },
              spanGaps: isSparse,
            })),
          ],
          hooks: { setCursor: [(self) => setAt(self.cursor.idx ?? null)] },
        },
        newest.current,
        element,
      );
      chart.current = made;
      observer = new ResizeObserver(() => made.setSize({ width: element.clientWidth, height }));
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
  const said = shown.map((line) => `${line.label}: ${line.value == null ? 'nothing' : format(line.value)}`).join(', ');
  return (
    <figure class="chart card">
      <figcaption>
        <h3>{title}</h3>
        <span class="legend">
          {shown.map((line) => (
            <span key={line.label}>
              <i class={`dot chart-${line.color}`} />{line.label} <b>{line.value == null ? '–' : format(line.value)}</b>
            </span>
          ))}
          {at !== null && times[at] !== undefined && <span>{new Date(times[at] * 1000).toLocaleTimeString()}</span>}
        </span>
      </figcaption>
      {error ? <ErrorBox error={new Error('The chart could not be fetched. Reload the page.')} /> : <div ref={place} class="plot" role="img" aria-label={`${title}. ${said}`} />}
    </figure>
  );
}
