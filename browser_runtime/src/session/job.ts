/** The present job of drafter or understudy, and whether results are still wanted. */

import type { Draft } from "../drafting/drafter.js";
import type { Arm } from "../speed/arms.js";
import type { Writer } from "./states.js";

export class JobSlot {
  /** The writer that has a job of this answer. */
  busy: Writer | null = null;
  /** The tree or chain to send next, and which it is. */
  ready: [Arm, Draft] | null = null;
  /** Version of the request; the result of a job with another version is stale. Only this class changes it. */
  version = 0;

  /** Give `writer` a job. Returns its version. */
  take(writer: Writer): number {
    this.busy = writer;
    return this.version;
  }

  /** Note that the job has ended. Returns whose it was. */
  done(): Writer | null {
    const writer = this.busy;
    this.busy = null;
    return writer;
  }

  /** Mark the present job, if there is one, as no longer wanted. */
  cancel(): void {
    this.version++;
  }

  /** Also drop the tree to be sent next: the text has changed, or the way it is written. */
  discard(): void {
    this.version++;
    this.ready = null;
  }
}
