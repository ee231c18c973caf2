/** Carries out a session's actions, and reports events to it with their times. */

import { clock } from "../clock.js";
import { type Draft, NO_DRAFT, type TreeShape } from "../drafting/drafter.js";
import type { AnswerStats, Event } from "../events.js";
import type { Link, LinkEvent } from "../link/websocket.js";
import type { Decode } from "../protocol/text.js";
import { TokenTree } from "../protocol/tree.js";
import { concerns } from "../protocol/wire.js";
import type { Action, Compare, DraftChain, DraftTree, ReadText, WriteToken } from "../session/actions.js";
import type { Session } from "../session/session.js";
import { MOST_TOKENS } from "../speed/arms.js";
import { Display } from "./display.js";
import type { DrafterThread, Timed } from "./drafterThread.js";
import type { Inbox } from "./inbox.js";
import { HeldToken } from "./readingPacer.js";
import { StatsRecorder } from "./stats.js";
import type { UnderstudyText, UnderstudyThread } from "./understudyThread.js";

/** The drafter's engine failed; the message is one line. Events have shown the text verified so far. */
export class DrafterFailed extends Error {}

/** Jobs carry the session that made them: it may have been cancelled since. asked: seconds since the request. */
export type InboxEvent =
  | LinkEvent
  | { type: "drafted"; session: Session; draft: Draft; version: number; asked: number; working: number }
  | { type: "written"; session: Session; token: number; probability: number; version: number; asked: number }
  | { type: "compared"; session: Session; draft: Draft; base: number; working: number }
  | { type: "read"; session: Session; agreed: number | null }
  | { type: "unusable"; session: Session; why: string }
  | { type: "failed"; session: Session; error: unknown }
  | { type: "wish"; wish: "pause" | "proceed" | "cancel" };

/** A look into a growing answer: a tree that was sent, and its verdict. */
export type Sight =
  | { type: "tree"; tree: TokenTree; scores: readonly number[]; base: number }
  | { type: "verdict"; path: readonly number[]; bonus: number; base: number };

let answers = 0;

/** An answer in progress. why: why there is no connection, or "". watch: receives sights. */
export class Answer {
  private readonly recorder: StatsRecorder;
  private readonly display: Display;
  private readonly held: HeldToken;
  private readonly id = `${++answers}:`;
  private down: string;

  constructor(
    readonly session: Session,
    private readonly link: Link | null,
    private readonly drafter: DrafterThread,
    private readonly understudy: UnderstudyThread | null,
    private readonly inbox: Inbox<InboxEvent>,
    decode: Decode,
    readonly stops: readonly string[],
    why = "",
    private readonly watch?: (sight: Sight) => void,
  ) {
    this.down = why;
    this.recorder = new StatsRecorder(link);
    this.display = new Display(session, this.recorder, decode, stops, why);
    this.held = new HeldToken(session.policy.offlineRate);
  }

  /** Figures so far. */
  get stats(): AnswerStats {
    return this.recorder.now(this.session.stats, this.session.text.length);
  }

  /** Yield events until the answer has ended, the last one `finished`; then throw DrafterFailed if the engine has failed. */
  async *run(): AsyncGenerator<Event, void, void> {
    const { session, link } = this;
    let failure: DrafterFailed | null = null;
    this.display.tell("connecting", link ? link.url : "no server given");
    this.do(session.start(clock()));
    if (link?.welcome) this.do(session.linkUp(link.welcome, clock()));
    for (;;) {
      if (failure) {
        this.display.failed(failure.message);
        this.do(session.cancel("failed"));
      }
      yield* this.display.take();
      if (failure) throw failure;
      if (session.finished) return;
      try {
        await this.nextEvent();
      } catch (error) {
        if (!(error instanceof DrafterFailed)) throw error;
        failure = error;
      }
    }
  }

  /** Cancel unfinished work; any verifier may write the next answer. */
  close(): void {
    this.link?.pin(""); // first, as sending below may fail
    this.do(this.session.cancel());
  }

  /** Wait for the link, the drafter or the clock, whichever is first, and feed the session. */
  private async nextEvent(): Promise<void> {
    const moments = [this.session.wakeAt(), this.held.wakeAt()].filter(moment => moment !== null);
    const event = await this.inbox.next(moments.length ? Math.min(...moments) - clock() : null);
    if (event) this.feed(event);
    this.do(this.session.tick(clock()));
    this.release();
  }

  private feed(event: InboxEvent): void {
    const { session } = this;
    const now = clock();
    if ("session" in event && event.session !== session) return; // it belongs to an answer that was cancelled
    this.do(this.actionsOn(event, now));
    if (event.type === "wish" && event.wish === "proceed") this.display.proceeded();
  }

  /** Carry out the session's actions after `event`. Throws DrafterFailed. */
  private actionsOn(event: InboxEvent, now: number): Action[] {
    const { session } = this;
    switch (event.type) {
      case "drafted":
        this.recorder.drafted(event.asked);
        return session.treeReady(event.draft, event.version, now, event.working);
      case "written":
        this.recorder.drafted(event.asked);
        return session.tokenWritten(event.token, event.probability, event.version, now);
      case "compared":
        return session.treeCompared(event.draft, event.base, event.working);
      case "read":
        return session.textRead(event.agreed, now);
      case "unusable":
        return session.understudyFailed(event.why, now);
      case "up":
        this.down = "";
        return this.explained(session.linkUp(event.welcome, now, event.rtt));
      case "down":
        this.down = event.reason;
        return this.explained(session.linkDown(now, event.refused));
      case "arrived":
        if (!concerns(event.message, session.setup.stream)) return [];
        this.see(event.message);
        return this.explained(session.message(event.message, now));
      case "failed": {
        const why = event.error instanceof Error ? event.error.message : String(event.error);
        throw new DrafterFailed(`the drafter's engine failed: ${why}`, { cause: event.error });
      }
      case "wish":
        return event.wish === "cancel" ? session.cancel() : session[event.wish](now);
    }
  }

  private see(message: { type: string }): void {
    const verdict = message as Extract<LinkEvent, { type: "arrived" }>["message"];
    if (!this.watch || verdict.type !== "Verdict" || verdict.seq !== this.session.verifier.inFlight?.seq) return;
    this.watch({ type: "verdict", path: [...verdict.accepted], bonus: verdict.bonus, base: verdict.baseLen });
  }

  /** Show why the verifier does not answer, before the actions that follow from it. */
  private explained(actions: Action[]): Action[] {
    this.display.because(this.down || this.session.verifier.complaint);
    return actions;
  }

  private do(actions: readonly Action[]): void {
    this.drafter.want(this.key(this.session.job.version), this.session.offline.active);
    this.understudy?.review();
    for (const action of actions) {
      switch (action.type) {
        case "Send":
          this.link?.send(action.message);
          if (action.message.type === "Verify") this.showTree();
          break;
        case "Pin":
          this.link?.pin(action.arithmetic);
          break;
        case "DraftTree":
          this.draft(action);
          break;
        case "DraftChain":
          this.draftChain(action);
          break;
        case "WriteToken":
          this.held.hold(action, this.session.committed.length, this.session.offline.mayBeTakenBack);
          this.release();
          break;
        case "ReadText":
          this.read(action);
          break;
        case "Compare":
          if (action.arm === "chain") this.compareChain(action.prefix, action.nodes);
          else this.compare(action);
          break;
        case "DraftAhead":
          this.draftAhead();
          this.writeAhead();
          break;
        case "AddRows":
          this.drafter.addRows(action.positions, action.rows);
          this.draftAhead(); // the last job has stopped it
          break;
        case "Reconnect":
          this.link?.renew();
          break;
        case "Commit":
        case "Adopt": {
          const surplus = this.display.keep(action);
          if (surplus === null) break;
          this.do(this.session.stop(surplus));
          return;
        }
        default:
          this.display.show(action);
      }
    }
  }

  private showTree(): void {
    const request = this.session.verifier.inFlight;
    if (!request) return;
    this.watch?.({ type: "tree", tree: request.tree, scores: request.scores, base: this.session.committed.length });
  }

  /** Write the held token if its time has come; if it is no longer wanted, tell the session at once. */
  private release(): void {
    const now = clock();
    const { version } = this.session.job;
    const action = this.held.release(now, version);
    if (!action) return;
    const wanted = action.version === version;
    if (wanted && action.writer === "understudy") this.perform(action);
    else if (wanted) this.write(action);
    else this.do(this.session.tokenWritten(0, 0, action.version, now));
  }

  // --- the drafter's jobs ---

  private key(version: number): string {
    return this.id + version;
  }

  private draft({ prefix, version, ...size }: DraftTree): void {
    const { session } = this;
    const asked = clock();
    this.job(this.drafted(prefix, this.shape(size), this.key(version)), ({ result, seconds }) => {
      const [draft, waited] = [result, clock() - asked];
      this.inbox.push({ type: "drafted", session, draft, version, asked: waited, working: seconds });
    });
  }

  /** Draft a tree for comparison, unless the target falls silent: then the drafter may have to write. */
  private compare({ prefix, ...size }: Compare): void {
    const { session } = this;
    this.job(this.drafted(prefix, this.shape(size), null), ({ result, seconds }) => {
      this.inbox.push({ type: "compared", session, draft: result, base: prefix.length, working: seconds });
    });
  }

  private drafted(prefix: number[], shape: TreeShape | null, key: string | null): Promise<Timed<Draft>> {
    if (!shape) return Promise.resolve({ result: NO_DRAFT, seconds: 0 });
    return this.drafter.draft(prefix, this.session.setup.sampling, shape, key, this.session.setup.constraint);
  }

  private write({ prefix, version }: WriteToken): void {
    const { session } = this;
    const asked = clock();
    this.job(this.drafter.nextToken(prefix, session.setup.sampling, session.setup.constraint), ({ result }) => {
      this.inbox.push({ type: "written", session, ...result, version, asked: clock() - asked });
    });
  }

  /** Draft below the present tree, if the session wants it; any other job ends that. */
  private draftAhead(): void {
    const { session } = this;
    if (session.draftsAhead !== "drafter") return;
    const done = this.drafter.draftAhead(session.tuning.largest, this.key(session.job.version));
    this.job(done, ({ result, seconds }) => this.recorder.draftedAhead(result, seconds));
  }

  // --- the understudy's jobs ---

  private read(action: ReadText): void {
    const { session } = this;
    const cancelled = () => !session.stillReads(action);
    this.ofUnderstudy(this.understudy!.agreed(this.textOf(action.prefix), action.base, cancelled), agreed => {
      this.inbox.push({ type: "read", session, agreed });
    });
  }

  /** Let the understudy write. */
  private perform({ prefix, version }: WriteToken): void {
    const { session } = this;
    const asked = clock();
    const cancelled = () => session.cancelled(version);
    this.ofUnderstudy(this.understudy!.nextToken(this.textOf(prefix), cancelled), written => {
      if (!written && !cancelled()) throw new Error("the understudy is gone");
      const { token, probability } = written ?? { token: 0, probability: 0 }; // the session ignores it
      this.inbox.push({ type: "written", session, token, probability, version, asked: clock() - asked });
    });
  }

  /** Let the understudy draft the chain that is sent. */
  private draftChain({ prefix, version, tokens }: DraftChain): void {
    const { session } = this;
    const asked = clock();
    this.chain(
      prefix,
      tokens,
      () => session.cancelled(version),
      (draft, seconds) => {
        this.inbox.push({ type: "drafted", session, draft, version, asked: clock() - asked, working: seconds });
      },
    );
  }

  /** Draft a chain for comparison, unless the target falls silent: then the understudy has to write. */
  private compareChain(prefix: number[], tokens: number): void {
    const { session } = this;
    let silent = false; // or was it, meanwhile
    const cancelled = () => {
      silent ||= session.offline.active;
      return silent || session.finished !== null;
    };
    this.chain(prefix, tokens, cancelled, (draft, seconds) => {
      this.inbox.push({ type: "compared", session, draft, base: prefix.length, working: seconds });
    });
  }

  private chain(
    prefix: number[],
    count: number,
    cancelled: () => boolean,
    done: (draft: Draft, seconds: number) => void,
  ): void {
    this.ofUnderstudy(this.understudy!.draft(this.textOf(prefix), count, cancelled), chain => {
      if (!chain && !cancelled()) throw new Error("the understudy is gone");
      const { tokens, scores, steps, seconds } = chain ?? { tokens: [], scores: [], steps: 0, seconds: 0 };
      done({ ...NO_DRAFT, tree: TokenTree.chain(tokens), scores, steps }, seconds);
    });
  }

  /** Draft after the present chain, if the session wants it, until its version changes. */
  private writeAhead(): void {
    const { session } = this;
    const { version } = session.job;
    if (session.draftsAhead !== "understudy") return;
    this.understudy!.draftAhead(MOST_TOKENS, () => session.cancelled(version)).catch(() => {}); // the next chain reports it
  }

  private textOf(text: readonly number[]): UnderstudyText {
    const { prompt, sampling, constraint } = this.session.setup;
    return { text, promptLength: prompt.length, sampling, constraint };
  }

  private ofUnderstudy<T>(job: Promise<T>, done: (result: T) => void): void {
    job.then(done).catch(error => {
      const why = error instanceof Error ? error.message : String(error);
      this.inbox.push({ type: "unusable", session: this.session, why });
    });
  }

  private job<T>(job: Promise<T>, done: (result: T) => void): void {
    job.then(done).catch(error => this.inbox.push({ type: "failed", session: this.session, error }));
  }

  /** Return the shape of a requested tree; null if there is no room. */
  private shape({ nodes, depth, gain }: Pick<DraftTree, "nodes" | "depth" | "gain">): TreeShape | null {
    const { largest } = this.session.tuning;
    if (depth < 1) return null;
    return { ...largest, nodes: Math.max(1, nodes), depth, gain: gain ?? largest.gain };
  }
}
