/**
 * One answer as a pure state machine: events in, actions out. No I/O, no threads, no clock.
 *
 * `committed` tokens were drawn by the target (or are the prompt); `provisional` tokens behind them were written without it,
 * by the drafter or the understudy. The text a user sees is committed + provisional.
 *
 * One rule covers late verdicts, catching up after an outage and the normal round. A verdict commits the accepted path and
 * the bonus token. If these agree with the provisional tokens, the agreeing part becomes verified; at the first difference
 * the provisional rest is rolled back (`repair`) or stays as it is (`keep`). While provisional tokens remain, the next
 * VERIFY is the chain of them instead of a drafted tree.
 *
 * When the target falls silent the drafter writes at once, and the understudy, where there is one, begins to read the text.
 * Once it has read it, it takes back what it would not have written itself, and writes on.
 *
 * Times are seconds on any monotonic clock, handed in with each event.
 */

import type { Draft } from "../drafting/drafter.js";
import type { Constraint } from "../protocol/constraint.js";
import { computesIn, type ServerMessage, type Welcome } from "../protocol/messages.js";
import type { RowShape } from "../protocol/rows.js";
import type { Sampling } from "../protocol/sampling.js";
import { MAX_NODES } from "../protocol/tree.js";
import { Tuning } from "../speed/tuning.js";
import type { Action, ReadText, Send } from "./actions.js";
import { AnswerArithmetic } from "./arithmetic.js";
import { type Deadline, Deadlines } from "./deadlines.js";
import { RowsSeen } from "./featureRows.js";
import { Handover } from "./handover.js";
import { type Mode, type Policy, policy, targetFirst } from "./policy.js";
import { askAnew, disobeyed, expectReturn, noRoom, REFUSED_SECONDS, takeError } from "./refusals.js";
import { type Flight, Requests } from "./requests.js";
import { Solo } from "./solo.js";
import type { FinishReason, State, Writer } from "./states.js";
import { PATIENCE, type Patience, RoundTimer } from "./timeouts.js";
import { AnswerTokens, SessionStats } from "./transcript.js";
import { adopt, takeVerdict } from "./verdicts.js";
import { work } from "./work.js";
import { pause, takeReading, takeToken } from "./writing.js";

/**
 * prompt: token ids of the conversation so far. maxNew: committed tokens at most. stream, session: as on the wire.
 * rowShape: the drafter's. rowsSeen: the prompt's rows that the drafter holds. timer: of rounds. understudy: there is one.
 * sentenceEnds: tokens that end a sentence or a line.
 */
export interface SessionSetup {
  prompt: readonly number[];
  sampling: Sampling;
  eosIds: ReadonlySet<number>;
  maxNew: number;
  maxContext: number;
  rowShape: RowShape;
  session: Uint8Array;
  stream: number;
  rowsSeen?: RowsSeen;
  patience?: Patience;
  timer?: RoundTimer;
  policy?: Policy;
  tuning?: Tuning;
  understudy?: boolean;
  /** What tokens are drawn under. */
  constraint?: Constraint;
  /** The device's own writers can be held to the constraint; where not, nothing is written alone. */
  obeys?: boolean;
  sentenceEnds?: ReadonlySet<number>;
}

/** One answer. Feed events by calling the methods; each returns the actions to carry out, in order. */
export class Session {
  readonly rowsSeen: RowsSeen;
  readonly policy: Policy;
  readonly tuning: Tuning;
  readonly stats = new SessionStats();
  readonly text: AnswerTokens;
  readonly requests: Requests;
  readonly deadlines: Deadlines;
  readonly solo: Solo;
  readonly handover: Handover;
  readonly arithmetic = new AnswerArithmetic();
  mode: Mode = "tree";
  finished: FinishReason | null = null;
  linked = false;
  /** This link's verifier will never take what it was asked. */
  refused = false;
  /** Why the verifier refused what it was asked last; "" once it has answered. */
  complaint = "";
  /** Seconds to wait for the target's return, where nothing more can be written. */
  returnWait: number;
  /** The tree to send next. */
  ready: Draft | null = null;
  /** Who has a job of ours that another would have to wait for. */
  busy: Writer | null = null;
  /** Of what the drafter is asked for: a job of another one is stale. */
  version = 0;
  /** What the verifier takes: nodes of a tree, tokens of a text; and nodes that it would like at most, now. */
  maxNodes = 64;
  context: number;
  treeBudget = MAX_NODES;
  readonly patience: Patience;

  constructor(readonly setup: SessionSetup) {
    this.rowsSeen = setup.rowsSeen ?? new RowsSeen();
    this.policy = setup.policy ?? policy();
    this.tuning = setup.tuning ?? new Tuning();
    this.patience = setup.patience ?? PATIENCE;
    const { prompt, sampling, eosIds, session, stream } = setup;
    this.text = new AnswerTokens([...prompt], prompt.length, this.ownLimit, eosIds, this.stats);
    const timer = setup.timer ?? new RoundTimer();
    this.requests = new Requests(stream, session, sampling, this.patience, timer, this.stats, setup.constraint);
    this.deadlines = new Deadlines(this.patience.silence);
    this.solo = new Solo(this.policy, setup.sentenceEnds ?? new Set());
    this.solo.obeys = setup.obeys ?? true;
    this.handover = new Handover(setup.understudy ?? false, this.policy);
    this.returnWait = this.patience.offline;
    this.context = setup.maxContext;
  }

  get state(): State {
    if (this.finished) return "finished";
    if (this.alone) return this.solo.mute ? "waiting for the link" : "writing alone";
    if (this.flight) return this.flight.tree ? "verifying" : "streaming";
    return "drafting";
  }

  /** The request whose reply is awaited. */
  get flight(): Flight | null {
    return this.requests.flight;
  }

  /** The target is silent. */
  get alone(): boolean {
    return this.solo.alone;
  }

  get committed(): number[] {
    return this.text.committed;
  }

  get provisional(): number[] {
    return this.text.provisional;
  }

  /** Whether to draft on below the tree under way: nobody has anything else to do, and it is worth it. */
  get draftsAhead(): boolean {
    const idle = (this.flight?.tree?.size ?? 0) > 0 && !this.provisional.length && !this.busy;
    return idle && this.tuning.draftsAhead(this.chainFlies);
  }

  /** The tree under way is a chain of the understudy. */
  get chainFlies(): boolean {
    return this.flight?.chain ?? false;
  }

  // --- events ---

  /** Begin. Drafting starts at once, so that the first tree is ready when the link is. */
  start(now: number): Action[] {
    this.deadlines.heard = now;
    if (targetFirst(this.policy)) this.mode = this.tuning.begin();
    if (this.text.over) return this.finish(this.text.ended ? "stop" : "length");
    if (this.policy.writer === "device-only") return this.goOnAlone(now, now);
    if (!this.linked) this.deadlines.connect = now + this.patience.connect;
    return [...this.arithmetic.wanted, ...this.handover.readAlong(this.committed), ...this.work(now)];
  }

  /**
   * The link is up and the hashes agree: OPEN with everything committed, and go on; with a verifier that computes
   * otherwise than the one before, wait as where there is none.
   *
   * rtt: seconds of the handshake, if it happened during this answer.
   */
  linkUp(welcome: Welcome, now: number, rtt: number | null = null): Action[] {
    if (!computesIn(welcome, this.arithmetic.pinned)) return [...this.arithmetic.wanted, ...this.linkDown(now, true)];
    this.arithmetic.offered = welcome.arithmetic;
    const actions: Action[] = [];
    if (rtt !== null) {
      this.tuning.linked(welcome, rtt);
      if (targetFirst(this.policy)) actions.push(...this.setMode(this.tuning.begin(), now));
    }
    this.linked = true;
    this.deadlines.heard = now;
    this.maxNodes = Math.min(welcome.maxNodes, MAX_NODES);
    this.treeBudget = welcome.treeBudget || MAX_NODES;
    this.context = welcome.maxContext;
    this.text.limit = Math.min(this.ownLimit, this.context);
    this.refused = false;
    this.complaint = "";
    this.returnWait = this.patience.offline;
    const { constraint } = this.setup;
    const obeyed = !constraint || !(constraint.needs & ~welcome.constraints);
    return [...actions, ...(obeyed ? this.open(now) : disobeyed(this, now))];
  }

  /** There is no link. refused: a verifier was there, and does not accept this device; another one may. */
  linkDown(now: number, refused = false): Action[] {
    this.linked = false;
    this.requests.flight = null;
    this.deadlines.retry = null;
    if (refused) expectReturn(this, Math.min(this.patience.offline, REFUSED_SECONDS), now);
    if (this.finished || this.deadlines.connect !== null) return []; // before a first link that deadline decides
    return this.goOnAlone(now, now);
  }

  /** A message for this stream arrived. */
  message(message: ServerMessage, now: number): Action[] {
    this.deadlines.heard = now;
    if (this.finished) return [];
    switch (message.type) {
      case "Verdict":
        return takeVerdict(this, message, now);
      case "Features":
        return this.addRows(message.start, message.rows);
      case "Resync":
        return askAnew(this, now);
      case "Error":
        return takeError(this, message, now);
      default:
        return [];
    }
  }

  /** A tree was drafted in `seconds` (the answer to DraftTree), or a chain (to DraftChain). */
  treeReady(draft: Draft, version: number, now: number, seconds = 0): Action[] {
    this.busy = null;
    this.tuning.drafted(draft, seconds, this.stats, version === this.version);
    if (version === this.version) this.ready = this.tuning.worthSending(draft);
    return this.work(now);
  }

  /** A tree below the first `base` tokens was drafted in `seconds` (the answer to Compare). */
  treeCompared(draft: Draft, base: number, seconds: number): Action[] {
    this.tuning.compared(draft, base, seconds);
    return [];
  }

  /** A token was written, to which its writer gives the probability `confidence` (the answer to WriteToken). */
  tokenWritten(token: number, confidence: number, version: number, now: number): Action[] {
    return [...takeToken(this, token, confidence, version), ...this.work(now)];
  }

  /** The understudy has read what it was asked to; see `ReadText` for `agreed`. */
  textRead(agreed: number | null, now: number): Action[] {
    return [...takeReading(this, agreed), ...this.work(now)];
  }

  /** The understudy cannot be used: `why`, in words for people. The drafter writes on. */
  understudyFailed(why: string, now: number): Action[] {
    this.handover.failed();
    this.tuning.understudyFailed();
    if (this.busy === "understudy") this.busy = null;
    const told: Action[] = this.alone && !this.finished ? [{ type: "HandOver", writer: "drafter", why }] : [];
    return [...told, ...this.work(now)];
  }

  /** From now on the device's writers can be held to the answer's constraint, or cannot. */
  setObeys(obeys: boolean, now: number): Action[] {
    if (this.finished || this.solo.obeys === obeys) return [];
    this.solo.obeys = obeys;
    this.version++; // a token under way is not wanted any more
    if (obeys && !this.solo.paused) this.deadlines.giveUp = null;
    return this.work(now);
  }

  /** Whether the understudy is still to read this: somebody waits for it, or it reads along. */
  reads(action: ReadText): boolean {
    return !this.finished && this.handover.reads(action, this.alone);
  }

  /** When `tick` wants to be called, or null. */
  wakeAt(): number | null {
    const moments = this.pending().map(([, moment]) => moment);
    return moments.length ? Math.min(...moments) : null;
  }

  /** Time passed: act on the first deadline that has passed. */
  tick(now: number): Action[] {
    const passed = this.pending().find(([, moment]) => now >= moment);
    if (!passed) return [];
    const [deadline, due] = passed;
    switch (deadline) {
      case "connect":
        this.deadlines.connect = null;
        return this.goOnAlone(due, now);
      case "giveUp":
        return this.finish(this.policy.writer === "cloud-only" || !this.solo.obeys ? "unreachable" : "unverified");
      case "retry":
        return this.open(now);
      case "reply":
        return this.goOnAlone(due, now);
      case "renew":
        this.deadlines.heard = now;
        return [{ type: "Reconnect" }];
    }
  }

  /** From now on draft trees, or let the target write alone and stream. */
  setMode(mode: Mode, now: number): Action[] {
    if (mode === this.mode || this.finished) return [];
    this.mode = mode;
    this.version++;
    this.ready = null;
    // a GENERATE ends by CANCEL; OPEN says how much of it arrived
    if (this.flight && !this.flight.tree) return [this.cancelStream(), ...this.open(now)];
    return this.work(now);
  }

  /** Write nothing alone until `proceed`: the battery is low, or the user said so. */
  pause(now: number): Action[] {
    if (this.finished || this.solo.paused === "asked") return [];
    return [pause(this, "asked"), ...this.work(now)];
  }

  /** Write alone again where the policy lets. */
  proceed(now: number): Action[] {
    if (this.finished || !this.solo.paused) return [];
    this.deadlines.giveUp = null;
    this.solo.proceed();
    return this.work(now);
  }

  cancel(): Action[] {
    return this.finished ? [] : this.finish("cancelled");
  }

  /** A stop string ended the text `surplus` committed tokens ago; even if they ended the answer themselves. */
  stop(surplus: number): Action[] {
    this.text.withdraw(surplus);
    return this.finish("stop");
  }

  /** A stop string came in the provisional text: nothing more is written, unless it is taken back. */
  enough(): void {
    this.text.enough = true;
  }

  // --- what to do next; also for `verdicts.ts` and `refusals.ts` ---

  /** Whatever can be done next: ask the target, ask for a tree, or write alone. */
  work(now: number): Action[] {
    return work(this, now);
  }

  /** OPEN with everything committed; whatever was under way is forgotten. */
  open(now: number): Action[] {
    this.requests.flight = null;
    this.deadlines.retry = null;
    this.deadlines.connect = null;
    const actions = this.policy.onReturn === "keep" ? adopt(this) : [];
    if (this.text.over) return [...actions, ...this.finish(this.text.ended ? "stop" : noRoom(this))];
    this.stats.opens++;
    return [...actions, this.requests.open(this.committed, this.rowsSeen.leading()), ...this.work(now)];
  }

  /** Take in rows of positions `start` and on; of a verdict's, `most` belong to our text. */
  addRows(start: number, data: Uint8Array, most?: number): Action[] {
    return [...this.rowsSeen.add(start, data, this.setup.rowShape, this.setup.maxContext, most)];
  }

  /** The target is silent: go on without it. */
  goOnAlone(due: number, now: number): Action[] {
    if (this.alone) return this.work(now);
    this.solo.alone = true;
    this.ready = null;
    this.version++;
    this.stats.stalls++;
    return [{ type: "Stall", deadline: due }, ...this.work(now)];
  }

  /** The answer ends. */
  finish(reason: FinishReason): Action[] {
    this.finished = reason;
    const actions: Action[] = [];
    if (this.flight && !this.flight.tree && this.linked) actions.push(this.cancelStream()); // else it would write on
    if (reason === "stop" || reason === "length") actions.push(...this.text.withdrawProvisional());
    return [...actions, { type: "Done", reason }];
  }

  /** Tokens of the text at most, whatever the verifier's context. */
  private get ownLimit(): number {
    return Math.min(this.setup.prompt.length + this.setup.maxNew, this.setup.maxContext);
  }

  private pending(): [Deadline, number][] {
    return this.finished ? [] : this.deadlines.pending(this.flight, this.alone);
  }

  private cancelStream(): Send {
    return { type: "Send", message: { type: "Cancel", stream: this.setup.stream } };
  }
}
