import assert from "node:assert/strict";
import { test } from "node:test";
import { Conversations } from "../page/conversations.js";

/** The state that tabs of one browser share: a storage, and locks that a closed tab releases. */
class Browser {
  readonly kept = new Map<string, string>();
  private readonly locked = new Set<string>();

  /** Make this the browser of the next `Conversations`. */
  use(): void {
    const { kept, locked } = this;
    const localStorage = {
      get length() {
        return kept.size;
      },
      key: (index: number) => [...kept.keys()][index] ?? null,
      getItem: (key: string) => kept.get(key) ?? null,
      setItem: (key: string, value: string) => kept.set(key, value),
      removeItem: (key: string) => kept.delete(key),
    };
    const request = async (name: string, _: object, held: (lock: object | null) => Promise<void> | null) => {
      if (locked.has(name)) return held(null);
      locked.add(name);
      await held({ name });
      locked.delete(name);
    };
    Object.defineProperty(globalThis, "localStorage", { value: localStorage, configurable: true });
    Object.defineProperty(globalThis, "navigator", { value: { locks: { request } }, configurable: true });
  }

  /** Close all tabs. */
  close(): void {
    this.locked.clear();
  }
}

function say(conversations: Conversations, content: string): void {
  conversations.present.messages.push({ role: "user", content });
  conversations.save();
}

const said = ({ messages }: { messages: { content: string }[] }) => messages.map(({ content }) => content).join(" ");

test("two tabs keep what both said, whichever saves last", async () => {
  const browser = new Browser();
  browser.use();
  const first = await Conversations.open();
  say(first, "one");
  const second = await Conversations.open();
  assert.equal(said(second.present), "", "the other tab has that one open");
  say(second, "two");
  say(first, "more");
  say(second, "again");
  assert.deepEqual(first.list.map(said), ["one more", "two again"]);
  assert.deepEqual(second.list.map(said), ["two again", "one more"]);
  browser.close();
  assert.deepEqual((await Conversations.open()).list.map(said).sort(), ["one more", "two again"]);
});

test("an answer that one tab is writing is taken up by no other, until that one is left", async () => {
  new Browser().use();
  const first = await Conversations.open();
  say(first, "one");
  first.present.pending = { seq: 1 } as never;
  first.save();
  const second = await Conversations.open();
  assert.equal(second.present.pending, null);
  const [there] = second.list;
  assert.equal(await second.choose(there), false);
  assert.equal(await second.delete(there), false);
  assert.equal(said(second.present), "");
  first.present.messages.push({ role: "assistant", content: "done" });
  first.save();
  await first.begin();
  assert.equal(await second.choose(there), true);
  assert.equal(said(second.present), "one done", "as the first tab has left it");
  assert.equal(await second.delete(second.present), true);
  assert.deepEqual(second.list, []);
});

test("the oldest go, and a full storage is reported", async t => {
  const browser = new Browser();
  browser.use();
  t.mock.timers.enable({ apis: ["Date"] });
  const conversations = await Conversations.open();
  for (let count = 0; count < 60; count++) {
    t.mock.timers.tick(1000);
    say(conversations, `${count}`);
    await conversations.begin();
  }
  assert.ok(browser.kept.size <= 51 && said(conversations.list[0]) === "59");
  localStorage.setItem = () => {
    throw new Error("QuotaExceededError");
  };
  say(conversations, "more");
  assert.match(conversations.notKept, /storage is full/);
});
