/** A turn of the conversation on the screen. */

import type { Event, Finished } from "../src/index.js";
import { find, make } from "./dom.js";

const WITHDRAWN_MS = 2400;

export function showQuestion(text: string): void {
  find("log").append(make("p", "turn user", text));
  scrollDown();
}

/** An answer while it grows: verified, provisional and withdrawn text are distinguished by colour and shape. */
export class AnswerView {
  readonly element = make("p", "turn assistant");
  private readonly verified = document.createTextNode("");
  private readonly provisional = make("span", "provisional");
  private readonly note = make("span", "note");

  constructor() {
    this.element.append(this.verified, this.provisional, this.note);
    find("log").append(this.element);
  }

  show(event: Event): void {
    const following = isAtEnd();
    // unchanged text nodes are kept: a selection in the rest of an answer survives, and it is not read aloud again
    const said = this.verified.data;
    if (event.verified.startsWith(said)) this.verified.appendData(event.verified.slice(said.length));
    else this.verified.data = event.verified;
    if (event.type === "rolledBack" && event.text) this.withdraw(event.text);
    if (this.provisional.textContent !== event.provisional) this.provisional.textContent = event.provisional;
    if (event.type === "finished") this.finish(event);
    if (following) scrollDown();
  }

  /** The line below the answer. */
  remark(text: string): void {
    this.note.textContent = text;
  }

  private withdraw(text: string): void {
    const gone = make("del", "withdrawn", text);
    this.provisional.before(gone);
    setTimeout(() => gone.remove(), WITHDRAWN_MS);
  }

  private finish({ reason, stats, detail, provisional }: Finished): void {
    const parts = [`${stats.tokens} verified tokens`];
    if (stats.tokens) parts.push(`${stats.tokensPerSecond.toFixed(1)} a second`);
    if (stats.rounds) parts.push(`tau ${stats.tau.toFixed(2)}`);
    if (stats.provisional) {
      const by = stats.understudy ? `, ${stats.understudy} by the understudy` : "";
      parts.push(`${stats.provisional} written alone${by}, ${stats.kept} of them confirmed`);
    }
    if (provisional) parts.push("not all of it is verified");
    if (reason === "refused") parts.push("the verifier refused it");
    if (reason === "failed") parts.push("the engine failed");
    if (reason === "unreachable") parts.push("the verifier could not be reached");
    if (reason === "cancelled") parts.push("stopped");
    if (reason === "length") parts.push("stopped at its length limit");
    this.remark(parts.join(" · ") + (detail ? ` (${detail})` : ""));
  }
}

function isAtEnd(): boolean {
  const log = find("log");
  return log.scrollHeight - log.scrollTop - log.clientHeight < 80;
}

function scrollDown(): void {
  const log = find("log");
  log.scrollTop = log.scrollHeight;
}
