/** An answer's tokens as text. */

import { type Decode, Detokeniser, StopStrings } from "../protocol/text.js";

/** The answer as text, updated token by token; provisional text is decoded after the verified text. */
export class AnswerText {
  verified = "";
  provisional = "";
  private readonly decoder: Detokeniser;
  private readonly stops: StopStrings;
  private aheadDecoder: Detokeniser;
  private aheadStops: StopStrings;

  constructor(decode: Decode, stops: readonly string[]) {
    this.decoder = new Detokeniser(decode);
    this.stops = new StopStrings(stops);
    this.aheadDecoder = this.decoder.fork();
    this.aheadStops = this.stops.fork();
  }

  /** Add verified tokens; return how many there were up to the end of a stop string, or null without one. */
  commit(tokens: readonly number[]): number | null {
    for (const [index, token] of tokens.entries()) {
      this.verified += this.stops.push(this.decoder.push(token));
      if (this.stops.hit) return index + 1;
    }
    return null;
  }

  /** Add a provisional token; return false if a stop string ended the text. */
  provide(token: number): boolean {
    this.provisional += this.aheadStops.push(this.aheadDecoder.push(token));
    return !this.aheadStops.hit;
  }

  /** Decode the provisional text again, after the verified text as it is now. */
  rebase(provisional: readonly number[]): void {
    this.aheadDecoder = this.decoder.fork();
    this.aheadStops = this.stops.fork();
    this.provisional = "";
    for (const token of provisional) this.provide(token);
  }

  /** End the text: show what was held back as a possible beginning of a character or a stop string. */
  end(): void {
    if (this.provisional) {
      this.provisional += this.aheadStops.push(this.aheadDecoder.flush()) + this.aheadStops.flush();
    } else {
      this.verified += this.stops.push(this.decoder.flush()) + this.stops.flush();
    }
  }
}
