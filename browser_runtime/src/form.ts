/** The requested form of an answer, as in OpenAI's calls (docs/api.md), and its `Constraint`. */

import {
  Constraint,
  GRAMMAR_JSON_OBJECT,
  GRAMMAR_JSON_SCHEMA,
  GRAMMAR_NONE,
  GRAMMAR_TOOLS,
  MAX_BIAS,
  MAX_BIASES,
  MAX_PENALTY,
  MAX_SCHEMA,
} from "./protocol/constraint.js";
import type { Policy } from "./session/policy.js";

const MAX_TOOLS = 128;
const NAME = /^[A-Za-z0-9_-]{1,64}$/;
/** Keywords that may ask for properties in ways that are not examined here. */
const FURTHER = ["not", "if", "dependencies", "dependentSchemas", "$dynamicRef", "$recursiveRef", "minProperties"];
/** Why this device alone cannot write under a grammar. */
const NO_GRAMMARS = "no grammar library runs here";

export type JsonSchema = Record<string, unknown>;

/** The form of an answer. name, description and strict change nothing: every schema is obeyed to the letter. */
export type ResponseFormat =
  | { type: "text" | "json_object" }
  | { type: "json_schema"; json_schema: { schema: JsonSchema; name?: string; description?: string; strict?: boolean } };

/** A function that the answer may call. name: 1 to 64 of `A-Za-z0-9_-`; parameters: JSON schema of an object. */
export interface Tool {
  type: "function";
  function: { name: string; description?: string; parameters?: JsonSchema; strict?: boolean };
}

/** allowed_tools: only these, though the prompt describes all. */
export type ToolChoice =
  | "none"
  | "auto"
  | "required"
  | { type: "function"; function: { name: string } }
  | {
      type: "allowed_tools";
      allowed_tools: { mode: "auto" | "required"; tools: { type: "function"; function: { name: string } }[] };
    };

/** The options of a request that apply to every draw. All are optional. */
export interface FormOptions {
  responseFormat?: ResponseFormat | null;
  /** By token id, -100 to 100. */
  logitBias?: Readonly<Record<string, number>> | null;
  /** -2 to 2; the answer's own tokens count. */
  frequencyPenalty?: number;
  presencePenalty?: number;
  /** Calls appear in the text as `<tool_call>`; a prompt of token ids must describe the tools itself. */
  tools?: readonly Tool[];
  toolChoice?: ToolChoice;
  parallelToolCalls?: boolean;
}

/** The functions in the prompt, and the rules of calls in wire form. */
export interface ToolUse {
  prompt: readonly Tool[];
  rules: readonly unknown[];
}

/** The tools of a request; null: none may be called. Throws RangeError. */
export function toolUseOf(options: FormOptions): ToolUse | null {
  const { tools = [], toolChoice = "auto", parallelToolCalls = true } = options;
  expect(tools.length <= MAX_TOOLS, `${tools.length} tools; at most ${MAX_TOOLS} are taken`);
  const functions = tools.map(functionOf);
  const names = functions.map(({ name }) => name);
  for (const [index, name] of names.entries()) {
    expect(names.indexOf(name) === index, `tools[${index}]: two tools have the name ${name}`);
  }
  const { only, required, named } = chosen(toolChoice);
  if (!functions.length) {
    expect(!only && !required, "tool_choice asks for a call, but there are no tools");
    return null;
  }
  if (toolChoice === "none") return null;
  const unknown = only?.find(name => !names.includes(name));
  expect(unknown === undefined, `tool_choice names ${unknown}, which is not among the tools`);
  const callable = functions.filter(({ name }) => !only || only.includes(name));
  const rules = callable.map(({ name, parameters }) => [name, closed(parameters)]);
  return { prompt: functions.map(shown), rules: [rules, required, parallelToolCalls && !named] };
}

/** The constraint of an answer whose first token has index `begin`; null if there is none. Throws RangeError. */
export function constraintOf(
  begin: number,
  vocabSize: number,
  options: FormOptions,
  use: ToolUse | null,
): Constraint | null {
  let { grammar, schema } = grammarOf(options.responseFormat ?? null);
  if (use) {
    const form = grammar === GRAMMAR_JSON_OBJECT ? { type: "object" } : (schema ?? null);
    [grammar, schema] = [GRAMMAR_TOOLS, [...use.rules, form]];
  }
  const text = schema === undefined ? "" : JSON.stringify(schema);
  const length = text.length > MAX_SCHEMA ? [...text].length : text.length;
  expect(length <= MAX_SCHEMA, `the schemas have ${length} characters; at most ${MAX_SCHEMA} are taken`);
  const biases = biasesOf(options.logitBias ?? {}, vocabSize);
  const frequencyPenalty = penalty("frequency_penalty", options.frequencyPenalty);
  const presencePenalty = penalty("presence_penalty", options.presencePenalty);
  if (grammar === GRAMMAR_NONE && !biases.size && !frequencyPenalty && !presencePenalty) return null;
  return new Constraint({ begin, frequencyPenalty, presencePenalty, biases, grammar, schema: text });
}

/** Whether the device's own writers do not support this. */
export function unsupported(constraint: Constraint | null): boolean {
  return Boolean(constraint && constraint.grammar !== GRAMMAR_NONE);
}

/** Throw RangeError if no writer here can obey `constraint`. */
export function checkSupported(constraint: Constraint | null, { writer }: Policy): void {
  const why = "response_format and tools need a verifier: this device writes alone and does not support them";
  expect(!unsupported(constraint) || writer !== "device-only", `${why}: ${NO_GRAMMARS}`);
}

function functionOf(tool: Tool, index: number): Tool["function"] {
  const where = `tools[${index}]`;
  const of = tool?.type === "function" ? tool.function : null;
  if (!of) throw new RangeError(`${where}: only tools of type function are supported here`);
  expect(NAME.test(of.name), `${where}: a function's name must match ${NAME.source.slice(1, -1)}`);
  const { type = "object" } = (of.parameters ?? {}) as { type?: unknown };
  expect(type === "object", `${where}: arguments are objects, so the type of parameters must be object`);
  expect(!("x-guidance" in (of.parameters ?? {})), `${where}: x-guidance is not taken here`);
  return of;
}

/** only: names of the functions that may be called, null: all; named: a single one must be. */
function chosen(choice: ToolChoice): { only: string[] | null; required: boolean; named: boolean } {
  if (choice === "none" || choice === "auto") return { only: null, required: false, named: false };
  if (choice === "required") return { only: null, required: true, named: false };
  if (choice.type === "function") return { only: [choice.function.name], required: true, named: true };
  const { mode, tools } = choice.allowed_tools;
  expect(mode === "auto" || mode === "required", "allowed_tools.mode must be auto or required");
  expect(tools.length > 0, "allowed_tools names no tool");
  return { only: tools.map(tool => tool.function.name), required: mode === "required", named: false };
}

/** Return the schema of a call's arguments: an object, in all parts without properties that it does not name. */
function closed(parameters: JsonSchema = {}): JsonSchema {
  const own = Object.keys(parameters).length ? parameters : { properties: {} };
  const schema: JsonSchema = { type: "object", ...own };
  const { properties } = schema;
  const names = namesOf(schema, schema, new Set());
  if (!isObject(properties) || !names || "additionalProperties" in schema) return schema;
  const others = names.filter(name => !Object.hasOwn(properties, name)).map(name => [name, true]);
  return { ...schema, properties: { ...properties, ...Object.fromEntries(others) }, additionalProperties: false };
}

/** Return all properties that an object of this schema names; null if that cannot be determined. */
function namesOf(schema: unknown, root: JsonSchema, seen: Set<string>): string[] | null {
  if (!isObject(schema)) return [];
  if (FURTHER.some(key => key in schema)) return null;
  const { properties, required, $ref: reference } = schema;
  const names = isObject(properties) ? Object.keys(properties) : [];
  if (Array.isArray(required)) names.push(...required.filter(name => typeof name === "string"));
  const parts = ["allOf", "anyOf", "oneOf"].flatMap(key => (Array.isArray(schema[key]) ? schema[key] : []));
  if (typeof reference === "string" && !seen.has(reference)) {
    seen.add(reference);
    parts.push(pointed(root, reference));
    if (parts.at(-1) == null) return null;
  }
  for (const part of parts) {
    const found = namesOf(part, root, seen);
    if (!found) return null;
    names.push(...found);
  }
  return names;
}

/** Return the part that a reference within a schema leads to; null if it is not a path that exists. */
function pointed(root: JsonSchema, reference: string): unknown {
  if (reference !== "#" && !reference.startsWith("#/")) return null;
  let there: unknown = root;
  for (const part of decoded(reference).split("/").slice(1)) {
    const key = part.replaceAll("~1", "/").replaceAll("~0", "~");
    if (typeof there !== "object" || there === null || !Object.hasOwn(there, key)) return null;
    there = (there as JsonSchema)[key];
  }
  return there;
}

/** Without percent-encoding, if that is valid. */
function decoded(text: string): string {
  try {
    return decodeURIComponent(text);
  } catch {
    return text;
  }
}

function isObject(value: unknown): value is JsonSchema {
  return typeof value === "object" && value !== null && !Array.isArray(value);
}

/** In the form of chat templates. */
function shown({ name, description, parameters = {} }: Tool["function"]): Tool {
  const own = Object.keys(parameters).length ? parameters : { type: "object", properties: {} };
  return { type: "function", function: { name, ...(description == null ? {} : { description }), parameters: own } };
}

function grammarOf(format: ResponseFormat | null): { grammar: number; schema?: unknown } {
  switch (format?.type) {
    case undefined:
    case "text":
      return { grammar: GRAMMAR_NONE };
    case "json_object":
      return { grammar: GRAMMAR_JSON_OBJECT };
    case "json_schema": {
      const schema = format.json_schema?.schema;
      if (isObject(schema)) return { grammar: GRAMMAR_JSON_SCHEMA, schema };
      throw new RangeError("response_format of type json_schema needs json_schema with a schema, which is an object");
    }
    default:
      throw new RangeError("response_format.type must be one of text, json_object, json_schema");
  }
}

function biasesOf(logitBias: Readonly<Record<string, number>>, vocabSize: number): Map<number, number> {
  const biases = new Map<number, number>();
  for (const [key, amount] of Object.entries(logitBias)) {
    const token = /^\d+$/.test(key) ? Number(key) : Number.NaN;
    expect(!Number.isNaN(token), `logit_bias has token ids as keys; '${key}' is none`);
    expect(token < vocabSize, `logit_bias names token ${token}; the model has tokens 0 to ${vocabSize - 1}`);
    const fits = typeof amount === "number" && Math.abs(amount) <= MAX_BIAS;
    expect(fits, `logit_bias of token ${token} must be a number from -${MAX_BIAS} to ${MAX_BIAS}`);
    if (amount) biases.set(token, Math.fround(amount)); // as on the wire
  }
  expect(biases.size <= MAX_BIASES, `logit_bias has ${biases.size} entries; at most ${MAX_BIASES} are taken`);
  return biases;
}

function penalty(name: string, amount = 0): number {
  const fits = typeof amount === "number" && Math.abs(amount) <= MAX_PENALTY;
  expect(fits, `${name} must be a number from -${MAX_PENALTY} to ${MAX_PENALTY}`);
  return amount;
}

function expect(held: boolean, why: string): void {
  if (!held) throw new RangeError(why);
}
