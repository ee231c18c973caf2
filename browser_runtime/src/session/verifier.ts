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
import type { Requested, RequestKind, Settled } from "../speed/settled.js";
import type { Action, Send } from "./actions.js";
import { type Patience, RoundTimer } from "./timeouts.js";

/** Seconds until OPEN is sent again where the verifier names no time. */
const RETRY_SECONDS = 1;
const SHORTEST_RETRY = 0.05;

/**
 * What is waited for; `Session.tick` says what happens when its time has passed. connect: the first link of an answer.
 * give up: the target's return, where nothing more can be written. retry: the moment that the verifier named when it
 * refused. reply: the reply to a request. renew: any message at all, before another connection is made.
 */
export type Deadline = "connect" | "give up" | "retry" | "reply" | "renew";

/**
 * What follows from a verifier's refusal. No text is lost by any. ignore: nothing: it says that of what was given up, or of
 * a link that ends after its replies. reopen: it knows another text, or none: OPEN again. retry: OPEN again later. fatal:
 * it would refuse that again: this link's verifier is not asked any more. full: its context is full.
 */
export type Refusal = "ignore" | "reopen" | "retry" | "fatal" | "full";

/**
 * A request whose reply is awaited. sent, due: when it was sent, and when its reply is overdue; `sent` of a stream that has
 * begun is when its last token came.
 */
export interface InFlight extends Requested {
  seq: number;
  sent: number;
  due: number;
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
  /** This link's verifier will never take what it was asked. */
  refused = false;
  /** Why the verifier refused what it was asked last, in words for people; "" once it has answered. */
  complaint = "";
  inFlight: InFlight | null = null;
  /** Of the last request. */
  seq = 0;
  maxNodes = 64;
  /** Tokens that its answers may hold. */
  context: number;
  /** The arithmetic of the answer's verified text; "" if there is none yet, or its verifier did not say. */
  pinned = "";
  /** The first link is waited for until then. */
  connectBy: number | null = null;
  /** When the link last delivered something. */
  heard = 0;
  /** Nothing is asked before. */
  private retryAt: number | null = null;
  /** An OPEN was sent and no request since. */
  private freshOpen = false;
  /** Nodes that it asks for now; larger trees it may prune. */
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

  /** The target writes alone: its next token is awaited. */
  get streams(): boolean {
    return this.inFlight?.kind === "stream";
  }

  /** The arithmetic that the link should look for. */
  get wanted(): Action[] {
    return this.pinned ? [{ type: "Pin", arithmetic: this.pinned }] : [];
  }

  /** Of the next tree: nodes at most. */
  get nodeLimit(): number {
    return Math.min(this.maxNodes, this.treeBudget);
  }

  // --- the link ---

  /**
   * The link is up. Returns whether its verifier supports the answer's constraint: one that does not would ignore it, so it
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

  /** There is no link. */
  linkDown(): void {
    this.linked = false;
    this.inFlight = this.retryAt = null;
  }

  /** The link's verifier has written some of the answer: the rest is to be computed like that. */
  pin(): Action[] {
    if (this.pinned || !this.offered) return [];
    this.pinned = this.offered;
    return this.wanted;
  }

  // --- requests ---

  /** Whatever was asked or waited for is given up. */
  forgetRequest(): void {
    this.inFlight = this.retryAt = this.connectBy = null;
  }

  /** OPEN with everything committed, of which the drafter holds the first `rowsHeld` feature rows. */
  open(committed: readonly number[], rowsHeld: number): Send {
    this.freshOpen = true;
    const { stream, sessionId: session, sampling, constraint } = this.setup;
    const featuresHave = Math.min(rowsHeld, committed.length - 1);
    const [tokens, { seq }] = [packIds(committed), this];
    const message = { type: "Open" as const, stream, session, seq, tokens, featuresHave, sampling };
    return { type: "Send", message: constraint ? { ...message, constraint } : message };
  }

  /** VERIFY `tree` below the first `base` tokens. */
  verify(kind: RequestKind, tree: TokenTree, base: number, now: number, scores: readonly number[] = []): Send {
    this.start(kind, tree, now, scores);
    const [{ stream }, { seq }] = [this.setup, this];
    return { type: "Send", message: { type: "Verify", stream, seq, baseLen: base, ...packTree(tree) } };
  }

  /** GENERATE at most `limit` tokens behind the first `base`. */
  generate(base: number, limit: number, now: number): Send {
    this.start("stream", TokenTree.EMPTY, now, []);
    const [{ stream }, { seq }] = [this.setup, this];
    return { type: "Send", message: { type: "Generate", stream, seq, baseLen: base, maxNew: limit, rows: true } };
  }

  /** CANCEL a stream, which would go on otherwise. */
  cancel(): Send[] {
    return this.streams && this.linked
      ? [{ type: "Send", message: { type: "Cancel", stream: this.setup.stream } }]
      : [];
  }

  /**
   * A verdict came, where `base` tokens are committed. null: it is stale, as its request was given up. A GENERATE stays
   * under way: its next token is awaited.
   */
  settle(verdict: Verdict, base: number, now: number): Settled | null {
    const request = this.inFlight;
    if (!request || verdict.seq !== request.seq || verdict.baseLen !== base) return null;
    const { kind, tree, scores, afterOpen, clock } = request;
    const [streams, timed] = [kind === "stream", verdict.engineUs > 0];
    const sameStep = (clock === "first" || clock === "running") && !timed;
    if (!afterOpen && !sameStep) (streams ? this.gaps : this.setup.timer).add(now - request.sent);
    this.inFlight = streams ? this.awaitingMore(request, timed, now) : null;
    this.complaint = "";
    this.treeBudget = verdict.treeBudget || this.treeBudget;
    const accepted = [...verdict.accepted];
    const path = accepted.filter(node => node < tree.size).map(node => tree.tokens[node]);
    return {
      ...{ kind, tree, scores, afterOpen, clock, sameStep, accepted },
      tokens: [...path, verdict.bonus],
      wait: now - request.sent,
      engine: verdict.engineUs / 1e6,
      queue: verdict.queueUs / 1e6,
      ended: verdict.finish !== FINISH_NONE,
      late: now >= request.due,
    };
  }

  /** The stream, after one more token; `timed`: it told its step's time. */
  private awaitingMore(request: InFlight, timed: boolean, now: number): InFlight {
    const begun = request.clock !== "silent";
    const clock = timed ? (begun ? "running" : "first") : begun ? request.clock : "untimed";
    return { ...request, sent: now, due: now + this.gaps.timeout(), afterOpen: false, clock };
  }

  private start(kind: RequestKind, tree: TokenTree, sent: number, scores: readonly number[]): void {
    this.seq++;
    const afterOpen = this.freshOpen;
    this.freshOpen = false;
    const wait = afterOpen
      ? Math.max(this.setup.timer.timeout(), this.setup.patience.open)
      : this.setup.timer.timeout();
    this.inFlight = { seq: this.seq, kind, tree, sent, due: sent + wait, afterOpen, scores, clock: "silent" };
  }

  // --- refusals ---

  /** The verifier refused what it was asked last, or says that it ends. */
  refuse(error: WireErrorMessage, now: number): Refusal {
    // running work is still answered; then the link comes up elsewhere
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

  /** The verifier knows another text, or none. */
  resync(now: number): Refusal {
    if (!this.inFlight) return "ignore"; // the OPEN before what it says that of was refused
    if (!this.inFlight.afterOpen) return "reopen";
    this.inFlight = null;
    this.retryAt = now + RETRY_SECONDS; // OPEN has just been of no help
    return "retry";
  }

  private refuseForGood(why: string): void {
    this.refused = true;
    this.complaint = why;
    this.inFlight = this.retryAt = null;
  }

  // --- deadlines ---

  /**
   * All that is waited for, the most important first. offline: the reply is overdue already. giveUpAt: when the wait for the
   * target's return ends.
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
