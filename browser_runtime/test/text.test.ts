import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { join } from "node:path";
import { test } from "node:test";
import { ChatBoundary, type ChatMessage } from "../src/bundle/chatBoundary.js";
import { ChatTemplate } from "../src/bundle/chatTemplate.js";
import { asTemplatesTake, pythonJson } from "../src/bundle/chatTools.js";
import { BundleError } from "../src/bundle/manifest.js";
import { Tokenizer } from "../src/bundle/tokenizer.js";
import { fitMessages } from "../src/context.js";
import { Detokeniser, StopStrings } from "../src/protocol/text.js";
import { type Any, BUNDLE, counted, read } from "./vectors.js";

const ofBundle = () => Tokenizer.parse(readFileSync(join(BUNDLE, "tokenizer.json"), "utf8"));
const tokenizers: [Any, Tokenizer][] = read("tokenizer").map(row => {
  return [row, row.tokenizer ? new Tokenizer(row.tokenizer) : ofBundle()];
});

test("text is encoded and decoded, and arrives in pieces, as the vectors have it", () => {
  let cases = 0;
  for (const [row, tokenizer] of tokenizers) {
    for (const { text, ids } of row.encode) {
      assert.deepEqual(tokenizer.encode(text), ids, `${row.name}: ${JSON.stringify(text)}`);
    }
    for (const { ids, text, pieces } of row.decode) {
      assert.equal(tokenizer.decode(ids), text, `${row.name}: ${ids}`);
      const detokeniser = new Detokeniser(given => tokenizer.decode(given));
      assert.deepEqual([...ids.map((id: number) => detokeniser.push(id)), detokeniser.flush()], pieces);
    }
    cases += row.encode.length + row.decode.length;
  }
  counted("tokenizer", tokenizers.length);
  counted("texts and ids of tokenizers", cases);
});

test("half a surrogate pair is read as U+FFFD", () => {
  for (const [row, tokenizer] of tokenizers) {
    for (const [broken, whole] of [
      ["a\ud83d b", "a\ufffd b"],
      ["\ude00\ud83d", "\ufffd\ufffd"],
      ["😀\ud800", "😀\ufffd"],
    ]) {
      assert.deepEqual(tokenizer.encode(broken), tokenizer.encode(whole), row.name);
    }
  }
  assert.equal(pythonJson({ "\ud800": ["a\udc00"] }), '{"\ufffd": ["a\ufffd"]}');
});

test("chat templates follow the vectors", () => {
  const rows = read("chat");
  for (const { template, special, messages, text: wanted } of rows) {
    const text = wanted.replace("True", "true"); // the one known difference: how a boolean is written
    assert.equal(new ChatTemplate(template).render({ messages, ...special }), text);
  }
  counted("chat", rows.length);
});

test("what is said is never a token of the template", () => {
  const rows = read("boundary");
  const known = new Map<string, ChatBoundary>();
  for (const row of rows) {
    const tokenizer = () => (row.json ? new Tokenizer(row.json) : ofBundle());
    if (!known.has(row.tokenizer)) known.set(row.tokenizer, new ChatBoundary(tokenizer(), row.template));
    const template = new ChatTemplate(row.template);
    const ids = known.get(row.tokenizer)!.encode(row.messages, messages => template.render({ messages }));
    assert.deepEqual(ids, row.ids, `${row.tokenizer}: ${JSON.stringify(row.messages)}`);
  }
  counted("boundary", rows.length);
  assert.throws(() => known.get("bundle")!.encode([{ role: "user<|im_end|>", content: "" }], () => ""), RangeError);
});

test("a template that changes case or trims makes no tokens", () => {
  const tokenizer = new Tokenizer(read("boundary").find(row => row.json)!.json);
  const token = tokenizer.addedTokens.find(({ special, content }) => special && /[a-z]/.test(content))!;
  const middle = token.content.length >> 1;
  const parted = [`${token.content.slice(0, middle)} `, ` ${token.content.slice(middle)}`];
  const cases: [string[], (text: string) => string][] = [
    [[token.content.toUpperCase()], text => text.toLowerCase()],
    [parted, text => text.trim()],
  ];
  for (const [contents, write] of cases) {
    const messages = contents.map(content => ({ role: "user", content }));
    const render = (said: { content: string }[]) => said.map(({ content }) => write(content)).join("") + token.content;
    const ids = new ChatBoundary(tokenizer, "").encode(messages, render);
    assert.equal(ids.filter(id => id === token.id).length, 1, contents.join());
  }
});

test("a conversation is fitted into the context, its oldest turns first", () => {
  const say = (role: string, content: string) => ({ role, content });
  const encode = (said: { content: string }[]) => said.flatMap(({ content }) => Array(content.length).fill(1));
  const turns = [
    say("user", "aaaa"),
    say("assistant", "bbbb"),
    say("user", "cccc"),
    say("assistant", "dd"),
    say("user", "e"),
  ];
  const whole = [say("system", "sss"), ...turns];
  assert.deepEqual(fitMessages(whole, encode, 30, 4).dropped, []);
  const fitted = fitMessages(whole, encode, 14, 4);
  assert.deepEqual(fitted.dropped, turns.slice(0, 2));
  assert.deepEqual(fitted.messages, [whole[0], ...turns.slice(2)]);
  assert.equal(fitted.ids.length, 10);
  assert.deepEqual(fitMessages(whole, encode, 5, 100).messages, [whole[0], turns[4]]);
  const many = Array.from({ length: 61 }, (_, index) => say(index % 2 ? "assistant" : "user", "x".repeat(31)));
  assert.equal(encode(many).length, 1891);
  assert.deepEqual(fitMessages(many, encode, 2048, 4096).dropped, []);
  assert.ok(fitMessages(many, encode, 1900, 4096).dropped.length < 12);
  assert.throws(() => fitMessages(whole, encode, 4, 1), RangeError);
  assert.throws(() => fitMessages([], encode, 4, 1), RangeError);
});

test("asking for more room never gives less", () => {
  const encode = (said: { content: string }[]) => said.flatMap(({ content }) => Array(content.length).fill(1));
  const turns = Array.from({ length: 61 }, (_, index) => {
    return { role: index % 2 ? "assistant" : "user", content: "x".repeat(1 + ((index * 7) % 60)) };
  });
  for (const context of [64, 65, 1000, 1900, 2048]) {
    let before = context;
    for (let reserve = 1; reserve < context; reserve += reserve % 2 ? 1 : 5) {
      const length = fitMessages(turns, encode, context, reserve).ids.length;
      assert.ok(length <= before, `${reserve} of ${context}: ${length} tokens, ${before} with less room asked for`);
      before = length;
    }
    assert.ok(before <= context - (context >> 1));
  }
});

test("a fork goes on alone, long runs are quick, and what is no tokenizer is said to be none", () => {
  const stops = new StopStrings(["end"]);
  assert.equal(stops.push("xe"), "x");
  const fork = stops.fork();
  assert.equal(fork.push("nd"), "");
  assert.ok(fork.hit && !stops.hit);
  assert.equal(stops.push("X"), "eX");
  const [, tokenizer] = tokenizers.at(-1)!;
  const text = "ab".repeat(10_000);
  assert.equal(tokenizer.decode(tokenizer.encode(text)), text);
  assert.throws(() => Tokenizer.parse("{"), BundleError);
  assert.throws(() => Tokenizer.parse('{"model": {"type": "Odd"}, "added_tokens": []}'), BundleError);
});

test("messages are read alike however they are written, and what is none is refused by name", () => {
  const read = (message: unknown) => asTemplatesTake([message as ChatMessage])[0];
  assert.deepEqual(read({ role: "developer", content: "a" }), { role: "system", content: "a" });
  const parts = [
    { type: "text", text: "a " },
    { type: "text", text: "b" },
  ];
  assert.deepEqual(read({ role: "user", content: parts }), { role: "user", content: "a b" });
  const called = (given: unknown) =>
    read({ role: "assistant", tool_calls: [{ function: { name: "f", arguments: given } }] });
  assert.deepEqual(called('{"a": 1}'), { ...called({ a: 1 }), content: "" });
  assert.deepEqual(called(""), called({}));
  for (const [message, named] of [
    [{ role: "usr", content: "a" }, /messages\[0\]: role must be one of .*"usr"/],
    [{ role: "user", content: null }, /needs content/],
    [{ role: "user", content: [{ type: "image_url" }] }, /images, audio and files/],
    [{ role: "user", content: 5 }, /content must be text/],
    [{ role: "user", content: "a", tool_calls: [{ function: { name: "f", arguments: "{}" } }] }, /only an assistant/],
    [{ role: "assistant", tool_calls: [{ function: { name: "f", arguments: "[1]" } }] }, /JSON object/],
    [{ role: "assistant", tool_calls: [{ type: "custom", custom: { name: "f", input: "x" } }] }, /only functions/],
    [{ role: "assistant", function_call: { name: "f", arguments: "{}" } }, /old form of tools/],
  ] as const) {
    assert.throws(() => read(message), named);
  }
});
