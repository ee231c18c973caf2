/** The one job under way, to draft or to write, and which results of jobs are still wanted. */

import type { Draft } from "../drafting/drafter.js";
import type { Writer } from "./states.js";

export class JobSlot {
  /** The writer that has a job of this answer. */
  busy: Writer | null = null;
  /** The tree to send next. */
  ready: Draft | null = null;
  /** Of what is asked for; the result of a job of another version is stale. Nobody else changes it. */
  version = 0;

  /** `writer` gets a job. Returns the version that it carries. */
  take(writer: Writer): number {
    this.busy = writer;
    return this.version;
  }

  /** The job has ended. Returns whose it was. */
  done(): Writer | null {
    const writer = this.busy;
    this.busy = null;
    return writer;
  }

  /** The job under way, if there is one, is no longer wanted. */
  cancel(): void {
    this.version++;
  }

  /** Neither is the tree that was to be sent next: the text has changed, or the way it is written. */
  discard(): void {
    this.version++;
    this.ready = null;
  }
}
