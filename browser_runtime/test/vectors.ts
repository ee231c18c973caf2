/** The files of outrider_core/protocol/vectors, and the JSON forms that they use. */

import { readFileSync } from "node:fs";
import { fileURLToPath } from "node:url";
import { Constraint } from "../src/protocol/constraint.js";
import type { Message } from "../src/protocol/messages.js";
import { Sampling } from "../src/protocol/sampling.js";

// biome-ignore lint/suspicious/noExplicitAny: the JSON of vectors has many shapes, and the tests check it
export type Any = any;

/** The repository; tests run from browser_runtime/dist/lib/test. */
export const ROOT_URL = new URL("../../../../", import.meta.url);
export const BUNDLE = process.env.OUTRIDER_BUNDLE ?? fileURLToPath(new URL("build/bundle", ROOT_URL));

/** The vectors of file `name`.json; integers of 16 digits and more become bigint. */
export function read(name: string): Any[] {
  const text = readFileSync(new URL(`outrider_core/protocol/vectors/${name}.json`, ROOT_URL), "utf8");
  const exact = text.replace(/([:[,]\s*)(\d{16,})(?=\s*[,\]}])/g, '$1"#$2"');
  return JSON.parse(exact, (_key, value) => (/^#\d{16,}$/.test(value) ? BigInt(value.slice(1)) : value));
}

export function sampling(fields: Any): Sampling {
  const { temperature, top_k: topK, top_p: topP, min_p: minP, seed } = fields;
  return new Sampling({ temperature, topK, topP, minP, seed });
}

export function constraint(fields: Any): Constraint {
  const { begin, frequency_penalty: frequencyPenalty, presence_penalty: presencePenalty, grammar, schema } = fields;
  const [ids, amounts] = [fields.bias_tokens, fields.biases].map(({ hex }) => new DataView(fromHex(hex).buffer));
  const biases = new Map<number, number>();
  for (let at = 0; at < ids.byteLength; at += 4) biases.set(ids.getUint32(at, true), amounts.getFloat32(at, true));
  return new Constraint({ begin, frequencyPenalty, presencePenalty, biases, grammar, schema });
}

/** The inverse of `constraint`. */
function constraintFields(of: Constraint): Any {
  const [ids, amounts] = [[...of.biases.keys()], [...of.biases.values()]];
  const hex = (values: Uint32Array | Float32Array) => ({ hex: toHex(new Uint8Array(values.buffer)) });
  return {
    begin: of.begin,
    frequency_penalty: of.frequencyPenalty,
    presence_penalty: of.presencePenalty,
    bias_tokens: hex(Uint32Array.from(ids)),
    biases: hex(Float32Array.from(amounts)),
    grammar: of.grammar,
    schema: of.schema,
  };
}

export function fromHex(hex: string): Uint8Array {
  return Uint8Array.from(Buffer.from(hex, "hex"));
}

export function toHex(bytes: Uint8Array): string {
  return Buffer.from(bytes).toString("hex");
}

const camel = (name: string) => name.replace(/_(.)/g, (_, letter) => letter.toUpperCase());
const snake = (name: string) => name.replace(/[A-Z]/g, letter => `_${letter.toLowerCase()}`);

/** Fields that were appended to messages, with their defaults; vectors omit them if they say nothing. */
const LATER: Record<string, Record<string, Any>> = {
  Hello: { arithmetic: "" },
  Welcome: { constraints: 0, arithmetic: "", streamTokens: 0, queueUs: 0 },
};

/** Make a message from its fields. */
export function message(fields: Any): Message {
  const entries = Object.entries(fields).map(([name, value]: [string, Any]) => {
    if (name === "sampling") return [name, sampling(value)];
    if (name === "constraint") return [name, constraint(value)];
    return [camel(name), value?.hex === undefined ? value : fromHex(value.hex)];
  });
  return { ...LATER[fields.type], ...Object.fromEntries(entries) };
}

/** The inverse of `message`. */
export function fields(of: Message): Any {
  const later = LATER[of.type] ?? {};
  const told = Object.entries(of).filter(([name, value]) => !(name in later && value === later[name]));
  const entries = told.map(([name, value]) => {
    if (value instanceof Sampling) {
      const { temperature, topK: top_k, topP: top_p, minP: min_p } = value;
      const seed = value.seed < 2n ** 53n ? Number(value.seed) : value.seed;
      return [name, { temperature, top_k, top_p, min_p, seed }];
    }
    if (value instanceof Constraint) return [name, constraintFields(value)];
    return [snake(name), value instanceof Uint8Array ? { hex: toHex(value) } : value];
  });
  return Object.fromEntries(entries);
}

/** Compare JSON values: fractions to a millionth. */
export function same(one: Any, other: Any): boolean {
  if (typeof one === "number" && typeof other === "number") return Math.abs(one - other) <= 1e-6;
  if (typeof one !== "object" || typeof other !== "object" || one === null || other === null) return one === other;
  const keys = Object.keys(one);
  return (
    Array.isArray(one) === Array.isArray(other) &&
    keys.length === Object.keys(other).length &&
    keys.every(key => key in other && same(one[key], other[key]))
  );
}

/** Log how many vectors of a file were replayed. */
export function counted(name: string, count: number): void {
  console.log(`vectors: ${name} ${count}`);
}
