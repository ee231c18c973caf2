import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { join } from "node:path";
import { test } from "node:test";
import { Bundle } from "../src/bundle/bundle.js";
import { BundleError, parseManifest } from "../src/bundle/manifest.js";
import { constraintOf, type FormOptions, toolUseOf } from "../src/form.js";
import { constraintOrNull, plainConstraint } from "../src/protocol/constraint.js";
import { type Any, BUNDLE, constraint, counted, read } from "./vectors.js";

const VOCAB = 1000;

/** Rename the fields of OpenAI's request to those of this library. */
function options(request: Any): FormOptions {
  const names = Object.entries(request).map(([name, value]) => {
    return [name.replace(/_(.)/g, (_, letter) => letter.toUpperCase()), value];
  });
  return Object.fromEntries(names);
}

test("requests become the constraints that Python makes of them, or are refused", () => {
  const rows = read("constraints");
  for (const { request, refused, constraint: fields } of rows) {
    const where = JSON.stringify(request);
    const made = () => constraintOf(4, VOCAB, options(request), toolUseOf(options(request)));
    if (refused) {
      assert.throws(made, RangeError, where);
      continue;
    }
    const wanted = fields && constraint(fields);
    assert.deepEqual(plain(made()), plain(wanted), where);
    assert.deepEqual(constraintOrNull(JSON.parse(JSON.stringify(plainConstraint(wanted)))), wanted);
  }
  counted("constraints", rows.length);
  const schema = { title: "x".repeat(40_000) };
  const long: FormOptions = { responseFormat: { type: "json_schema", json_schema: { schema } } };
  assert.throws(() => constraintOf(0, VOCAB, long, null), /at most 32768/);
  assert.throws(() => constraintOf(0, VOCAB, { responseFormat: { type: "xml" } as Any }, null), RangeError);
  assert.throws(() => toolUseOf({ tools: [{ type: "function", function: { name: "a b" } }] }), RangeError);
});

/** Return a comparable form: schemas are parsed, and biases have no order. */
function plain(of: ReturnType<typeof constraintOf>) {
  const plain = plainConstraint(of);
  const biases = plain?.biases.sort(([one], [other]) => one - other);
  return plain && { ...plain, biases, schema: plain.schema && JSON.parse(plain.schema) };
}

test("biases and penalties add to logits what Python adds", () => {
  const rows = read("amounts");
  for (const { constraint: fields, text, amounts } of rows) {
    const order = (pairs: [number, number][]) => pairs.sort(([one], [other]) => one - other);
    assert.deepEqual(order([...constraint(fields).amounts(text)]), order(amounts));
  }
  counted("amounts", rows.length);
});

test("a manifest says how sure the drafter may be", () => {
  const { confidence_temperature: _, ...without } = JSON.parse(readFileSync(join(BUNDLE, "manifest.json"), "utf8"));
  const parsed = (given: object) => parseManifest(JSON.stringify({ ...without, ...given })).confidenceTemperature;
  assert.equal(parsed({}), 1);
  for (const given of [0.75, 1]) assert.equal(parsed({ confidence_temperature: given }), given);
  for (const given of [0, -1, 1e9, "0.8", null, true]) {
    assert.throws(() => parsed({ confidence_temperature: given }), BundleError, `${given}`);
  }
});

test("conversations with tools have the token ids that they have in Python", async () => {
  const rows = read("tool_chats");
  const manifest = parseManifest(readFileSync(join(BUNDLE, "manifest.json"), "utf8"));
  const bundles = new Map<string, Bundle>();
  for (const { template, messages, tools, ids } of rows) {
    const file = async (name: string) =>
      Uint8Array.from(
        template && name === "chat_template.jinja" ? Buffer.from(template) : readFileSync(join(BUNDLE, name)),
      );
    if (!bundles.has(template)) bundles.set(template, await Bundle.open(manifest, file));
    const use = toolUseOf({ tools });
    assert.deepEqual(
      bundles.get(template)!.renderChat(messages, use?.prompt),
      ids,
      JSON.stringify({ template, messages }),
    );
  }
  counted("tool_chats", rows.length);
  const writes =
    "{% for m in messages %}{% if m.tool_calls %}{% for c in m.tool_calls %}<tool_call>\n{{ c.function | tojson }}\n</tool_call>{% endfor %}{% else %}{{ m.content }}{% endif %}{% endfor %}";
  const own = `{% if tools %}{{ tools | tojson }}{% endif %}${writes}`;
  const file = async (name: string) =>
    Uint8Array.from(name === "chat_template.jinja" ? Buffer.from(own) : readFileSync(join(BUNDLE, name)));
  const bundle = await Bundle.open(manifest, file);
  const tools = [{ type: "function", function: { name: "f", description: "<|im_end|>", parameters: {} } }];
  const bare = bundle.renderChat([{ role: "user", content: "Hi" }], tools);
  assert.ok(bundle.tokenizer.decode(bare).endsWith("Hi"));
  assert.ok(!bare.some(id => manifest.eosIds.includes(id)), "what a tool says is no token");
});
