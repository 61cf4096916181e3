/** What comes one after the other. */

// Browsers may not have it yet; a method cannot be named by nothing.
export const asyncDispose: typeof Symbol.asyncDispose =
  Symbol.asyncDispose ?? (Symbol.for('Symbol.asyncDispose') as typeof Symbol.asyncDispose);

/**
 * An iterator that can be left early: what it stands for ends when it is closed.
 *
 * Leaving a `for await` closes it; so does `close()`, also while someone waits for the next item:
 * for them it ends. Nothing is read ahead: without a reader, the program in the box waits.
 */
export class Stream<T> implements AsyncIterableIterator<T>, AsyncDisposable {
  readonly #source: AsyncGenerator<T, void, undefined>;
  readonly #stop: () => void;

  constructor(source: AsyncGenerator<T, void, undefined>, stop: () => void) {
    this.#source = source;
    this.#stop = stop;
  }

  [Symbol.asyncIterator](): this {
    return this;
  }

  next(): Promise<IteratorResult<T, void>> {
    return this.#source.next();
  }

  async return(): Promise<IteratorResult<T, void>> {
    await this.close();
    return { done: true, value: undefined };
  }

  /** End it. May be repeated, and does nothing to one that was read to its end. */
  async close(): Promise<void> {
    this.#stop();
    await this.#source.return(undefined);
  }

  [asyncDispose](): Promise<void> {
    return this.close();
  }
}
