/** Text to token ids and back, by a tokenizer.json. */

import { Tokenizer as Library } from "@huggingface/tokenizers";
import { BundleError } from "./manifest.js";

/** An entry of `added_tokens`. */
export interface AddedToken {
  id: number;
  content: string;
  special: boolean;
  normalized?: boolean;
  lstrip?: boolean;
  rstrip?: boolean;
}

// biome-ignore lint/suspicious/noExplicitAny: a tokenizer.json, which the library checks
type TokenizerJson = Record<string, any> & { added_tokens: AddedToken[] };

export class Tokenizer {
  private readonly library: Library;

  constructor(readonly json: TokenizerJson) {
    this.library = new Library({ ...json, pre_tokenizer: digitsOfAllKinds(json.pre_tokenizer) }, {});
  }

  /** Parse the text of tokenizer.json. Throws BundleError. */
  static parse(text: string): Tokenizer {
    try {
      return new Tokenizer(JSON.parse(text));
    } catch (error) {
      throw new BundleError(`tokenizer.json does not load: ${error instanceof Error ? error.message : error}`);
    }
  }

  get addedTokens(): readonly AddedToken[] {
    return this.json.added_tokens;
  }

  /** Return token ids of text, with nothing added around it. Half a surrogate pair is U+FFFD. */
  encode(text: string): number[] {
    return text ? this.library.encode(wellFormed(text), { add_special_tokens: false }).ids : [];
  }

  /** Return the text of token ids, without special tokens. */
  decode(ids: number[]): string {
    if (!ids.length) return "";
    return this.library.decode(ids, { skip_special_tokens: true, clean_up_tokenization_spaces: false });
  }

  /** Normalise text as the tokenizer does before it looks for tokens. */
  normalize(text: string): string {
    return this.library.normalizer?.normalize(text) ?? text;
  }

  /** Return the same tokenizer with other added tokens. */
  withAddedTokens(tokens: readonly AddedToken[]): Tokenizer {
    return new Tokenizer({ ...this.json, added_tokens: [...tokens] });
  }
}

/** Replace each half of a surrogate pair by U+FFFD. */
export function wellFormed(text: string): string {
  return text.replace(/\p{Surrogate}/gu, "\ufffd");
}

/** The library's Digits supports only 0 to 9; the original splits at all of Unicode's numbers. */
// biome-ignore lint/suspicious/noExplicitAny: part of a tokenizer.json
function digitsOfAllKinds(config: any): any {
  if (config?.type === "Sequence") return { ...config, pretokenizers: config.pretokenizers.map(digitsOfAllKinds) };
  if (config?.type !== "Digits") return config;
  const pattern = { Regex: config.individual_digits ? "\\p{N}" : "\\p{N}+" };
  return { type: "Split", pattern, behavior: "Isolated", invert: false };
}
