/** All that a session waits for, in one list: what, and until when. */

import type { Flight } from "./requests.js";

/**
 * What is waited for; `Session.tick` says what happens when its time has passed. connect: the first link of an answer.
 * giveUp: the target's return, where nothing more can be written. retry: the moment that the verifier named when it
 * refused. reply: the reply to a request. renew: any message at all, before another connection is made.
 */
export type Deadline = "connect" | "giveUp" | "retry" | "reply" | "renew";

/** Moments on the session's clock; null: not waited for. */
export class Deadlines {
  connect: number | null = null;
  giveUp: number | null = null;
  retry: number | null = null;
  /** When the link last said something. */
  heard = 0;

  /** silence: seconds past a reply's deadline until renew. */
  constructor(private readonly silence: number) {}

  /** What is waited for beside `flight`, the most important first. alone: its reply is overdue already. */
  pending(flight: Flight | null, alone: boolean): [Deadline, number][] {
    const moments: [Deadline, number | null][] = [
      ["connect", this.connect],
      ["giveUp", this.giveUp],
      ["retry", this.retry],
    ];
    if (flight) {
      moments.push(["reply", alone ? null : flight.due]);
      moments.push(["renew", Math.max(this.heard, flight.due) + this.silence]);
    }
    return moments.filter((entry): entry is [Deadline, number] => entry[1] !== null);
  }
}
