/** Messages that an answer waits for: link events, finished jobs of the drafter, and the clock. */

/** A queue with one reader. */
export class Inbox<T> {
  private readonly events: T[] = [];
  private arrived: (() => void) | null = null;

  push(event: T): void {
    this.events.push(event);
    this.arrived?.();
  }

  /** Return the first message that has arrived. */
  take(): T | undefined {
    return this.events.shift();
  }

  /** Return the next event, or undefined once `seconds` have passed; null: wait without a limit. */
  async next(seconds: number | null): Promise<T | undefined> {
    if (!this.events.length) {
      let timer: ReturnType<typeof setTimeout> | undefined;
      await new Promise<void>(resolve => {
        this.arrived = resolve;
        if (seconds !== null) timer = setTimeout(resolve, Math.max(0, 1000 * seconds));
      });
      this.arrived = null;
      clearTimeout(timer);
    }
    return this.events.shift();
  }
}
