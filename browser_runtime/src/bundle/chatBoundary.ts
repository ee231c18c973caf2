/**
 * Keeps content apart from a chat template: content is text, never one of the template's own tokens.
 *
 * If content holds the text of such a token, a mark is inserted before the template is rendered, which keeps it apart from
 * the tokens that the template writes, and it is encoded as plain text. Content without such text is encoded as always.
 * Tokens of the boundary are the special ones, and others that the template itself writes, such as `<tool_response>`. An
 * assistant's turn may hold the latter: models write them as text (`<think>`), and templates look for them there.
 */

import type { AddedToken, Tokenizer } from "./tokenizer.js";

/**
 * One turn of a conversation, as OpenAI has it. role: one of `ROLES`; "tool" is the result of a call. content: text, or
 * parts that are text; an assistant's calls need none. tool_calls: an assistant's calls.
 */
export interface ChatMessage {
  role: string;
  content?: string | readonly { type: string; text?: string }[] | null;
  tool_calls?: readonly ToolCall[];
  tool_call_id?: string;
  name?: string;
}

/** arguments: an object, or its text. */
export interface ToolCall {
  id?: string;
  type?: "function";
  function: { name: string; arguments: string | Record<string, unknown> };
}

/** Candidates for the mark, of which the text must lack one: for private use, so no template or tokenizer changes them. */
const [FIRST_MARK, LAST_MARK] = [0xe000, 0xf8ff];
/** Encloses the temporary names of tokens; not one of the marks. */
const EDGE = "\ufdd0";
/** Ids of these names: beyond any vocabulary. */
const NAME_IDS = 1 << 28;
const ROLE = /^[\p{L}\p{N}_.-]+$/u;

export class ChatBoundary {
  private readonly tokens: AddedToken[];
  private readonly everyone: Breaker;
  private readonly assistant: Breaker;
  private plain: { tokenizer: Tokenizer; names: Map<string, string> } | null = null;

  constructor(
    private readonly tokenizer: Tokenizer,
    private readonly template: string,
  ) {
    const added = tokenizer.addedTokens.filter(({ content }) => content);
    const special = added.filter(token => token.special).map(({ content }) => content);
    const written = added.filter(({ content }) => template.includes(content)).map(({ content }) => content);
    const all = new Set([...special, ...written]);
    this.tokens = added.filter(({ content }) => all.has(content));
    const normalize = (text: string) => tokenizer.normalize(text);
    this.everyone = new Breaker([...all], normalize);
    this.assistant = new Breaker(special, normalize);
  }

  /** Return token ids of a conversation as `render` writes it. Throws RangeError on a role that is not a plain name. */
  encode<Message extends { role: string }>(
    messages: readonly Message[],
    render: (messages: Message[]) => string,
  ): number[] {
    for (const { role } of messages) {
      if (!ROLE.test(role)) throw new RangeError(`a role is a plain name such as user or assistant, not "${role}"`);
    }
    const mark = this.mark(messages);
    const marked = messages.map(({ role, ...said }) => {
      const breaker = role === "assistant" ? this.assistant : this.everyone;
      return { role, ...(changed(said, text => breaker.marked(text, mark)) as object) } as Message;
    });
    const text = render(marked);
    return text.includes(mark) ? this.encodeMarked(text, mark) : this.tokenizer.encode(text);
  }

  private mark(messages: readonly unknown[]): string {
    const used = [this.template];
    changed(messages, text => {
      used.push(text);
      return text;
    });
    for (let code = FIRST_MARK; code <= LAST_MARK; code++) {
      const mark = String.fromCharCode(code);
      if (!used.some(text => text.includes(mark))) return mark;
    }
    throw new RangeError("the conversation uses every character of the private use area; leave some out");
  }

  /** Encode marked text as plain text; every other occurrence of a token's text becomes the token. */
  private encodeMarked(text: string, mark: string): number[] {
    this.plain ??= this.makePlain();
    const { tokenizer, names } = this.plain;
    const named = text.replace(this.everyone.pattern, found => names.get(found)!).replaceAll(mark, "");
    const control = new Map(this.tokens.map(({ id, content }) => [id, content]));
    return tokenizer.encode(named).flatMap(id => {
      if (id >= NAME_IDS) return this.tokens[id - NAME_IDS].id;
      const content = control.get(id); // a vocabulary of whole words may hold it all the same
      if (content === undefined) return id;
      return [...content].flatMap(character => tokenizer.encode(character)).filter(one => !control.has(one));
    });
  }

  /** Return the tokenizer with unguessable names of the boundary's tokens, and the names. */
  private makePlain() {
    const secret = crypto.randomUUID();
    const names = new Map(this.tokens.map(({ content }, index) => [content, `${EDGE}${secret}.${index}${EDGE}`]));
    const others = this.tokenizer.addedTokens.filter(({ special, content }) => !special && !names.has(content));
    const named = this.tokens.map((token, index) => {
      return { ...token, id: NAME_IDS + index, content: names.get(token.content)!, normalized: false };
    });
    return { tokenizer: this.tokenizer.withAddedTokens([...others, ...named]), names };
  }
}

/** Breaks the texts of tokens wherever they occur, begin or end in a text, in upper or lower case and before a trim. */
class Breaker {
  /** The longest of the contents. */
  readonly pattern: RegExp;
  private readonly everywhere: RegExp;
  private readonly heads = new Set<string>();
  private readonly tails = new Set<string>();
  private readonly longest: number;

  constructor(
    contents: readonly string[],
    private readonly normalize: (text: string) => string,
  ) {
    const byLength = [...contents].sort((one, other) => other.length - one.length);
    const any = byLength.map(content => content.replace(/[\\^$.*+?()[\]{}|/]/g, "\\$&")).join("|") || "(?!)";
    this.pattern = new RegExp(any, "gu");
    this.everywhere = new RegExp(`(?=${any})`, "giu");
    for (const content of contents.map(folded)) {
      for (let length = 1; length < content.length; length++) {
        this.heads.add(content.slice(0, length));
        this.tails.add(content.slice(length));
      }
    }
    this.longest = byLength[0]?.length ?? 0;
  }

  /** Return `text` with `mark` wherever it could be read as a token or part of one. */
  marked(text: string, mark: string): string {
    const places = new Set(this.tokensIn(text));
    this.ends(text, 0, text.length, places);
    this.ends(text, text.length - text.trimStart().length, text.trimEnd().length, places);
    if (!places.size && this.tokensIn(this.normalize(text)).length) places.add(text.length);
    let [marked, from] = ["", 0];
    for (const place of [...places].sort((one, other) => one - other)) {
      marked += text.slice(from, place) + mark;
      from = place;
    }
    return marked + text.slice(from);
  }

  /** Return the places after the first character of each token in `text`. */
  private tokensIn(text: string): number[] {
    return Array.from(
      text.matchAll(this.everywhere),
      ({ index }) => index + (text.codePointAt(index)! > 0xffff ? 2 : 1),
    );
  }

  /** Add the places where a mark breaks a token that may begin or end in the text from `begin` to `end`. */
  private ends(text: string, begin: number, end: number, places: Set<number>): void {
    for (let length = 1; length < Math.min(this.longest, end - begin + 1); length++) {
      if (this.heads.has(folded(text.slice(end - length, end)))) places.add(end - length + 1);
      if (this.tails.has(folded(text.slice(begin, begin + length)))) places.add(begin + length - 1);
    }
  }
}

/** Return `value` with `change` applied to every text in it, names of fields included. */
function changed(value: unknown, change: (text: string) => string): unknown {
  if (typeof value === "string") return change(value);
  if (Array.isArray(value)) return value.map(one => changed(one, change));
  if (typeof value !== "object" || value === null) return value;
  return Object.fromEntries(Object.entries(value).map(([key, one]) => [change(key), changed(one, change)]));
}

function folded(text: string): string {
  return text.toLowerCase();
}
