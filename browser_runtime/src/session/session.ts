/**
 * One answer as a pure state machine: events in, actions out. No I/O, no threads, no clock.
 *
 * The whole idea: `committed` tokens were drawn by the target (or are the prompt); `provisional` tokens after them were
 * written offline. The user sees both. A verdict commits the accepted path and the token that the target drew after it.
 * Provisional text that agrees with these becomes verified; at the first difference the rest is rolled back (`repair`) or
 * stays as it is (`keep`). While provisional tokens remain, the next VERIFY is the chain of them instead of a drafted tree:
 * so late verdicts, catching up after an outage and the normal round follow one rule. Three objects hold the state, and none
 * of them knows the session: `VerifierState` the link, the request in flight and refusals; `OfflineWriter` who writes while
 * the target is silent; `JobSlot` the one job of drafter or understudy. Each returns values; `Session` turns them into
 * actions, and `Session.next` alone decides what to do.
 *
 * Times are seconds on any monotonic clock, passed in with each event.
 */

import { type Draft, NO_DRAFT } from "../drafting/drafter.js";
import type { FinishReason } from "../protocol/ending.js";
import { computesIn, type ServerMessage, type Welcome } from "../protocol/messages.js";
import type { RowShape } from "../protocol/rows.js";
import { TokenTree } from "../protocol/tree.js";
import type { Arm } from "../speed/arms.js";
import type { Action, ReadText, Send } from "./actions.js";
import type { RowsSeen } from "./featureRows.js";
import { JobSlot } from "./job.js";
import { OfflineWriter, REFUSED_SECONDS } from "./offline.js";
import { type Policy, targetFirst } from "./policy.js";
import type { Settled } from "./settled.js";
import type { PauseReason, State, Writer } from "./states.js";
import { SessionStats } from "./stats.js";
import { Transcript } from "./transcript.js";
import type { Tuning } from "./tuning.js";
import { type Deadline, type Refusal, type VerifierSetup, VerifierState } from "./verifier.js";

/**
 * prompt: token ids of the conversation so far. maxNew: most committed tokens. rowShape: the drafter's. rowsSeen: the
 * prompt's rows that the drafter holds. understudy, drafter: there is one. sentenceEnds: tokens that end a sentence or a
 * line. obeys: the device's own writers can obey the constraint; otherwise nothing is written offline.
 */
export interface SessionSetup extends VerifierSetup {
  prompt: readonly number[];
  eosIds: ReadonlySet<number>;
  maxNew: number;
  rowShape: RowShape;
  rowsSeen: RowsSeen;
  policy: Policy;
  tuning: Tuning;
  understudy: boolean;
  sentenceEnds: ReadonlySet<number>;
  obeys?: boolean;
  drafter?: boolean;
}

/** An answer. Feed events by calling the methods; each returns the actions to carry out, in order. */
export class Session {
  readonly policy: Policy;
  readonly tuning: Tuning;
  readonly stats = new SessionStats();
  readonly text: Transcript;
  readonly verifier: VerifierState;
  readonly offline: OfflineWriter;
  readonly job = new JobSlot();
  arm: Arm = "tree";
  finished: FinishReason | null = null;

  constructor(readonly setup: SessionSetup) {
    const { prompt, policy, patience, obeys = true, drafter = true } = setup;
    this.policy = policy;
    this.tuning = setup.tuning;
    this.text = new Transcript([...prompt], prompt.length, this.ownLimit, setup.eosIds, this.stats);
    this.verifier = new VerifierState(setup);
    const { understudy, sentenceEnds } = setup;
    this.offline = new OfflineWriter(policy, understudy, sentenceEnds, obeys, patience.offline, drafter);
  }

  get state(): State {
    if (this.finished) return "finished";
    if (this.offline.active) return this.offline.muted ? "waiting for the link" : "writing alone";
    if (this.verifier.inFlight) return this.verifier.streams ? "streaming" : "verifying";
    return "drafting";
  }

  get committed(): number[] {
    return this.text.committed;
  }

  get provisional(): number[] {
    return this.text.provisional;
  }

  // --- what jobs ask ---

  /** Whether the result of a job that carries `version` is no longer wanted. */
  cancelled(version: number): boolean {
    return this.finished !== null || version !== this.job.version;
  }

  /** Whether the understudy should still read this: a writer waits for it, or it reads along. */
  stillReads(action: ReadText): boolean {
    return !this.finished && this.offline.stillReads(action);
  }

  /**
   * Who drafts ahead, below the present tree or after the chain; null if that is not worthwhile or the drafter has another
   * job.
   */
  get draftsAhead(): Writer | null {
    const request = this.verifier.inFlight;
    if (!request?.arm || !request.tree.size || this.provisional.length || this.job.busy) return null;
    if (!this.tuning.draftsAhead(request.arm)) return null;
    return request.arm === "chain" ? "understudy" : "drafter";
  }

  // --- events ---

  /** Begin. Drafting starts at once, so that the first tree is ready when the link is. */
  start(now: number): Action[] {
    this.verifier.heard = now;
    if (targetFirst(this.policy)) this.arm = this.tuning.begin();
    if (this.text.over) return this.complete();
    if (this.offline.deviceOnly) return this.goOffline(now, now);
    if (!this.verifier.linked) this.verifier.connectBy = now + this.setup.patience.connect;
    return [...this.verifier.wanted, ...this.offline.readAlong(this.committed), ...this.next(now)];
  }

  /**
   * Continue on a new link whose hashes agree: OPEN with everything committed. A verifier with another arithmetic than the
   * last one is not asked, as if there were none.
   *
   * rtt: seconds of the handshake, if it happened during this answer.
   */
  linkUp(welcome: Welcome, now: number, rtt: number | null = null): Action[] {
    if (!computesIn(welcome, this.verifier.pinned)) return [...this.verifier.wanted, ...this.linkDown(now, true)];
    const actions: Action[] = [];
    if (rtt !== null) {
      this.tuning.controller.linked(welcome, rtt);
      if (targetFirst(this.policy)) actions.push(...this.setArm(this.tuning.begin(), now));
    }
    const supported = this.verifier.linkUp(welcome, now);
    this.text.limit = Math.min(this.ownLimit, this.verifier.context);
    this.offline.accepted();
    return [...actions, ...(supported ? this.open(now) : this.goOffline(now, now))];
  }

  /** Handle a lost link. refused: a verifier was there and does not accept this device; another one may. */
  linkDown(now: number, refused = false): Action[] {
    this.verifier.linkDown();
    if (refused) this.offline.expectReturn(REFUSED_SECONDS, now);
    if (this.finished || this.verifier.connectBy !== null) return []; // before a first link, that decides
    return this.goOffline(now, now);
  }

  /** Handle a message for this stream. */
  message(message: ServerMessage, now: number): Action[] {
    this.verifier.heard = now;
    if (this.finished) return [];
    switch (message.type) {
      case "Verdict": {
        const settled = this.verifier.settle(message, this.committed.length, now);
        return settled ? this.settled(settled, message.rows, now) : [];
      }
      case "Features":
        return this.addRows(message.start, message.rows);
      case "Resync":
        return this.follow(this.verifier.resync(now), now);
      case "Error":
        return this.follow(this.verifier.refuse(message, now), now);
      default:
        return [];
    }
  }

  /** Take a tree (the answer to DraftTree) or a chain (to DraftChain), drafted in `seconds`. */
  treeReady(draft: Draft, version: number, now: number, seconds = 0): Action[] {
    const current = version === this.job.version;
    const arm = this.job.done() === "understudy" ? "chain" : "tree";
    this.tuning.drafted(arm, draft, seconds, current);
    this.stats.drafted(arm, draft);
    if (current) this.job.ready = [arm, this.tuning.worthSending(arm, draft)];
    return this.next(now);
  }

  /** Take what was drafted below the first `base` tokens, in `seconds` (the answer to Compare). */
  treeCompared(draft: Draft, base: number, seconds: number): Action[] {
    this.tuning.compared(draft, base, seconds);
    return [];
  }

  /** Take an offline token and its probability `confidence` (the answer to WriteToken). */
  tokenWritten(token: number, confidence: number, version: number, now: number): Action[] {
    const writer = this.job.done() ?? "drafter";
    const actions: Action[] = [];
    if (!this.cancelled(version) && this.offline.mayWrite(this.provisional.length)) {
      this.text.provide(token, writer);
      this.job.cancel();
      actions.push({ type: "Provide", token, writer });
      if (!this.offline.wrote(token, confidence, writer)) actions.push(this.pauseFor("unsure"));
    }
    return [...actions, ...this.next(now)];
  }

  /**
   * Note that the understudy has read its text; see `ReadText` for `agreed`. If the target is still silent, tokens that it
   * would not have written are withdrawn.
   */
  textRead(agreed: number | null, now: number): Action[] {
    if (this.finished) return [];
    const found = this.offline.hasRead(agreed, this.committed, this.provisional);
    if (found === null) return [...this.offline.readAlong(this.committed), ...this.next(now)];
    this.job.cancel();
    const actions = typeof found === "number" ? this.text.withdrawProvisional(found) : [found];
    return [...actions, ...this.next(now)];
  }

  /** Note that the understudy is unusable: `why`, in words for people. The drafter writes on. */
  understudyFailed(why: string, now: number): Action[] {
    this.offline.understudyFailed();
    this.tuning.understudyFailed();
    if (this.job.busy === "understudy") this.job.done();
    const shown = this.offline.active && !this.finished;
    return [...(shown ? [{ type: "HandOver", writer: "drafter", why } as const] : []), ...this.next(now)];
  }

  /** Set whether the device's writers can obey the answer's constraint. */
  setObeys(obeys: boolean, now: number): Action[] {
    if (this.finished || this.offline.supported === obeys) return [];
    this.offline.setSupported(obeys);
    this.job.cancel();
    return this.next(now);
  }

  /** When to call `tick`, or null. */
  wakeAt(): number | null {
    const moments = this.deadlines().map(([, moment]) => moment);
    return moments.length ? Math.min(...moments) : null;
  }

  /** Time passed: act on the first deadline that has passed. */
  tick(now: number): Action[] {
    const [deadline, due] = this.deadlines().find(([, moment]) => now >= moment) ?? [null, now];
    switch (deadline) {
      case "connect":
        this.verifier.connectBy = null;
        return this.goOffline(due, now);
      case "give up":
        return this.unanswered();
      case "retry":
        return this.open(now);
      case "reply":
        return this.goOffline(due, now);
      case "renew":
        this.verifier.heard = now;
        return [{ type: "Reconnect" }];
      case null:
        return [];
    }
  }

  /** Switch to trees or chains, or let the target stream. */
  setArm(arm: Arm, now: number): Action[] {
    if (arm === this.arm || this.finished) return [];
    this.arm = arm;
    this.job.discard();
    // a stream ends by CANCEL; OPEN tells how much of it arrived
    return this.verifier.streams ? [...this.verifier.cancel(), ...this.open(now)] : this.next(now);
  }

  /** Stop writing offline until `proceed`: the battery is low, or the user asked for it. */
  pause(now: number): Action[] {
    if (this.finished || this.offline.paused === "asked") return [];
    return [this.pauseFor("asked"), ...this.next(now)];
  }

  /** Allow writing offline again, as the policy says. */
  proceed(now: number): Action[] {
    if (this.finished || !this.offline.paused) return [];
    this.offline.proceed();
    return this.next(now);
  }

  /** End the answer, which was cancelled or has failed. */
  cancel(reason: FinishReason = "cancelled"): Action[] {
    return this.finished ? [] : this.finish(reason);
  }

  /** End the answer at a stop string, `surplus` committed tokens ago; even if they ended the answer themselves. */
  stop(surplus: number): Action[] {
    this.text.withdraw(surplus);
    return [...this.text.withdrawProvisional(), ...this.finish("stop")];
  }

  /** Write nothing more after a stop string in the provisional text, unless it is rolled back. */
  enough(): void {
    this.text.enough = true;
  }

  // --- what to do next ---

  /**
   * Decide what to do next; nothing else does. The order: catch up with offline text; let the device write, if it writes
   * first; let the target stream; send the tree that is ready; ask for the first token, which waits for no tree; write on
   * while the target is silent; have a tree drafted.
   */
  private next(now: number): Action[] {
    if (this.finished) return [];
    const { verifier, text, job } = this;
    if (verifier.canAsk && text.provisional.length) return [this.catchUp(now), ...this.write(now)];
    if (this.offline.writesFirst) return this.write(now);
    if (verifier.canAsk && this.arm === "stream") {
      return [this.ask(verifier.generate(text.committed.length, text.limit - text.committed.length, now))];
    }
    if (verifier.canAsk && job.ready) {
      const asked = this.verify(...job.ready, now);
      return job.busy ? [asked] : [asked, { type: "DraftAhead", version: job.version }];
    }
    if (verifier.canAsk && !verifier.seq) return [this.verify("tree", NO_DRAFT, now)];
    if (this.offline.active) {
      const written = this.write(now);
      if (written.length || !verifier.canAsk) return written;
    }
    const idle = !job.busy && !job.ready && !verifier.inFlight;
    return idle && this.arm !== "stream" ? this.draft() : [];
  }

  /** Have a tree drafted, or a chain by the understudy. */
  private draft(): Action[] {
    const [nodes, { room }] = [this.verifier.nodeLimit, this.text];
    const tokens = this.tuning.chain(nodes, room, this.offline.drafts, this.setup.drafter === false);
    const version = this.job.take(tokens ? "understudy" : "drafter");
    const prefix = [...this.committed];
    if (!tokens) return [{ type: "DraftTree", prefix, version, ...this.tuning.treeSize(nodes, room) }];
    return [{ type: "DraftChain", prefix: this.offline.readToDraft(prefix), version, tokens }, ...this.compare()];
  }

  private verify(arm: Arm, draft: Draft, now: number): Send {
    this.job.ready = null;
    this.tuning.asked(arm, now);
    const tree = draft.tree.pruned(this.verifier.maxNodes, this.text.room); // it may be older than the verifier's limits
    return this.ask(this.verifier.verify(arm, tree, this.committed.length, now, draft.scores));
  }

  /** Have the provisional text verified. */
  private catchUp(now: number): Send {
    const { verifier, committed } = this;
    const levels = Math.max(0, Math.min(verifier.maxNodes, verifier.context - committed.length));
    const chain = TokenTree.chain(this.provisional.slice(0, levels));
    return this.ask(verifier.verify(null, chain, committed.length, now));
  }

  private ask(request: Send): Send {
    this.stats.calls++;
    return request;
  }

  /** Request one more provisional token, if one may be written and the answer is not full. */
  private write(now: number): Action[] {
    const { offline, text, job } = this;
    if (text.full || !offline.mayWrite(text.provisional.length)) return offline.active ? this.wait(now) : [];
    const reading = offline.readToWrite(text.committed, text.provisional);
    const writer = offline.nextWriter();
    if (writer === "limit") return [this.pauseFor(writer), ...this.wait(now)];
    if (writer === null || job.busy) return reading;
    const prefix = [...text.committed, ...text.provisional];
    const token = { type: "WriteToken", prefix, version: job.take(writer), writer } as const;
    return [...reading, ...offline.handOver(writer), token];
  }

  /** Offline writing has stopped: wait for the target, unless it refused the answer permanently. */
  private wait(now: number): Action[] {
    const refused = this.verifier.refused && this.offline.paused !== "asked";
    return refused || !this.offline.wait(now) ? this.unanswered() : [];
  }

  private deadlines(): [Deadline, number][] {
    return this.finished ? [] : this.verifier.deadlines(this.offline.active, this.offline.giveUpAt);
  }

  // --- what the verifier says ---

  /** OPEN with everything committed; forget whatever was in progress. */
  private open(now: number): Action[] {
    this.verifier.forgetRequest();
    const actions = this.policy.onReturn === "keep" ? this.adopt() : [];
    const whole = this.text.ended || this.committed.length >= this.ownLimit;
    if (this.text.over) return [...actions, ...(whole ? this.complete() : this.noRoom())];
    this.stats.opens++;
    return [...actions, this.verifier.open(this.committed, this.setup.rowsSeen.leading()), ...this.next(now)];
  }

  /** Commit the accepted path and the token after it, measure, and choose how to continue. */
  private settled(settled: Settled, rows: Uint8Array, now: number): Action[] {
    const { text, tuning, stats } = this;
    const base = this.committed.length;
    tuning.answered(settled, now);
    const fresh = text.within(settled.tokens);
    stats.settled(settled, fresh.length, text.provisional.length > 0);
    const same = text.agreeing(fresh);
    const keep = this.policy.onReturn === "keep" && same < Math.min(fresh.length, text.provisional.length);
    const endsAt = base + settled.accepted.length;
    // its rows end with that of the last accepted token
    const start = endsAt - Math.floor(rows.length / this.setup.rowShape.bytes);
    const actions = this.addRows(start, rows, Math.max(0, (keep ? base + same : endsAt) - start));
    actions.push(...this.commit(keep ? fresh.slice(0, same) : fresh), ...this.resume());
    if (keep) return [...actions, ...this.open(now), ...this.choose(now)];
    if (text.over || settled.ended) return [...actions, ...this.complete()];
    if (targetFirst(this.policy) && this.verifier.inFlight) actions.push(...this.compare()); // a stream continues
    return [...actions, ...this.choose(now), ...this.next(now)];
  }

  /** Beside a stream or chains, now and then, have a tree or a chain drafted that is not sent. */
  private compare(): Action[] {
    const compared = this.tuning.comparison(this.offline.drafts);
    return compared ? [{ type: "Compare", prefix: [...this.committed], ...compared }] : [];
  }

  /** Choose the arm from here on. */
  private choose(now: number): Action[] {
    if (this.finished || !targetFirst(this.policy)) return [];
    return this.setArm(this.tuning.choose(this.offline.drafts), now);
  }

  /** Take rows of positions `start` and on; of a verdict's, `limit` belong to our text. */
  private addRows(start: number, data: Uint8Array, limit?: number): Action[] {
    return [...this.setup.rowsSeen.add(start, data, this.setup.rowShape, this.setup.maxContext, limit)];
  }

  private commit(fresh: number[]): Action[] {
    this.job.discard();
    const actions = [...(fresh.length ? this.verifier.pin() : []), ...this.text.commit(fresh)];
    this.tuning.committed(this.committed);
    return [...actions, ...this.offline.readAlong(this.committed)];
  }

  /** Make provisional text part of the answer as it is. */
  private adopt(): Action[] {
    const tokens = this.text.adopt();
    if (!tokens.length) return [];
    this.job.cancel();
    return [{ type: "Adopt", tokens }, ...this.resume()];
  }

  /** Carry out the consequence of a refusal. */
  private follow(refusal: Refusal, now: number): Action[] {
    switch (refusal) {
      case "ignore":
        return [];
      case "reopen":
        return this.open(now);
      case "retry":
      case "fatal": // nothing is requested again
        return this.goOffline(now, now);
      case "full":
        return this.noRoom();
    }
  }

  // --- the target is silent, and the end ---

  /** Continue without the silent target. */
  private goOffline(due: number, now: number): Action[] {
    if (this.offline.active) return this.next(now);
    this.offline.start();
    this.job.discard();
    this.stats.stalls++;
    return [{ type: "Stall", deadline: due }, ...this.next(now)];
  }

  /** Report that the target answers, if it was silent. */
  private resume(): Action[] {
    if (!this.offline.active) return [];
    this.offline.stop();
    return [{ type: "Resume" }];
  }

  /** Write nothing more, until the target answers or `proceed` is called. */
  private pauseFor(reason: PauseReason): Action {
    this.offline.pause(reason);
    this.stats.pauses++;
    this.job.cancel();
    return { type: "Pause", reason };
  }

  /** Handle a full context: offline text stays as it is. A verifier that has no room for any of the answer refuses it. */
  private noRoom(): Action[] {
    const { context } = this.verifier;
    this.verifier.complaint = `the verifier's context holds ${context} tokens; this conversation needs more`;
    return this.finish(this.text.length ? "length" : "refused");
  }

  /** End the answer, which the target has written completely. */
  private complete(): Action[] {
    return [...this.text.withdrawProvisional(), ...this.finish(this.text.ended ? "stop" : "length")];
  }

  /** End the answer without the target; offline text stays. */
  private unanswered(): Action[] {
    return this.finish(this.verifier.refused ? "refused" : (this.text.endAlone ?? "unreachable"));
  }

  /** End the answer as it is. */
  private finish(reason: FinishReason): Action[] {
    this.finished = reason;
    return [...this.verifier.cancel(), { type: "Done", reason }];
  }

  /** Most tokens of the text, whatever the verifier's context. */
  private get ownLimit(): number {
    return Math.min(this.setup.prompt.length + this.setup.maxNew, this.setup.maxContext);
  }
}
