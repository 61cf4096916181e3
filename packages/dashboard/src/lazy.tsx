/** Pages that are fetched when they are first shown. */
import type { ComponentType } from 'preact';
import { useEffect, useState } from 'preact/hooks';
import { ErrorBox, Loading } from './ui/index.js';

export function lazyPage<P extends object>(load: () => Promise<ComponentType<P>>): ComponentType<P> {
  let loaded: ComponentType<P> | undefined;
  return function LazyPage(props: P) {
    const [, setLoaded] = useState(loaded !== undefined);
    const [error, setError] = useState<unknown>();
    const begin = () => {
      setError(undefined);
      load().then(
        (page) => {
          loaded = page;
          setLoaded(true);
        },
        // After an update of the server, the file of this page may be gone.
        () => setError(new Error('This part of the dashboard could not be fetched. The server may be gone, or newer than this page: reload it.')),
      );
    };
    useEffect(() => {
      if (!loaded) begin();
    }, []);
    if (loaded) {
      const Loaded = loaded;
      return <Loaded {...props} />;
    }
    return error ? <ErrorBox error={error} retry={begin} /> : <Loading retry={begin} />;
  };
}
