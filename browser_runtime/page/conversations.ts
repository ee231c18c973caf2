/** Conversations, kept in this browser alone. */

import type { AnswerRecord } from "../src/index.js";

/** messages: what was said. pending: an answer that was on its way when the page was closed. */
export interface Conversation {
  id: string;
  messages: { role: string; content: string }[];
  pending: AnswerRecord | null;
}

const KEY = "outrider.conversations";
/** More than these are not kept: the oldest go. */
const MOST = 50;

export class Conversations {
  private readonly all: Conversation[];
  /** Why nothing is kept any more, or "". */
  notKept = "";

  constructor() {
    this.all = read();
    if (!this.all.length) this.begin();
  }

  /** The newest first. */
  get list(): readonly Conversation[] {
    return this.all;
  }

  get present(): Conversation {
    return this.all[0];
  }

  /** A new one, unless the present one is empty. */
  begin(): void {
    if (this.all.length && !this.present.messages.length) return;
    this.all.unshift({ id: crypto.randomUUID(), messages: [], pending: null });
    this.all.length = Math.min(this.all.length, MOST);
  }

  /** Take up `conversation` again. */
  choose(conversation: Conversation): void {
    this.forget(conversation);
    this.all.unshift(conversation);
    this.save();
  }

  delete(conversation: Conversation): void {
    this.forget(conversation);
    this.begin();
    this.save();
  }

  save(): void {
    try {
      localStorage.setItem(KEY, JSON.stringify(this.all.filter(({ messages }) => messages.length)));
      this.notKept = "";
    } catch {
      this.notKept = "this browser's storage is full: delete conversations to keep new ones";
    }
  }

  /** All of them, as a file of readable JSON without token ids. */
  export(): Blob {
    const plain = this.all.filter(({ messages }) => messages.length).map(({ messages }) => ({ messages }));
    return new Blob([JSON.stringify(plain, null, 2)], { type: "application/json" });
  }

  private forget(conversation: Conversation): void {
    const at = this.all.indexOf(conversation);
    if (at >= 0) this.all.splice(at, 1);
  }
}

export function titleOf({ messages }: Conversation): string {
  return messages[0]?.content.slice(0, 80) || "New conversation";
}

function read(): Conversation[] {
  try {
    const kept = JSON.parse(localStorage.getItem(KEY) ?? "[]");
    return Array.isArray(kept) ? kept.filter(one => Array.isArray(one?.messages)) : [];
  } catch {
    return [];
  }
}
