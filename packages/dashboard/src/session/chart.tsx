/** Charts from the data of a figure: points can be read, series hidden, a range enlarged. */
import { useRef, useState } from 'preact/hooks';
import type { JSX } from 'preact';
import { Button, safeText } from '../ui/index.js';
import { numberOf, textOf } from './plain.js';

type Fields = Record<string, unknown>;
const WIDTH = 640;
const HEIGHT = 340;
const LEFT = 62;
const RIGHT = 14;
const TOP = 12;
const BOTTOM = 44;
const COLORS = 8;
const MOST_LABEL = 60;
const MOST_SERIES = 50;
const MOST_VALUES = 5000; // of one series
const MOST_CHARTS = 20;
const MOST_CELLS = 64; // of a heat map, in each direction

// A chart of a box may be of any length: only so much of it is read.
const listOf = (value: unknown): unknown[] => (Array.isArray(value) ? value.slice(0, MOST_VALUES) : []);
const fieldsOf = (value: unknown): Fields[] =>
  listOf(value).filter((one): one is Fields => typeof one === 'object' && one !== null);
const words = (value: unknown): string =>
  typeof value === 'string' || typeof value === 'number' ? safeText(String(value)).slice(0, MOST_LABEL) : '';
const color = (index: number): string => `var(--series-${(index % COLORS) + 1})`;

/** Whether there is anything here that can be drawn. */
export function isDrawable(chart: unknown): chart is Fields {
  if (typeof chart !== 'object' || chart === null) return false;
  const { type, series, charts } = chart as Fields;
  if (type === 'superchart') return fieldsOf(charts).some(isDrawable);
  return fieldsOf(series).some((one) => ['line', 'scatter', 'bar', 'histogram', 'pie', 'box', 'heatmap'].includes(textOf(one.type)));
}

export function Chart({ chart }: { chart: Fields }) {
  if (chart.type === 'superchart') {
    return (
      <div class="figures">
        {words(chart.title) && <h2>{words(chart.title)}</h2>}
        {fieldsOf(chart.charts).filter(isDrawable).slice(0, MOST_CHARTS).map((one, index) => <Chart key={index} chart={one} />)}
      </div>
    );
  }
  const kinds = new Set(fieldsOf(chart.series).map((one) => one.type));
  return (
    <figure class="figure">
      {words(chart.title) && <figcaption>{words(chart.title)}</figcaption>}
      {kinds.has('pie') ? <Pie chart={chart} /> : kinds.has('heatmap') ? <Heatmap chart={chart} /> : <Axes chart={chart} />}
    </figure>
  );
}

// --- lines, points, bars, boxes -------------------------------------------------------------

interface Mark {
  series: number;
  x: number;
  y: number;
  text: string;
}

interface Series {
  kind: string;
  label: string;
  xs: number[];
  ys: number[];
  edges: number[];
  isLying: boolean;
  boxes: { at: number; label: string; min: number; q1: number; median: number; q3: number; max: number }[];
}

/** An axis: numbers, times or names. */
class Scale {
  readonly names: string[] = [];
  isTime = false;

  /** The place of a value on this axis. NaN for what has none. */
  place(value: unknown): number {
    if (typeof value === 'number') return value;
    if (typeof value !== 'string') return NaN;
    if (this.isTime) return Date.parse(/[Z+]/.test(value) ? value : `${value}Z`);
    const found = this.names.indexOf(value);
    if (found >= 0) return found;
    return this.names.push(value) - 1;
  }

  learn(values: unknown[]): void {
    const texts = values.filter((value): value is string => typeof value === 'string');
    this.isTime ||= texts.length > 0 && texts.every((text) => /^\d{4}-\d\d(-\d\d)?([T ][\d:.]+)?$/.test(text));
  }

  show(value: number): string {
    if (this.isTime) {
      const time = new Date(value);
      if (Number.isNaN(time.getTime())) return '';
      const text = time.toISOString();
      return text.endsWith('T00:00:00.000Z') ? text.slice(0, 10) : text.slice(0, 19).replace('T', ' ');
    }
    if (this.names.length) return words(this.names[value] ?? '');
    return String(Number(value.toPrecision(6)));
  }
}

function read(chart: Fields): { series: Series[]; x: Scale; y: Scale } {
  const [x, y] = [new Scale(), new Scale()];
  const all = fieldsOf(chart.series).slice(0, MOST_SERIES);
  for (const one of all) {
    x.learn(listOf(one.x));
    y.learn(listOf(one.y));
  }
  const series = all.map((one): Series => {
    const kind = textOf(one.type);
    const boxes = kind !== 'box' ? [] : fieldsOf(one.elements).map((each) => ({
      at: x.place(textOf(each.label)),
      label: words(each.label),
      min: numberOf(each.min), q1: numberOf(each.q1), median: numberOf(each.median), q3: numberOf(each.q3), max: numberOf(each.max),
    })).filter((box) => [box.at, box.min, box.q1, box.median, box.q3, box.max].every(Number.isFinite));
    return {
      kind, boxes,
      label: words(one.label),
      xs: listOf(one.x).map((value) => x.place(value)),
      ys: listOf(one.y).map((value) => y.place(value)),
      edges: listOf(one.edges).map(numberOf),
      isLying: one.orientation === 'horizontal',
    };
  });
  return { series, x, y };
}

function extent(values: number[], withZero: boolean): [number, number] {
  let [low, high] = [Infinity, -Infinity];
  for (const value of values) {
    if (!Number.isFinite(value)) continue;
    low = Math.min(low, value);
    high = Math.max(high, value);
  }
  if (low > high) return [0, 1];
  if (withZero) [low, high] = [Math.min(0, low), Math.max(0, high)];
  if (low === high) return [low - 1, high + 1];
  const room = (high - low) * 0.05;
  return [withZero && low === 0 ? 0 : low - room, withZero && high === 0 ? 0 : high + room];
}

/** Of bars: their middles, and room for the halves of the first and the last. */
function ends(values: number[]): [number, number] {
  const known = values.filter(Number.isFinite);
  if (!known.length) return [0, 1];
  const room = 0.6 * step(known);
  return [known.reduce((a, b) => Math.min(a, b)) - room, known.reduce((a, b) => Math.max(a, b)) + room];
}

function ticks(low: number, high: number, count: number): number[] {
  const rough = (high - low) / count;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((one) => one * power).find((one) => one >= rough) ?? rough;
  const found: number[] = [];
  for (let at = Math.ceil(low / step) * step; at <= high + step / 1e6 && found.length < 20; at += step) {
    found.push(Math.abs(at) < step / 1e6 ? 0 : at);
  }
  return found;
}

function Axes({ chart }: { chart: Fields }) {
  const { series, x, y } = read(chart);
  const [hidden, setHidden] = useState<ReadonlySet<number>>(new Set());
  const [zoom, setZoom] = useState<[number, number]>();
  const [drag, setDrag] = useState<[number, number]>();
  const [near, setNear] = useState<Mark>();
  const svg = useRef<SVGSVGElement>(null);

  const visible = series.map((one, index) => ({ ...one, index })).filter(({ index }) => !hidden.has(index));
  const isLogX = chart.x_scale === 'log' && !x.names.length && !x.isTime;
  const isLogY = chart.y_scale === 'log' && !y.names.length && !y.isTime;
  const onX = (value: number) => (isLogX ? Math.log10(value) : value);
  const onY = (value: number) => (isLogY ? Math.log10(value) : value);
  const bars = visible.filter(({ kind }) => kind === 'bar');
  const hasBars = bars.some(({ isLying }) => !isLying) || visible.some(({ kind, isLying }) => kind === 'histogram' && !isLying);
  const hasLying = visible.some(({ kind, isLying }) => (kind === 'bar' || kind === 'histogram') && isLying);

  const allX = visible.flatMap((one) => [...one.xs, ...(one.isLying ? [] : one.edges), ...one.boxes.map(({ at }) => at)]).map(onX);
  const allY = visible.flatMap((one) => [...one.ys, ...(one.isLying ? one.edges : []), ...one.boxes.flatMap(({ min, max }) => [min, max])]).map(onY);
  let [x0, x1] = extent(allX, hasLying && !isLogX);
  if (x.names.length || (hasBars && visible.every(({ kind }) => kind === 'bar'))) [x0, x1] = ends(allX);
  if (zoom) [x0, x1] = zoom;
  let [y0, y1] = extent(
    zoom ? visible.flatMap(({ xs, ys }) => ys.filter((_, at) => onX(xs[at]!) >= x0 && onX(xs[at]!) <= x1)).map(onY).concat(allY.length ? [] : []) : allY,
    hasBars && !isLogY,
  );
  if (hasLying && (y.names.length || visible.every(({ kind }) => kind === 'bar'))) [y0, y1] = ends(allY);
  // Numbers too far from each other have no distance that can be drawn.
  if (!Number.isFinite(x1 - x0)) [x0, x1] = [0, 1];
  if (!Number.isFinite(y1 - y0)) [y0, y1] = [0, 1];
  const px = (value: number) => LEFT + ((onX(value) - x0) / (x1 - x0)) * (WIDTH - LEFT - RIGHT);
  const py = (value: number) => HEIGHT - BOTTOM - ((onY(value) - y0) / (y1 - y0)) * (HEIGHT - TOP - BOTTOM);
  const fromPx = (place: number) => x0 + ((place - LEFT) / (WIDTH - LEFT - RIGHT)) * (x1 - x0);
  const clampX = (value: number) => Math.max(LEFT, Math.min(WIDTH - RIGHT, value));
  const clampY = (value: number) => Math.max(TOP, Math.min(HEIGHT - BOTTOM, value));

  const marks: Mark[] = [];
  const note = (index: number, at: number, xValue: number, yValue: number) => {
    const label = series[index]!.label;
    if (Number.isFinite(xValue) && Number.isFinite(yValue)) {
      marks.push({ series: index, x: px(xValue), y: py(yValue), text: `${label ? `${label}: ` : ''}${x.show(xValue)}, ${y.show(yValue)}` });
    }
    return at;
  };

  const drawn = visible.map((one): JSX.Element => {
    const paint = color(one.index);
    if (one.kind === 'box') {
      const half = Math.min(36, ((WIDTH - LEFT - RIGHT) / Math.max(1, one.boxes.length)) * 0.3);
      return (
        <g key={one.index} stroke={paint} fill="none" stroke-width={1.5}>
          {one.boxes.map((box, at) => {
            const middle = px(box.at);
            if (![middle, py(box.min), py(box.max)].every(Number.isFinite)) return null;
            const values = `${box.label}: median ${box.median}, ${box.q1} to ${box.q3}, all ${box.min} to ${box.max}`;
            marks.push({ series: one.index, x: middle, y: py(box.median), text: values });
            return (
              <g key={at}>
                <path d={`M${middle} ${py(box.min)}V${py(box.q1)}M${middle} ${py(box.q3)}V${py(box.max)}M${middle - half / 2} ${py(box.min)}h${half}M${middle - half / 2} ${py(box.max)}h${half}`} />
                <rect x={middle - half} y={py(box.q3)} width={half * 2} height={Math.max(1, py(box.q1) - py(box.q3))} fill={paint} fill-opacity={0.18} />
                <path d={`M${middle - half} ${py(box.median)}h${half * 2}`} stroke-width={2.5} />
              </g>
            );
          })}
        </g>
      );
    }
    if (one.kind === 'bar' || one.kind === 'histogram') {
      const place = bars.findIndex(({ index }) => index === one.index);
      const share = one.kind === 'bar' ? bars.length : 1;
      return (
        <g key={one.index} fill={paint} fill-opacity={one.kind === 'bar' ? 0.9 : 0.75}>
          {one.xs.map((xValue, at) => {
            const yValue = one.ys[at]!;
            if (!Number.isFinite(px(xValue)) || !Number.isFinite(py(yValue))) return null;
            if (one.isLying) {
              const across = one.kind === 'histogram' && one.edges.length > at + 1
                ? [py(one.edges[at + 1]!), py(one.edges[at]!)]
                : span(py, yValue, step(one.ys), place, share).reverse();
              const [top, foot] = [clampY(Math.min(...across)), clampY(Math.max(...across))];
              if (!Number.isFinite(top + foot + px(0))) return null;
              marks.push({ series: one.index, x: px(xValue), y: (top + foot) / 2, text: `${one.label ? `${one.label}: ` : ''}${y.show(yValue)}, ${x.show(xValue)}` });
              return <rect key={at} x={Math.min(px(0), px(xValue))} y={top} width={Math.abs(px(xValue) - px(0))} height={Math.max(1, foot - top - 0.5)} />;
            }
            const edges = one.kind === 'histogram' && one.edges.length > at + 1
              ? [px(one.edges[at]!), px(one.edges[at + 1]!)]
              : span(px, xValue, step(one.xs), place, share);
            const [left, right] = [clampX(edges[0]!), clampX(edges[1]!)];
            if (!Number.isFinite(left + right)) return null;
            const base = isLogY ? HEIGHT - BOTTOM : py(0);
            const range = one.kind === 'histogram' && one.edges.length > at + 1 ? `${x.show(one.edges[at]!)} to ${x.show(one.edges[at + 1]!)}` : x.show(xValue);
            marks.push({ series: one.index, x: (left + right) / 2, y: py(yValue), text: `${one.label ? `${one.label}: ` : ''}${range}, ${y.show(yValue)}` });
            return <rect key={at} x={left} y={clampY(Math.min(base, py(yValue)))} width={Math.max(0, right - left - 0.5)} height={Math.max(0, Math.abs(clampY(py(yValue)) - clampY(base)))} />;
          })}
        </g>
      );
    }
    let path = '';
    let isPen = false;
    const dots: JSX.Element[] = [];
    one.xs.forEach((xValue, at) => {
      const [left, top] = [px(xValue), py(one.ys[at] ?? NaN)];
      if (!Number.isFinite(left) || !Number.isFinite(top)) {
        isPen = false;
        return;
      }
      note(one.index, at, xValue, one.ys[at]!);
      if (one.kind === 'scatter') dots.push(<circle key={at} cx={left} cy={top} r={one.xs.length > 300 ? 2 : 3.2} />);
      else path += `${isPen ? 'L' : 'M'}${left.toFixed(1)} ${top.toFixed(1)}`;
      isPen = true;
    });
    return one.kind === 'scatter'
      ? <g key={one.index} fill={paint} fill-opacity={0.75}>{dots}</g>
      : <path key={one.index} d={path} fill="none" stroke={paint} stroke-width={1.8} stroke-linejoin="round" />;
  });

  const xTicks = x.names.length
    ? x.names.map((_, at) => at).filter((at) => at >= x0 && at <= x1 && at % Math.ceil(x.names.length / 14) === 0)
    : ticks(x0, x1, x.isTime ? 5 : 8).map((at) => (isLogX ? 10 ** at : at));
  const yTicks = y.names.length
    ? y.names.map((_, at) => at).filter((at) => at % Math.ceil(y.names.length / 14) === 0)
    : ticks(y0, y1, 6).map((at) => (isLogY ? 10 ** at : at));

  const place = (event: PointerEvent): [number, number] => {
    const box = svg.current!.getBoundingClientRect();
    return [((event.clientX - box.left) / box.width) * WIDTH, ((event.clientY - box.top) / box.height) * HEIGHT];
  };
  const move = (event: PointerEvent) => {
    const [left, top] = place(event);
    if (drag) return setDrag([drag[0], clampX(left)]);
    let best: Mark | undefined;
    let distance = 40 ** 2;
    for (const mark of marks) {
      const far = (mark.x - left) ** 2 + ((mark.y - top) / 2) ** 2;
      if (far < distance && mark.x >= LEFT - 1 && mark.x <= WIDTH - RIGHT + 1) [best, distance] = [mark, far];
    }
    setNear(best);
  };
  const release = () => {
    if (drag && Math.abs(drag[1] - drag[0]) > 8) {
      setZoom([fromPx(Math.min(...drag)), fromPx(Math.max(...drag))]);
      setNear(undefined);
    }
    setDrag(undefined);
  };
  const canZoom = !hasLying;
  const title = words(chart.title) || 'Chart';
  const clip = useRef(`clip-${Math.random().toString(36).slice(2)}`);
  return (
    <>
      <div class="figure-area">
        <svg
          ref={svg}
          viewBox={`0 0 ${WIDTH} ${HEIGHT}`}
          role="img"
          aria-label={`${title}: ${series.length} series, ${marks.length} values`}
          onPointerMove={move}
          onPointerLeave={() => setNear(undefined)}
          onPointerDown={(event) => {
            if (!canZoom || event.button !== 0) return;
            const [left] = place(event);
            event.currentTarget.setPointerCapture(event.pointerId);
            setDrag([clampX(left), clampX(left)]);
          }}
          onPointerUp={release}
          onPointerCancel={() => setDrag(undefined)}
          onDblClick={() => setZoom(undefined)}
        >
          <defs><clipPath id={clip.current}><rect x={LEFT} y={TOP} width={WIDTH - LEFT - RIGHT} height={HEIGHT - TOP - BOTTOM} /></clipPath></defs>
          <g class="figure-grid">
            {yTicks.map((at) => <path key={at} d={`M${LEFT} ${py(at)}H${WIDTH - RIGHT}`} />)}
            <path class="figure-axis" d={`M${LEFT} ${HEIGHT - BOTTOM}H${WIDTH - RIGHT}`} />
          </g>
          <g class="figure-words">
            {yTicks.map((at) => <text key={at} x={LEFT - 8} y={py(at) + 4} text-anchor="end">{y.show(at).slice(0, 9)}</text>)}
            {xTicks.map((at) => <text key={at} x={px(at)} y={HEIGHT - BOTTOM + 17} text-anchor="middle">{x.show(at).slice(0, 12)}</text>)}
            <text x={(LEFT + WIDTH - RIGHT) / 2} y={HEIGHT - 8} text-anchor="middle">{words(chart.x_label)}</text>
            <text transform={`translate(13 ${(HEIGHT - BOTTOM + TOP) / 2}) rotate(-90)`} text-anchor="middle">{words(chart.y_label)}</text>
          </g>
          <g clip-path={`url(#${clip.current})`}>{drawn}</g>
          {drag && <rect class="figure-drag" x={Math.min(...drag)} y={TOP} width={Math.abs(drag[1] - drag[0])} height={HEIGHT - TOP - BOTTOM} />}
          {near && <circle class="figure-near" cx={near.x} cy={near.y} r={5} stroke={color(near.series)} />}
        </svg>
        {near && (
          <div class="figure-tip" style={{ left: `${(near.x / WIDTH) * 100}%`, top: `${(near.y / HEIGHT) * 100}%` }} data-side={near.x > WIDTH * 0.6 ? 'left' : 'right'}>
            {near.text}
          </div>
        )}
      </div>
      <div class="figure-foot">
        {series.length > 1 && series.map((one, index) => (
          <button
            key={index}
            type="button"
            aria-pressed={!hidden.has(index)}
            title="Show or hide"
            onClick={() => {
              const next = new Set(hidden);
              if (!next.delete(index)) next.add(index);
              setHidden(next);
            }}
          >
            <span class="figure-color" style={{ backgroundColor: color(index) }} />{one.label || `${one.kind} ${index + 1}`}
          </button>
        ))}
        {zoom && <Button isSmall kind="ghost" onClick={() => setZoom(undefined)}>Whole range</Button>}
        {canZoom && !zoom && <span class="quiet">Drag over a range to enlarge it.</span>}
      </div>
    </>
  );
}

/** The smallest distance of values that follow each other. */
function step(values: number[]): number {
  const sorted = [...new Set(values.filter(Number.isFinite))].sort((a, b) => a - b);
  let least = Infinity;
  for (let at = 1; at < sorted.length; at++) least = Math.min(least, sorted[at]! - sorted[at - 1]!);
  return Number.isFinite(least) ? least : 1;
}

/** Where one of several bars at a value begins and ends. */
function span(scale: (value: number) => number, value: number, distance: number, place: number, share: number): number[] {
  const wide = distance * 0.8;
  const begin = value - wide / 2 + (wide / share) * place;
  return [scale(begin), scale(begin + wide / share)];
}

// --- pies and heat maps ---------------------------------------------------------------------

function Pie({ chart }: { chart: Fields }) {
  const [near, setNear] = useState<number>();
  const elements = fieldsOf(fieldsOf(chart.series).find((one) => one.type === 'pie')?.elements).slice(0, 200);
  const values = elements.map((one) => Math.max(0, Number.isFinite(one.value) ? numberOf(one.value) : 0));
  const total = values.reduce((sum, value) => sum + value, 0) || 1;
  let angle = -Math.PI / 2;
  const radius = 130;
  const point = (at: number) => `${(170 + radius * Math.cos(at)).toFixed(2)} ${(170 + radius * Math.sin(at)).toFixed(2)}`;
  return (
    <div class="pie">
      <svg viewBox="0 0 340 340" role="img" aria-label={`${words(chart.title) || 'Pie chart'}: ${elements.length} parts`}>
        {values.map((value, at) => {
          const from = angle;
          angle += (value / total) * Math.PI * 2;
          const isWhole = value / total > 0.9999;
          const path = isWhole
            ? `M170 40a130 130 0 1 1 -.01 0z`
            : `M170 170L${point(from)}A${radius} ${radius} 0 ${angle - from > Math.PI ? 1 : 0} 1 ${point(angle)}z`;
          return <path key={at} d={path} fill={color(at)} fill-opacity={near === undefined || near === at ? 1 : 0.4} class="pie-part" onPointerEnter={() => setNear(at)} onPointerLeave={() => setNear(undefined)} />;
        })}
      </svg>
      <ul>
        {elements.map((one, at) => (
          <li key={at} onPointerEnter={() => setNear(at)} onPointerLeave={() => setNear(undefined)}>
            <span class="figure-color" style={{ backgroundColor: color(at) }} />
            {words(one.label) || `part ${at + 1}`} <strong>{((values[at]! / total) * 100).toFixed(1)} %</strong>
          </li>
        ))}
      </ul>
    </div>
  );
}

function Heatmap({ chart }: { chart: Fields }) {
  const [near, setNear] = useState<string>('');
  const one = fieldsOf(chart.series).find((each) => each.type === 'heatmap');
  const rows = listOf(one?.values).slice(0, MOST_CELLS).map((row) => listOf(row).slice(0, MOST_CELLS));
  const numbers = rows.flat().filter((value): value is number => typeof value === 'number' && Number.isFinite(value));
  const [low, high] = [numbers.reduce((a, b) => Math.min(a, b), Infinity), numbers.reduce((a, b) => Math.max(a, b), -Infinity)];
  const columns = Math.max(1, ...rows.map((row) => row.length));
  const side = Math.min(28, 560 / columns, 420 / Math.max(1, rows.length));
  return (
    <>
      <svg
        class="heatmap"
        viewBox={`0 0 ${columns * side} ${rows.length * side}`}
        style={{ maxWidth: `${columns * side * 1.3}px` }}
        role="img"
        aria-label={`${words(chart.title) || 'Heat map'}: ${rows.length} by ${columns}, from ${low} to ${high}`}
        onPointerLeave={() => setNear('')}
      >
        {rows.map((row, y) => row.map((value, x) => (
          <rect
            key={`${y} ${x}`}
            x={x * side} y={y * side} width={side} height={side}
            fill={typeof value === 'number' ? 'var(--series-1)' : 'var(--hover)'}
            fill-opacity={typeof value === 'number' ? 0.06 + 0.94 * (high > low ? (value - low) / (high - low) : 1) : 1}
            onPointerEnter={() => setNear(`row ${y}, column ${x}: ${words(value) || 'nothing'}`)}
          />
        )))}
      </svg>
      <p class="figure-foot quiet">{near || `from ${words(low)} to ${words(high)}`}{one?.truncated === true && ' · only a part is shown'}</p>
    </>
  );
}
