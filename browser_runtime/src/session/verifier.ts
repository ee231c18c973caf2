/** An answer's view of its verifier: the link, its limits, the request in flight, refusals and deadlines. */

import type { Constraint } from "../protocol/constraint.js";
import {
  ERR_BOUNDS,
  ERR_BUSY,
  ERR_GOING_AWAY,
  ERR_MALFORMED,
  ERR_TOO_LONG,
  ERR_UNKNOWN,
  FINISH_NONE,
  type Verdict,
  type Welcome,
  type WireErrorMessage,
} from "../protocol/messages.js";
import type { Sampling } from "../protocol/sampling.js";
import { MAX_NODES, TokenTree } from "../protocol/tree.js";
import { packIds, packTree } from "../protocol/wire.js";
import type { Arm } from "../speed/arms.js";
import type { Action, Send } from "./actions.js";
import type { Requested, Settled } from "./settled.js";
import { type Patience, RoundTimer } from "./timeouts.js";

/** Seconds until OPEN is sent again if the verifier names no time. */
const RETRY_SECONDS = 1;
const SHORTEST_RETRY = 0.05;

/**
 * An awaited event; `Session.tick` acts when its time has passed. connect: the first link of an answer. give up: the
 * target's return, once offline writing has stopped. retry: the time that the verifier named when it refused a request.
 * reply: the reply to a request. renew: any message at all, before another connection is made.
 */
export type Deadline = "connect" | "give up" | "retry" | "reply" | "renew";

/**
 * The consequence of a verifier's refusal. None loses text. ignore: nothing: it concerns a cancelled request, or a link that
 * ends after its replies. reopen: it knows another text, or none: OPEN again. retry: OPEN again later. fatal: it would
 * refuse again: this link's verifier is not asked any more. full: its context is full.
 */
export type Refusal = "ignore" | "reopen" | "retry" | "fatal" | "full";

/**
 * How well the verdicts of a stream have timed its tokens so far. silent: no token has come. untimed: tokens have come,
 * without a time. first: the first one carried its step's time. running: so did a later one.
 */
type StreamClock = "silent" | "untimed" | "first" | "running";

/**
 * A request whose reply is awaited. sent, due: when it was sent, and when its reply is overdue; `sent` of a running stream
 * is when its last token came.
 */
export interface InFlight extends Requested {
  seq: number;
  sent: number;
  due: number;
  clock: StreamClock;
}

/** stream, sessionId, sampling, constraint: as on the wire. timer: of rounds; it outlives the answer. */
export interface VerifierSetup {
  stream: number;
  sessionId: Uint8Array;
  sampling: Sampling;
  constraint: Constraint | null;
  maxContext: number;
  patience: Patience;
  timer: RoundTimer;
}

/** The present verifier of one answer. */
export class VerifierState {
  linked = false;
  /** This link's verifier permanently refused a request. */
  refused = false;
  /** Why it refused the last request, in words for people; "" once it has answered. */
  complaint = "";
  inFlight: InFlight | null = null;
  /** Number of the last request. */
  seq = 0;
  maxNodes = 64;
  /** Tokens that its answers may hold. */
  context: number;
  /** The arithmetic of the answer's verified text; "" without any, or if unknown. */
  pinned = "";
  /** The first link is waited for until then. */
  connectBy: number | null = null;
  /** When the link last delivered something. */
  heard = 0;
  /** Nothing is requested before. */
  private retryAt: number | null = null;
  /** OPEN was sent and no request since. */
  private freshOpen = false;
  /** Its present wish, in nodes; it may prune larger trees. */
  private treeBudget = MAX_NODES;
  /** The arithmetic of the link's verifier; "" if unknown. */
  private offered = "";
  /** Between streamed tokens. */
  private readonly gaps: RoundTimer;

  constructor(private readonly setup: VerifierSetup) {
    const { maxContext, timer } = setup;
    this.context = maxContext;
    this.gaps = new RoundTimer(timer.floor, timer.ceiling, timer.first);
  }

  /** A request may be sent. */
  get canAsk(): boolean {
    return this.linked && !this.refused && !this.inFlight && this.retryAt === null;
  }

  /** The target streams: its next token is awaited. */
  get streams(): boolean {
    return this.inFlight?.arm === "stream";
  }

  /** The arithmetic that the link should look for. */
  get wanted(): Action[] {
    return this.pinned ? [{ type: "Pin", arithmetic: this.pinned }] : [];
  }

  /** Most nodes of the next tree. */
  get nodeLimit(): number {
    return Math.min(this.maxNodes, this.treeBudget);
  }

  // --- the link ---

  /**
   * Take a new link. Returns whether its verifier supports the answer's constraint. One that does not would ignore it, so it
   * is not asked.
   */
  linkUp(welcome: Welcome, now: number): boolean {
    this.offered = welcome.arithmetic;
    this.linked = true;
    this.heard = now;
    this.maxNodes = Math.min(welcome.maxNodes, MAX_NODES);
    this.treeBudget = welcome.treeBudget || MAX_NODES;
    this.context = welcome.maxContext;
    this.refused = false;
    this.complaint = "";
    const { constraint } = this.setup;
    if (!constraint || !(constraint.needs & ~welcome.constraints)) return true;
    this.connectBy = null;
    this.refuseForGood("this verifier does not support the answer's constraint; update it, or ask without one");
    return false;
  }

  /** Handle a lost link. */
  linkDown(): void {
    this.linked = false;
    this.inFlight = this.retryAt = null;
  }

  /** Pin the arithmetic, as the link's verifier has written some of the answer. */
  pin(): Action[] {
    if (this.pinned || !this.offered) return [];
    this.pinned = this.offered;
    return this.wanted;
  }

  // --- requests ---

  /** Forget every request and wait. */
  forgetRequest(): void {
    this.inFlight = this.retryAt = this.connectBy = null;
  }

  /** Return OPEN with everything committed; the drafter holds the first `rowsHeld` feature rows. */
  open(committed: readonly number[], rowsHeld: number): Send {
    this.freshOpen = true;
    const { stream, sessionId: session, sampling, constraint } = this.setup;
    const featuresHave = Math.min(rowsHeld, committed.length - 1);
    const [tokens, { seq }] = [packIds(committed), this];
    const message = { type: "Open" as const, stream, session, seq, tokens, featuresHave, sampling };
    return { type: "Send", message: constraint ? { ...message, constraint } : message };
  }

  /** VERIFY `tree` below the first `base` tokens. */
  verify(arm: Arm | null, tree: TokenTree, base: number, now: number, scores: readonly number[] = []): Send {
    this.start(arm, tree, now, scores);
    const [{ stream }, { seq }] = [this.setup, this];
    return { type: "Send", message: { type: "Verify", stream, seq, baseLen: base, ...packTree(tree) } };
  }

  /** GENERATE at most `limit` tokens after the first `base`. */
  generate(base: number, limit: number, now: number): Send {
    this.start("stream", TokenTree.EMPTY, now, []);
    const [{ stream }, { seq }] = [this.setup, this];
    return { type: "Send", message: { type: "Generate", stream, seq, baseLen: base, maxNew: limit, rows: true } };
  }

  /** CANCEL a stream, which would continue otherwise. */
  cancel(): Send[] {
    return this.streams && this.linked
      ? [{ type: "Send", message: { type: "Cancel", stream: this.setup.stream } }]
      : [];
  }

  /**
   * Settle a verdict when `base` tokens are committed. null: it is stale, as its request was cancelled. A GENERATE stays in
   * flight, as its next token is awaited.
   */
  settle(verdict: Verdict, base: number, now: number): Settled | null {
    const request = this.inFlight;
    if (!request || verdict.seq !== request.seq || verdict.baseLen !== base) return null;
    const { arm, tree, scores, afterOpen, clock } = request;
    const [streams, timed] = [arm === "stream", verdict.engineUs > 0];
    const sameStep = (clock === "first" || clock === "running") && !timed;
    if (!afterOpen && !sameStep) (streams ? this.gaps : this.setup.timer).add(now - request.sent);
    this.inFlight = streams ? this.awaitingMore(request, timed, now) : null;
    this.complaint = "";
    this.treeBudget = verdict.treeBudget || this.treeBudget;
    const accepted = [...verdict.accepted];
    const path = accepted.filter(node => node < tree.size).map(node => tree.tokens[node]);
    return {
      ...{ arm, tree, scores, afterOpen, sameStep, accepted },
      tokens: [...path, verdict.bonus],
      wait: now - request.sent,
      engine: verdict.engineUs / 1e6,
      ended: verdict.finish !== FINISH_NONE,
      late: now >= request.due,
      askedFor: clock === "silent" || (clock === "first" && sameStep),
    };
  }

  /** Return the stream after one more token; `timed`: it carried its step's time. */
  private awaitingMore(request: InFlight, timed: boolean, now: number): InFlight {
    const begun = request.clock !== "silent";
    const clock = timed ? (begun ? "running" : "first") : begun ? request.clock : "untimed";
    return { ...request, sent: now, due: now + this.gaps.timeout(), afterOpen: false, clock };
  }

  private start(arm: Arm | null, tree: TokenTree, sent: number, scores: readonly number[]): void {
    this.seq++;
    const afterOpen = this.freshOpen;
    this.freshOpen = false;
    const wait = afterOpen
      ? Math.max(this.setup.timer.timeout(), this.setup.patience.open)
      : this.setup.timer.timeout();
    this.inFlight = { seq: this.seq, arm, tree, sent, due: sent + wait, afterOpen, scores, clock: "silent" };
  }

  // --- refusals ---

  /** Handle an error: a refusal of the last request, or the verifier's end. */
  refuse(error: WireErrorMessage, now: number): Refusal {
    // requests in flight are still answered; then the link comes up elsewhere
    if (error.code === ERR_GOING_AWAY && error.stream === -1) return "ignore";
    if (error.code === ERR_UNKNOWN) return this.resync(now);
    if (error.code === ERR_TOO_LONG) return "full";
    if (error.code === ERR_MALFORMED || error.code === ERR_BOUNDS) {
      this.refuseForGood(error.text);
      return "fatal";
    }
    const advised = error.code === ERR_BUSY || error.code === ERR_GOING_AWAY;
    this.complaint = error.text;
    this.inFlight = null;
    this.retryAt = now + (advised ? Math.max(SHORTEST_RETRY, error.retryAfterMs / 1000) : RETRY_SECONDS);
    return "retry";
  }

  /** Handle a verifier that has another text, or none. */
  resync(now: number): Refusal {
    if (!this.inFlight) return "ignore"; // the OPEN before was refused
    if (!this.inFlight.afterOpen) return "reopen";
    this.inFlight = null;
    this.retryAt = now + RETRY_SECONDS; // OPEN has just not helped
    return "retry";
  }

  private refuseForGood(why: string): void {
    this.refused = true;
    this.complaint = why;
    this.inFlight = this.retryAt = null;
  }

  // --- deadlines ---

  /**
   * Return all deadlines, the most important first. offline: the reply is overdue already. giveUpAt: end of the wait for the
   * target's return.
   */
  deadlines(offline: boolean, giveUpAt: number | null): [Deadline, number][] {
    const moments: [Deadline, number | null][] = [
      ["connect", this.connectBy],
      ["give up", giveUpAt],
      ["retry", this.retryAt],
    ];
    if (this.inFlight) {
      const { due } = this.inFlight;
      moments.push(["reply", offline ? null : due], ["renew", Math.max(this.heard, due) + this.setup.patience.silence]);
    }
    return moments.filter((entry): entry is [Deadline, number] => entry[1] !== null);
  }
}
