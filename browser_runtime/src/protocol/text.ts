/** Turns tokens into text as they arrive, without half characters, and cuts at stop strings. */

/** Decoders write this for bytes that are not, or not yet, a character. */
const REPLACEMENT = "\ufffd";
/** A UTF-8 character has at most four bytes, so more tokens than this never wait for one character. */
const CHARACTER_TOKENS = 4;
/** The window is cut once more tokens than this end in a possible half character. */
const WINDOW_TOKENS = 64;

/** Text of token ids, without special tokens. */
export type Decode = (ids: number[]) => string;

/**
 * Decodes one answer token by token.
 *
 * Decoding one token alone loses bytes and spaces, so a window is decoded: the tokens of the last piece, whose text is
 * known, then those still unsent. Every piece extends a prefix of decode(all ids).
 */
export class Detokeniser {
  private context: number[] = [];
  private pending: number[] = [];
  /** Characters of the window's text that were returned. */
  private sent = 0;

  constructor(private readonly decode: Decode) {}

  /** Return an independent copy of the present state. */
  fork(): Detokeniser {
    const copy = new Detokeniser(this.decode);
    copy.context = [...this.context];
    copy.pending = [...this.pending];
    copy.sent = this.sent;
    return copy;
  }

  /** Return the text that `token` completes, "" if it ends inside a character. */
  push(token: number): string {
    this.pending.push(token);
    const text = this.decode([...this.context, ...this.pending]);
    const complete = !text.endsWith(REPLACEMENT);
    if (!complete && this.pending.length <= CHARACTER_TOKENS) return "";
    const piece = text.slice(this.sent, complete ? undefined : -1);
    if (complete && piece) {
      this.context = this.pending;
      this.pending = [];
      this.sent = this.decode(this.context).length;
    } else {
      this.sent += piece.length;
      if (this.pending.length > WINDOW_TOKENS) this.cut(text);
    }
    return piece;
  }

  /** Return the rest at the end of the answer. Bytes that never became a character are dropped. */
  flush(): string {
    return this.decode([...this.context, ...this.pending])
      .replace(/\ufffd+$/, "")
      .slice(this.sent);
  }

  /** Keep the last token alone if a character begins with it, so that the window stays short. */
  private cut(text: string): void {
    const last = this.decode(this.pending.slice(-1));
    if (!last.endsWith(REPLACEMENT)) return;
    if (this.decode([...this.context, ...this.pending.slice(0, -1)]) + last !== text) return;
    this.context = [];
    this.pending = this.pending.slice(-1);
    this.sent = last.length - 1;
  }
}

/** Cuts text at the stop string that is complete first, wherever it is split into pieces. */
export class StopStrings {
  hit = false;
  private held = "";

  constructor(private readonly stops: readonly string[] = []) {}

  /** Return an independent copy of the present state. */
  fork(): StopStrings {
    const copy = new StopStrings(this.stops);
    copy.hit = this.hit;
    copy.held = this.held;
    return copy;
  }

  /** Return text that can no longer belong to a stop string; "" once one was found. */
  push(piece: string): string {
    if (this.hit) return "";
    const text = this.held + piece;
    const found = this.stops.map(stop => ({ stop, at: text.indexOf(stop) })).filter(({ at }) => at >= 0);
    if (found.length) {
      this.hit = true;
      this.held = "";
      found.sort((one, other) => one.at + one.stop.length - other.at - other.stop.length || one.at - other.at);
      return text.slice(0, found[0].at);
    }
    const sure = text.length - Math.max(0, ...this.stops.map(stop => overlap(text, stop)));
    this.held = text.slice(sure);
    return text.slice(0, sure);
  }

  /** Return the text held back, once no more can come. */
  flush(): string {
    const held = this.held;
    this.held = "";
    return held;
  }
}

/** Return the length of the longest end of `text` that begins `stop`, less than all of `stop`. */
function overlap(text: string, stop: string): number {
  let length = Math.min(text.length, stop.length - 1);
  while (length > 0 && !text.endsWith(stop.slice(0, length))) length--;
  return Math.max(0, length);
}
