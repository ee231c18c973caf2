/** The public API: `EdgeRuntime` answers prompts and yields typed events (`events.ts`). */

import { Answer, type InboxEvent, type Sight } from "./answer/answer.js";
import type { DrafterThread } from "./answer/drafterThread.js";
import { Inbox } from "./answer/inbox.js";
import type { UnderstudyThread } from "./answer/understudyThread.js";
import type { Bundle } from "./bundle/bundle.js";
import type { ChatMessage } from "./bundle/chatBoundary.js";
import { type FittedMessages, fitMessages } from "./context.js";
import type { TreeShape } from "./drafting/drafter.js";
import type { AnswerStats, Event } from "./events.js";
import { checkSupported, constraintOf, type FormOptions, type Tool, toolUseOf, unsupported } from "./form.js";
import type { TokenProvider } from "./link/authorization.js";
import { Link, type LinkEvent, type MakeSocket, PROBE_STREAM, type Traffic } from "./link/websocket.js";
import type { Constraint } from "./protocol/constraint.js";
import { commonPrefix } from "./protocol/prefix.js";
import { Sampling, type SamplingOptions } from "./protocol/sampling.js";
import { PROTOCOL_VERSION, STREAMS } from "./protocol/wire.js";
import { RowsSeen } from "./session/featureRows.js";
import { type Policy, policy } from "./session/policy.js";
import { type AnswerRecord, checkRecord, recordOf, restore, settingsOf } from "./session/record.js";
import { Session } from "./session/session.js";
import { PATIENCE, type Patience, RoundTimer } from "./session/timeouts.js";
import { LARGEST, Tuning } from "./session/tuning.js";
import type { Arm } from "./speed/arms.js";
import { Controller } from "./speed/controller.js";

/** All may be left out. */
export interface Options {
  /** Who writes, and what happens to offline text. */
  policy?: Partial<Policy>;
  /** The largest trees; `shaping`: send smaller ones when they bring more tokens per second. */
  shape?: TreeShape;
  shaping?: boolean;
  patience?: Partial<Patience>;
  /** From `openUnderstudy`: writes offline once it has read the text, as the policy says. Closed with the runtime. */
  understudy?: UnderstudyThread | null;
  /** Draft on while a verdict is awaited; null: if that makes rounds shorter. */
  ahead?: boolean | null;
  /** Pinned; null: whichever is faster. */
  mode?: Arm | null;
  /** The verifier's bearer token, or a function that returns it; never sent in clear text to another machine. */
  token?: string | TokenProvider | null;
  /**
   * Seconds without an answer after which the connection is closed, 60 if left out. Nothing is sent or dialled until the
   * next answer.
   */
  idle?: number;
  /** Replaces WebSocket. */
  makeSocket?: MakeSocket;
  /** Gets the trees that are sent, and their verdicts. */
  watch?: (sight: Sight) => void;
}

/**
 * maxNewTokens, at least 1: most verified tokens. seed: the same seed gives the same text; undefined or -1 picks one.
 *
 * All writers obey the options of `FormOptions`. No grammar library runs here, so under a responseFormat or tools only the
 * target writes, and such an answer waits for the link.
 */
export interface Request extends SamplingOptions, FormOptions {
  maxNewTokens?: number;
  /** Strings that end the answer; they are not part of it. */
  stop?: string | readonly string[];
}

/**
 * A bundle, its drafter and one link; answers one prompt at a time.
 *
 * server: `host:port`, `ws://...` or `wss://...` of a verifier; null: write on this device alone. Throws LinkRefused for an
 * unusable address.
 */
export class EdgeRuntime {
  /** Why there is no connection; "" while there is one, or none is needed. */
  linkError = "";
  private readonly policy: Policy;
  private readonly patience: Patience;
  private readonly inbox = new Inbox<InboxEvent>();
  private readonly link: Link | null;
  private readonly controller: Controller;
  private readonly timer = new RoundTimer();
  private sessionId = crypto.getRandomValues(new Uint8Array(16));
  /** Committed tokens of the last answer and its conversation, and which of their rows the drafter holds. */
  private text: readonly number[] = [];
  private rowsSeen = new RowsSeen();
  /** Since the last answer began. */
  private forgotten = false;
  private stream = 0;
  private answer: Answer | null = null;
  /** Seconds between HELLO and WELCOME of the last connection. */
  private greeted: number | null = null;
  private closed = false;
  private inBackground = false;
  /** The bundle's context, or the verifier's once it was reached and if it is smaller. */
  private maxContext: number;

  /** Begins to connect at once. drafter: a result of `startDrafter`; it is closed with the runtime. */
  constructor(
    private readonly bundle: Bundle,
    private readonly drafter: DrafterThread,
    server: string | null,
    private readonly options: Options = {},
  ) {
    const wanted = policy(options.policy);
    const alone = server === null || wanted.writer === "device-only";
    this.policy = alone ? { ...wanted, writer: "device-only" } : wanted;
    this.patience = { ...PATIENCE, ...options.patience };
    this.controller = new Controller(options.mode ?? null);
    this.controller.tree.step = drafter.started?.stepSeconds || null;
    const { targetHash, drafterHash } = bundle.manifest;
    const client = "outrider-web";
    const protocol = PROTOCOL_VERSION;
    const hello = { type: "Hello" as const, protocol, targetHash, drafterHash, client, arithmetic: "" };
    const { token, makeSocket } = options;
    this.link = alone ? null : new Link(server, hello, event => this.linked(event), token, makeSocket);
    this.maxContext = bundle.manifest.maxContext;
    void this.link?.run();
    this.connect();
  }

  /** Bytes on the wire since the runtime began; null if no verifier is contacted. */
  get traffic(): Readonly<Traffic> | null {
    return this.link?.traffic ?? null;
  }

  /** Seconds of the last handshake's round trip; null before the first connection. */
  get roundTrip(): number | null {
    return this.greeted;
  }

  /** Whether there is a connection. */
  get connected(): boolean {
    return this.link?.welcome != null;
  }

  /** Figures of the answer in progress; null if there is none. */
  get stats(): AnswerStats | null {
    return this.answer?.stats ?? null;
  }

  /** The present mode: trees, chains or a stream. */
  get mode(): Arm {
    return this.answer?.session.arm ?? this.controller.arm;
  }

  /**
   * The data for `resume` to continue the answer in progress; null if there is none.
   *
   * Save it after every event that matters to you: a page that is closed in mid-answer then loses nothing.
   */
  get record(): AnswerRecord | null {
    if (!this.answer) return null;
    return recordOf(this.answer.session, this.bundle.manifest.targetHash, this.answer.stops);
  }

  /** Cancel the answer in progress, tell the verifier to forget the conversation, hang up and free the engine. */
  async close(): Promise<void> {
    this.closed = true;
    this.cancel();
    this.link?.close({ type: "Close", stream: this.stream });
    await Promise.all([this.drafter.close(), this.options.understudy?.close()]);
  }

  /**
   * Answer a question, a conversation, or token ids. The last event is `finished`; `cancel`, or leaving the loop, ends it.
   *
   * Throws RangeError at once on an argument out of bounds, on a prompt that leaves no room and on options that neither
   * device nor verifier supports; while events are read, Error if another answer is in progress, DrafterFailed after
   * `finished` if the engine failed.
   */
  generate(prompt: string | readonly ChatMessage[] | readonly number[], request: Request = {}): AsyncGenerator<Event> {
    const { maxNewTokens = 256, stop = [], seed = -1, ...others } = request;
    const sampling = new Sampling({ ...others, seed: seed === -1 || seed === -1n ? drawnSeed() : seed });
    const whole = Number.isSafeInteger(maxNewTokens) && maxNewTokens >= 1;
    if (!whole) throw new RangeError(`maxNewTokens must be a whole number, at least 1, not ${maxNewTokens}`);
    const stops = (typeof stop === "string" ? [stop] : [...stop]).filter(text => text !== "");
    const use = toolUseOf(request);
    const ids = this.ids(prompt, use?.prompt);
    const constraint = constraintOf(ids.length, this.bundle.manifest.vocabSize, request, use);
    checkSupported(constraint, this.policy);
    return this.run(stops, () => {
      this.stream = (this.stream + 1) % PROBE_STREAM;
      return this.begin(ids, sampling, maxNewTokens, constraint);
    });
  }

  /** Continue an answer that `record` described, perhaps in a page that was closed. Events as from `generate`. */
  resume(record: AnswerRecord): AsyncGenerator<Event> {
    checkRecord(record, this.bundle.manifest.targetHash);
    const { sampling, sessionId, constraint } = settingsOf(record);
    checkSupported(constraint, this.policy);
    return this.run(record.stop, () => {
      this.sessionId = sessionId;
      this.stream = record.stream % STREAMS;
      const session = this.begin(record.prompt, sampling, record.maxNew, constraint);
      restore(session, record);
      return session;
    });
  }

  /** Return token ids of a prompt, with tools that may be called. Throws RangeError if it does not fit. */
  ids(prompt: string | readonly ChatMessage[] | readonly number[], tools: readonly Tool[] = []): number[] {
    if (!prompt.length) throw new RangeError("the prompt is empty");
    const { maxContext, vocabSize } = this.bundle.manifest;
    const messages = typeof prompt === "string" ? [{ role: "user", content: prompt }] : prompt;
    const ids =
      typeof messages[0] === "number"
        ? [...(messages as number[])]
        : this.bundle.renderChat(messages as ChatMessage[], tools);
    if (!ids.length || ids.length >= maxContext) {
      throw new RangeError(`the prompt has ${ids.length} tokens; 1 to ${maxContext - 1} fit this bundle`);
    }
    if (!ids.every(id => Number.isSafeInteger(id) && id >= 0 && id < vocabSize)) {
      throw new RangeError(`token ids of the prompt must be at least 0 and below ${vocabSize}`);
    }
    return ids;
  }

  /**
   * Drop the oldest turns of a conversation until the rest fits into the context: the bundle's, or the verifier's if that is
   * smaller and was reached. reserve: tokens to keep free for the answer. Throws RangeError if the last turn alone does not
   * fit.
   */
  fitMessages<Message extends ChatMessage>(
    messages: readonly Message[],
    reserve = 256,
    tools: readonly Tool[] = [],
  ): FittedMessages<Message> {
    return fitMessages(messages, said => this.bundle.renderChat(said, tools), this.maxContext, reserve);
  }

  /** End the answer in progress: its last event comes at once, whatever it waits for. */
  cancel(): void {
    this.inbox.push({ type: "wish", wish: "cancel" });
  }

  /** Stop writing offline until `proceed`, e.g. as the battery is low. The target's text continues. */
  pause(): void {
    this.inbox.push({ type: "wish", wish: "pause" });
  }

  /** Allow writing offline again, as the policy says. */
  proceed(): void {
    this.inbox.push({ type: "wish", wish: "proceed" });
  }

  /** Hang up once no answer is in progress, as the page is hidden; dial again on `foreground` or the next answer. */
  background(): void {
    this.inBackground = true;
    this.connect();
  }

  /** Connect, as the page is visible and a question is likely. */
  foreground(): void {
    this.inBackground = false;
    this.connect();
  }

  /** Dial at once, as connections over the old network die with it; the browser's own "online" does the same. */
  networkChanged(): void {
    this.link?.networkChanged();
  }

  /** Stay connected while an answer is in progress, and for some time before and after it while the page is visible. */
  private connect(): void {
    const { idle = 60 } = this.options;
    this.link?.stay(this.answer ? Number.POSITIVE_INFINITY : this.inBackground ? 0 : idle);
  }

  /**
   * Forget all conversations so far, e.g. for another user: lookup no longer uses them.
   *
   * They are kept in memory alone, and bounded. An answer in progress continues, and is forgotten when it is over.
   */
  forget(): void {
    this.text = [];
    this.rowsSeen = new RowsSeen();
    this.forgotten = true;
    this.drafter.forget();
  }

  private linked(event: LinkEvent): void {
    if (event.type === "up") {
      this.linkError = "";
      this.greeted = event.rtt;
      this.maxContext = Math.min(this.bundle.manifest.maxContext, event.welcome.maxContext);
    } else if (event.type === "down") {
      this.linkError = event.reason;
    }
    this.inbox.push(event);
  }

  private async *run(stops: readonly string[], begin: () => Session): AsyncGenerator<Event, void, void> {
    if (this.closed) throw new Error("this runtime is closed; make another one");
    if (this.answer) {
      throw new Error("an answer is on its way; read it to its end or leave its loop, or make another runtime");
    }
    const session = begin();
    this.forgotten = false;
    this.catchUp();
    const decode = (ids: number[]) => this.bundle.tokenizer.decode(ids);
    const { link, drafter, inbox, linkError, options } = this;
    const { understudy = null, watch } = options;
    const answer = new Answer(session, link, drafter, understudy, inbox, decode, stops, linkError, watch);
    this.answer = answer;
    this.connect();
    try {
      yield* answer.run();
    } finally {
      answer.close();
      this.answer = null;
      this.connect();
      if (this.forgotten) {
        this.forget();
      } else {
        this.text = session.committed;
        this.rowsSeen = session.setup.rowsSeen;
      }
      if (session.verifier.pinned && !this.connected) this.linkError = ""; // it may accept the next answer
      const cold = this.bundle.manifest.engineFile !== null && this.policy.understudy !== "warm";
      if (cold && this.connected) understudy?.unload();
    }
  }

  /** Process events since the last answer; the link itself has their effects. */
  private catchUp(): void {
    for (let event = this.inbox.take(); event; event = this.inbox.take()) {
      if (event.type === "up") this.controller.linked(event.welcome, event.rtt);
    }
  }

  /** Make a session for `prompt`. The common prefix with the text before keeps its rows, here and on the verifier. */
  private begin(prompt: readonly number[], sampling: Sampling, maxNew: number, constraint: Constraint | null): Session {
    const same = commonPrefix(prompt, this.text);
    if (same < this.text.length) this.drafter.remember(this.text); // another conversation, or a repeated turn
    this.drafter.keepRows(same);
    const { eosIds, maxContext } = this.bundle.manifest;
    const { shape = LARGEST, shaping, ahead } = this.options;
    return new Session({
      prompt,
      sampling,
      eosIds: new Set(eosIds),
      maxNew,
      maxContext,
      rowShape: this.bundle.rowShape,
      sessionId: this.sessionId,
      stream: this.stream,
      rowsSeen: this.rowsSeen.upTo(same),
      sentenceEnds: this.bundle.sentenceEnds,
      patience: this.patience,
      timer: this.timer,
      policy: unsupported(constraint) ? { ...this.policy, writer: "cloud-only" } : this.policy,
      constraint,
      drafter: this.bundle.manifest.engineFile !== null,
      understudy: this.options.understudy?.present ?? false,
      tuning: new Tuning(this.controller, { largest: shape, shaping, ahead }),
    });
  }
}

/** 53 random bits. */
function drawnSeed(): number {
  const [high, low] = crypto.getRandomValues(new Uint32Array(2));
  return (high >>> 11) * 2 ** 32 + low;
}
