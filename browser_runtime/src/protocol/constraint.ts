/** The constraint on an answer beside its sampling parameters; it applies to every draw (docs/protocol.md). */

/** Bounds: biases and how large each is either way, penalties either way, characters of a schema. */
export const MAX_BIASES = 1024;
export const MAX_BIAS = 100;
export const MAX_PENALTY = 2;
export const MAX_SCHEMA = 1 << 15;
/** Supported constraints, as bits of WELCOME's `constraints`: biases and penalties; JSON grammars; tools. */
export const OBEYS_BIAS = 1;
export const OBEYS_JSON = 2;
export const OBEYS_TOOLS = 4;
/** Kinds of grammar: none, any JSON object, JSON that a schema describes, text or calls of functions. */
export const GRAMMAR_NONE = 0;
export const GRAMMAR_JSON_OBJECT = 1;
export const GRAMMAR_JSON_SCHEMA = 2;
export const GRAMMAR_TOOLS = 3;

/**
 * begin: index of the answer's first token; biases: amounts by token id, each -100..100; penalties: -2..2; schema: the
 * JSON schema of GRAMMAR_JSON_SCHEMA or the tools of GRAMMAR_TOOLS, as text. Throws RangeError outside these bounds.
 */
export class Constraint {
  readonly begin: number;
  readonly frequencyPenalty: number;
  readonly presencePenalty: number;
  readonly biases: ReadonlyMap<number, number>;
  readonly grammar: number;
  readonly schema: string;

  constructor(given: {
    begin: number;
    frequencyPenalty?: number;
    presencePenalty?: number;
    biases?: ReadonlyMap<number, number>;
    grammar?: number;
    schema?: string;
  }) {
    this.begin = given.begin;
    this.frequencyPenalty = given.frequencyPenalty ?? 0;
    this.presencePenalty = given.presencePenalty ?? 0;
    this.biases = given.biases ?? new Map();
    this.grammar = given.grammar ?? GRAMMAR_NONE;
    this.schema = given.schema ?? "";
    const whole = (value: number, below: number) => Number.isInteger(value) && value >= 0 && value < below;
    const within = (value: number, most: number) => Math.abs(value) <= most;
    const wrong = (what: string): never => {
      throw new RangeError(what);
    };
    if (!whole(this.begin, 2 ** 31)) wrong(`begin ${this.begin}`);
    if (!within(this.frequencyPenalty, MAX_PENALTY)) wrong(`frequencyPenalty ${this.frequencyPenalty}`);
    if (!within(this.presencePenalty, MAX_PENALTY)) wrong(`presencePenalty ${this.presencePenalty}`);
    if (this.biases.size > MAX_BIASES) wrong(`${this.biases.size} biases`);
    for (const [token, bias] of this.biases) {
      if (!whole(token, 2 ** 32) || !within(bias, MAX_BIAS)) wrong(`bias ${bias} of token ${token}`);
    }
    if (!whole(this.grammar, GRAMMAR_TOOLS + 1)) wrong(`grammar ${this.grammar}`);
    if (this.grammar >= GRAMMAR_JSON_SCHEMA !== (this.schema !== "")) wrong("a schema belongs to its own grammar");
    if (this.schema.length > MAX_SCHEMA && [...this.schema].length > MAX_SCHEMA) wrong("the schema is too long");
  }

  /** OBEYS_* that a verifier must have. */
  get needs(): number {
    const biased = this.biases.size > 0 || this.frequencyPenalty !== 0 || this.presencePenalty !== 0;
    const obeys = this.grammar === GRAMMAR_NONE ? 0 : this.grammar === GRAMMAR_TOOLS ? OBEYS_TOOLS : OBEYS_JSON;
    return (biased ? OBEYS_BIAS : 0) | obeys;
  }

  /** Return the amounts by token that the draw after `text`, prompt included, adds to logits: biases and penalties. */
  amounts(text: readonly number[]): Map<number, number> {
    const amounts = new Map(this.biases);
    if (!this.frequencyPenalty && !this.presencePenalty) return amounts;
    const counts = new Map<number, number>();
    for (let at = this.begin; at < text.length; at++) counts.set(text[at], (counts.get(text[at]) ?? 0) + 1);
    for (const [token, count] of counts) {
      amounts.set(token, (amounts.get(token) ?? 0) - count * this.frequencyPenalty - this.presencePenalty);
    }
    return amounts;
  }

  /** Return whether `other` has the same `amounts`. */
  addsAs(other: Constraint | null): boolean {
    if (other === this || other === null) return other === this;
    const adds = ({ begin, frequencyPenalty, presencePenalty, biases }: Constraint) =>
      JSON.stringify([begin, frequencyPenalty, presencePenalty, [...biases]]);
    return adds(this) === adds(other);
  }
}

/** The form of a constraint in JSON and in messages to workers. */
export interface PlainConstraint {
  begin: number;
  frequencyPenalty: number;
  presencePenalty: number;
  biases: [number, number][];
  grammar: number;
  schema: string;
}

/** Return the plain form; null for none. */
export function plainConstraint(of: Constraint | null | undefined): PlainConstraint | null {
  if (!of) return null;
  const { begin, frequencyPenalty, presencePenalty, biases, grammar, schema } = of;
  return { begin, frequencyPenalty, presencePenalty, biases: [...biases], grammar, schema };
}

/** The inverse of `plainConstraint`. Throws RangeError. */
export function constraintOrNull(plain: PlainConstraint | null | undefined): Constraint | null {
  return plain ? new Constraint({ ...plain, biases: new Map(plain.biases) }) : null;
}
