/** Turns the session's actions into the events that a user sees. */

import type { Event, LinkStatus } from "../events.js";
import { GRAMMAR_TOOLS } from "../protocol/constraint.js";
import { COMPLETE, endsWithCall } from "../protocol/ending.js";
import type { Decode } from "../protocol/text.js";
import type { Action, Adopt, Commit } from "../session/actions.js";
import type { Session } from "../session/session.js";
import type { PauseReason } from "../session/states.js";
import { AnswerText } from "./answerText.js";
import type { StatsRecorder } from "./stats.js";

/** Why the device writes or waits. */
const SILENT = "the verifier is silent";

/** Why nothing is written, in words for people. */
const PAUSED: Record<PauseReason, string> = {
  unsure: "paused: the device is not sure how to continue",
  limit: "waiting for the link: more text by the drafter alone would not be worth reading",
  asked: "paused on request",
};

/** Collects the events of one answer, in order, until they are taken. why: why the verifier does not answer, or "". */
export class Display {
  private readonly text: AnswerText;
  private events: Event[] = [];
  private status: LinkStatus | null = null;

  /** stops: strings that end the text. */
  constructor(
    private readonly session: Session,
    private readonly stats: StatsRecorder,
    decode: Decode,
    stops: readonly string[],
    private why: string,
  ) {
    this.text = new AnswerText(decode, stops);
    this.text.commit(session.committed.slice(session.setup.prompt.length));
    this.text.rebase(session.provisional);
  }

  /** Return the events since the last call. */
  take(): Event[] {
    const { events } = this;
    this.events = [];
    return events;
  }

  /** Show committed tokens. Returns how many of them follow a stop string; null without one. */
  keep(action: Commit | Adopt): number | null {
    const { text, session } = this;
    const before = text.provisional;
    const count = text.commit(action.tokens);
    text.rebase(session.provisional);
    const surplus = count === null ? null : action.tokens.length - count;
    const tokens = action.tokens.slice(0, count ?? action.tokens.length);
    if (action.type === "Commit") {
      this.stats.committed();
      this.events.push({ type: "verified", ...this.shown(), tokens, confirmed: action.confirmed });
      this.tell("verified", "");
    } else {
      if (surplus) this.events.push({ type: "rolledBack", ...this.shown(), count: surplus, text: before });
      this.events.push({ type: "adopted", ...this.shown(), tokens });
    }
    return surplus;
  }

  /** Show any other action; many show nothing. */
  show(action: Action): void {
    const { session, text } = this;
    switch (action.type) {
      case "Provide":
        this.stats.wrote();
        if (!text.provide(action.token)) session.enough();
        this.events.push({ type: "provisional", ...this.shown(), token: action.token, writer: action.writer });
        break;
      case "HandOver":
        this.events.push({ type: "handedOver", ...this.shown(), writer: action.writer, detail: action.why });
        break;
      case "RollBack": {
        const before = text.provisional;
        text.rebase(session.provisional);
        const withdrawn = before.startsWith(text.provisional) ? before.slice(text.provisional.length) : before;
        this.events.push({ type: "rolledBack", ...this.shown(), count: action.tokens.length, text: withdrawn });
        break;
      }
      case "Stall":
        this.stats.stalled(action.deadline);
        this.tell(session.state === "waiting for the link" ? "waiting" : "alone", SILENT);
        break;
      case "Pause": // unless the target's text continues
        if (session.offline.active) this.tell("waiting", PAUSED[action.reason]);
        break;
      case "Resume":
        this.stats.resumed();
        this.tell("verified", "");
        break;
      case "Done": {
        text.end();
        const unanswered = !COMPLETE.includes(action.reason) || text.provisional !== "";
        const detail = (unanswered && this.why) || session.verifier.complaint;
        const mayCall = action.reason === "stop" && session.setup.constraint?.grammar === GRAMMAR_TOOLS;
        const reason = mayCall && endsWithCall(text.verified + text.provisional) ? "tool_calls" : action.reason;
        const { answer: tokenIds, spans, length } = session.text;
        const stats = this.stats.now(session.stats, length);
        this.events.push({ type: "finished", ...this.shown(), reason, tokenIds, spans, stats, detail });
        break;
      }
    }
  }

  /** Keep the reason for the end of an answer that cannot continue. */
  failed(why: string): void {
    this.why = why;
  }

  /** Show that a pause was lifted and the device writes again. */
  proceeded(): void {
    if (this.session.state === "writing alone") this.tell("alone", SILENT);
  }

  /** Set why the verifier does not answer, or "". It is shown at once if the link's state depends on it. */
  because(why: string): void {
    if (why === this.why) return;
    this.why = why;
    if (why && this.status !== null && this.status !== "verified") {
      this.events.push({ type: "link", ...this.shown(), state: this.status, detail: why });
    }
  }

  /** Show the link's state, unless it is shown already. */
  tell(status: LinkStatus, detail: string): void {
    if (status === this.status) return;
    this.status = status;
    const whole = this.why && status !== "verified" ? `${detail}: ${this.why}` : detail;
    this.events.push({ type: "link", ...this.shown(), state: status, detail: whole });
  }

  private shown() {
    return { verified: this.text.verified, provisional: this.text.provisional };
  }
}
