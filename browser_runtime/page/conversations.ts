/** Conversations, kept only in this browser. Each is stored separately, and open in one tab at a time. */

import type { AnswerRecord } from "../src/index.js";

/** pending: an answer that was in progress when the page was closed. used: time of the last use, in milliseconds. */
export interface Conversation {
  id: string;
  messages: { role: string; content: string }[];
  pending: AnswerRecord | null;
  used: number;
}

const KEY = "outrider.conversation.";
/** Most conversations that are kept; the oldest are deleted first. */
const MOST = 50;

export class Conversations {
  /** Why conversations are no longer kept, or "". */
  notKept = "";
  private here = fresh();
  /** Releases the conversation for other tabs. */
  private release = () => {};

  private constructor() {}

  /** Open the newest conversation that no other tab has open, or a new one. */
  static async open(): Promise<Conversations> {
    const conversations = new Conversations();
    const [newest] = read();
    if (!newest || !(await conversations.choose(newest))) await conversations.begin();
    return conversations;
  }

  /** All kept conversations: the one that is open here, then the newest first. */
  get list(): readonly Conversation[] {
    const others = read().filter(({ id }) => id !== this.here.id);
    return this.here.messages.length ? [this.here, ...others] : others;
  }

  get present(): Conversation {
    return this.here;
  }

  /** Begin a new one, unless the present one is empty. */
  async begin(): Promise<boolean> {
    if (this.here.messages.length) this.here = fresh();
    await this.claim(this.here.id);
    return true;
  }

  /** Open a kept conversation. Returns false if another tab has it open. */
  async choose({ id }: Conversation): Promise<boolean> {
    if (id === this.here.id) return true;
    if (!(await this.claim(id))) return false;
    this.here = kept(KEY + id) ?? fresh(); // the last state that any tab has saved
    return true;
  }

  /** Delete a conversation. Returns false if another tab has it open. */
  async delete({ id }: Conversation): Promise<boolean> {
    const before = this.here.id;
    if (id !== before && !(await this.claim(id))) return false;
    localStorage.removeItem(KEY + id);
    if (id === before) this.here = fresh();
    await this.claim(this.here.id);
    return true;
  }

  /** Save the present one; no other is touched. */
  save(): void {
    if (!this.here.messages.length) return;
    this.here.used = Date.now();
    try {
      for (const { id } of read().slice(MOST)) localStorage.removeItem(KEY + id);
      localStorage.setItem(KEY + this.here.id, JSON.stringify(this.here));
      this.notKept = "";
    } catch {
      this.notKept = "this browser's storage is full: delete conversations to keep new ones";
    }
  }

  /** Export all of them as a file of readable JSON without token ids. */
  export(): Blob {
    const plain = this.list.map(({ messages }) => ({ messages }));
    return new Blob([JSON.stringify(plain, null, 2)], { type: "application/json" });
  }

  /** Claim a conversation in place of the present one. Without Web Locks (plain HTTP) this page counts as the only one. */
  private async claim(id: string): Promise<boolean> {
    const { locks } = navigator;
    const before = this.release;
    const claimed =
      !locks ||
      (await new Promise<boolean>(resolve => {
        void locks.request(KEY + id, { ifAvailable: true }, lock => {
          resolve(lock !== null);
          return lock && new Promise<void>(release => (this.release = release));
        });
      }));
    if (claimed) before();
    return claimed;
  }
}

export function titleOf({ messages }: Conversation): string {
  return messages[0]?.content.slice(0, 80) || "New conversation";
}

function fresh(): Conversation {
  return { id: crypto.randomUUID(), messages: [], pending: null, used: 0 };
}

/** Return all kept conversations, the newest first. */
function read(): Conversation[] {
  const keys = Array.from({ length: localStorage.length }, (_, index) => localStorage.key(index) ?? "");
  const found = keys.filter(key => key.startsWith(KEY)).map(kept);
  return found.filter(one => one !== null).sort((one, other) => other.used - one.used);
}

function kept(key: string): Conversation | null {
  try {
    const one = JSON.parse(localStorage.getItem(key) ?? "null");
    return Array.isArray(one?.messages) ? one : null;
  } catch {
    return null;
  }
}
