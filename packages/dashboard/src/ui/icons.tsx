/** Icons of one stroke, drawn here: no font and no image is loaded. */
const PATHS = {
  alert: 'M12 8v5m0 3.5v.01M10.3 4 2.6 17.5A2 2 0 0 0 4.3 20.5h15.4a2 2 0 0 0 1.7-3L13.7 4a2 2 0 0 0-3.4 0z',
  arrow: 'M5 12h14m-6-6 6 6-6 6',
  box: 'M3.5 10.5 12 4l8.5 6.5V19a1.5 1.5 0 0 1-1.5 1.5H5A1.5 1.5 0 0 1 3.5 19zM9 20.5V15a3 3 0 0 1 6 0v5.5',
  chart: 'M4 4v16h16M8 15l3.5-4 3 2.5L20 8',
  check: 'm5 12.5 4.5 4.5L19 7',
  chevron: 'm9 6 6 6-6 6',
  clock: 'M12 21a9 9 0 1 0 0-18 9 9 0 0 0 0 18zm0-14v5.2l3.4 2',
  close: 'M6 6l12 12M18 6 6 18',
  copy: 'M9 9h10.5v10.5H9zM15 9V4.5H4.5V15H9',
  download: 'M12 4v11m-5-4.5 5 5 5-5M4.5 20h15',
  edit: 'm4 20 .9-4L16.5 4.4l3.1 3.1L8 19.1zM14 7l3 3',
  file: 'M6 3.5h8l4.5 4.5v12.5H6zM14 3.5V8h4.5',
  folder: 'M3.5 18.5v-13h6l2 2.5h9v10.5z',
  gear: 'M12 15.2a3.2 3.2 0 1 0 0-6.4 3.2 3.2 0 0 0 0 6.4zM12 3v2.5M12 18.5V21M3 12h2.5M18.5 12H21M5.6 5.6l1.8 1.8M16.6 16.6l1.8 1.8M18.4 5.6l-1.8 1.8M7.4 16.6l-1.8 1.8',
  key: 'M8 19a4 4 0 1 0 0-8 4 4 0 0 0 0 8zm3-6.5L20 4m-4 4 3 3',
  list: 'M8.5 6H20M8.5 12H20M8.5 18H20M4 6h.01M4 12h.01M4 18h.01',
  logout: 'M10 4.5H5v15h5M15 8l4 4-4 4m4-4H10',
  moon: 'M20 14.5A8.5 8.5 0 0 1 9.5 4a8.5 8.5 0 1 0 10.5 10.5z',
  more: 'M5.5 12h.01M12 12h.01M18.5 12h.01',
  pause: 'M8 5v14M16 5v14',
  play: 'm7 4.5 12 7.5-12 7.5z',
  plus: 'M12 5v14M5 12h14',
  refresh: 'M19.5 12a7.5 7.5 0 1 1-2.2-5.3L19.5 9m0-5v5h-5',
  search: 'M11 18a7 7 0 1 0 0-14 7 7 0 0 0 0 14zm5-2 4.5 4.5',
  shield: 'M12 3.5 5 6v6c0 4.2 2.9 7.3 7 8.5 4.1-1.2 7-4.3 7-8.5V6z',
  stop: 'M6 6h12v12H6z',
  sun: 'M12 16a4 4 0 1 0 0-8 4 4 0 0 0 0 8zM12 2.5v2M12 19.5v2M2.5 12h2M19.5 12h2M5.3 5.3l1.4 1.4M17.3 17.3l1.4 1.4M18.7 5.3l-1.4 1.4M6.7 17.3l-1.4 1.4',
  terminal: 'm5 7 5 5-5 5m7 0h7',
  trash: 'M4.5 7h15M9.5 7V4h5v3M6.5 7l1 13.5h9l1-13.5M10.5 11v5.5M13.5 11v5.5',
  upload: 'M12 16V5M7 9.5l5-5 5 5M4.5 20h15',
  user: 'M12 12a4 4 0 1 0 0-8 4 4 0 0 0 0 8zm-7.5 8.5c.7-4 3.6-5.5 7.5-5.5s6.800 1.500 7.500 5.500',
} as const;

export type IconName = keyof typeof PATHS;

export function Icon({ name, size = 16 }: { name: IconName; size?: number }) {
  return (
    <svg class="icon" viewBox="0 0 24 24" width={size} height={size} aria-hidden="true" focusable="false">
      <path d={PATHS[name]} />
    </svg>
  );
}
