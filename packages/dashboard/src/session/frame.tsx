/**
 * HTML that a box wrote. It runs in a frame of an origin of its own, which has no network, no key
 * and no way into this page; only its height comes back.
 */
import { useEffect, useRef, useState } from 'preact/hooks';
import { isDark } from '../ui/index.js';

const LEAST = 32;
const MOST = 640;

interface FrameProps {
  html: string;
  label: string;
  /** Pixels: what is higher is scrolled in the frame. */
  most?: number;
}

export function Frame(props: FrameProps) {
  const theme = isDark.value ? 'dark' : 'light';
  const shown = useRef({ html: props.html, theme, version: 0 });
  if (shown.current.html !== props.html || shown.current.theme !== theme) {
    // Another document is another frame: one that was loaded is never written to again.
    shown.current = { html: props.html, theme, version: shown.current.version + 1 };
  }
  return <OneFrame key={shown.current.version} {...props} theme={theme} />;
}

function OneFrame({ html, label, most = MOST, theme }: FrameProps & { theme: string }) {
  const frame = useRef<HTMLIFrameElement>(null);
  const [height, setHeight] = useState(LEAST * 2);
  const isSent = useRef(false);

  const send = () => {
    // Once: what is loaded later is not the page that it was meant for.
    if (isSent.current) return;
    isSent.current = true;
    // The frame has an opaque origin, which no target can name; what is sent is its own content.
    frame.current?.contentWindow?.postMessage({ html, theme }, '*');
  };
  useEffect(() => {
    let changes = 0;
    const hear = (event: MessageEvent<unknown>) => {
      if (event.source === null || event.source !== frame.current?.contentWindow) return;
      const reported = (event.data as { height?: unknown } | null)?.height;
      if (typeof reported !== 'number' || !Number.isFinite(reported)) return;
      // Content as high as its frame could make it grow without end.
      if (++changes > 200) return;
      setHeight(Math.min(most, Math.max(LEAST, Math.ceil(reported))));
    };
    addEventListener('message', hear);
    return () => removeEventListener('message', hear);
  }, []);
  return (
    <iframe
      ref={frame}
      class="rich-frame"
      title={label}
      sandbox="allow-scripts"
      src="/frame"
      referrerpolicy="no-referrer"
      loading="eager"
      style={{ height: `${height}px` }}
      onLoad={send}
    />
  );
}
