/** A checked bundle: the files that the runtime reads of the folder that `python -m export bundle` writes. */

import { RowShape } from "../protocol/rows.js";
import { ChatBoundary, type ChatMessage } from "./chatBoundary.js";
import { ChatTemplate } from "./chatTemplate.js";
import {
  asTemplatesTake,
  plainMessages,
  type Render,
  type Turn,
  tagsResults,
  takesResults,
  usesTools,
  withoutResults,
  writesTools,
} from "./chatTools.js";
import { BundleError, MANIFEST, type Manifest } from "./manifest.js";
import { Tokenizer } from "./tokenizer.js";

/** The bytes of a file that `manifest.files` lists, whose sha-256 has been checked. */
export type ReadFile = (name: string) => Promise<Uint8Array<ArrayBuffer>>;

export class Bundle {
  private readonly boundary: ChatBoundary;
  private readonly template: ChatTemplate;
  /** How the template handles tools, once they are used. */
  private ways: { writes: boolean; takes: boolean; tags: boolean } | null = null;
  /** Tokens that end a sentence or a line. */
  readonly sentenceEnds: ReadonlySet<number>;
  /** Texts of the tokens with a backtick, which may be part of a code fence. */
  readonly fenceMarks: ReadonlyMap<number, string>;

  private constructor(
    readonly manifest: Manifest,
    readonly tokenizer: Tokenizer,
    /** Target token id of each row of the LM head. */
    readonly draftIds: Uint32Array,
    /** [2 (K, V), caKvHeads, headDim], or null if the drafter has none. */
    readonly nullRow: Float32Array | null,
    private readonly source: string,
    private readonly special: Record<string, string>,
    readonly readFile: ReadFile,
  ) {
    try {
      this.template = new ChatTemplate(source);
    } catch (error) {
      throw new BundleError(`chat_template.jinja does not load: ${error instanceof Error ? error.message : error}`);
    }
    this.boundary = new ChatBoundary(tokenizer, source);
    const ends = new Set<number>();
    const marks = new Map<number, string>();
    for (let id = 0; id < manifest.vocabSize; id++) {
      const text = tokenizer.decode([id]);
      if (text.includes("\n") || /[.!?。]$/.test(text.trimEnd())) ends.add(id);
      if (text.includes("`")) marks.set(id, text);
    }
    this.sentenceEnds = ends;
    this.fenceMarks = marks;
  }

  /** Reads all but the engine's files. Throws BundleError. */
  static async open(manifest: Manifest, readFile: ReadFile): Promise<Bundle> {
    const text = async (name: string) => new TextDecoder().decode(await readFile(name));
    const numbers = async (name: string) => (await readFile(name)).slice().buffer;
    const { draftIdsFile } = manifest; // without a drafter: `NoDrafter`'s one token
    const draftIds = draftIdsFile === null ? new Uint32Array(1) : new Uint32Array(await numbers(draftIdsFile));
    if (draftIds.length !== manifest.draftVocabSize || draftIds.some(id => id >= manifest.vocabSize)) {
      throw new BundleError(`${manifest.draftIdsFile} does not fit ${MANIFEST}; export the bundle again`);
    }
    const nullRow = manifest.nullRowFile === null ? null : new Float32Array(await numbers(manifest.nullRowFile));
    if (nullRow && nullRow.length !== 2 * manifest.caKvHeads * manifest.headDim) {
      throw new BundleError(`${manifest.nullRowFile} does not fit ${MANIFEST}; export the bundle again`);
    }
    const tokenizer = Tokenizer.parse(await text("tokenizer.json"));
    const settings = JSON.parse(await text("tokenizer_config.json"));
    const names = ["bos_token", "eos_token", "unk_token", "pad_token"];
    const special = Object.fromEntries(names.map(name => [name, contentOf(settings?.[name])]));
    const template = await text("chat_template.jinja");
    return new Bundle(manifest, tokenizer, draftIds, nullRow, template, special, readFile);
  }

  get rowShape(): RowShape {
    return new RowShape(this.manifest.caKvHeads, this.manifest.headDim);
  }

  /**
   * Return token ids of a conversation up to where the assistant's next turn begins, with callable `tools`.
   *
   * Content is text: what looks like a special token in it is not one. Throws RangeError on an invalid message, BundleError
   * if the template fails.
   */
  renderChat(messages: readonly ChatMessage[], tools: readonly unknown[] = []): number[] {
    const render: Render = (said, shown) => {
      try {
        return this.rendered(said, shown);
      } catch (error) {
        throw new BundleError(`the chat template failed: ${error instanceof Error ? error.message : error}`);
      }
    };
    const turns = asTemplatesTake(messages);
    if (!usesTools(turns, tools)) return this.boundary.encode(turns, said => render(said, []));
    const { writes, takes, tags } = this.toolWays();
    const said = tags ? withoutResults(turns) : turns;
    if (!writes) return this.boundary.encode(plainMessages(said, tools, takes), plain => render(plain, []));
    // the functions are passed as the content of a message, so that their text cannot become a turn either
    const all = [...said, { role: "tools", content: tools }];
    return this.boundary.encode(all, marked => {
      const { content } = marked[marked.length - 1];
      return render(marked.slice(0, -1) as Turn[], content as unknown as unknown[]);
    });
  }

  private toolWays() {
    if (!this.ways) {
      const render: Render = (said, tools) => this.rendered(said, tools);
      const [writes, takes] = [writesTools(render), takesResults(render)];
      this.ways = { writes, takes, tags: (writes || takes) && tagsResults(this.source, this.tokenizer.addedTokens) };
    }
    return this.ways;
  }

  private rendered(messages: readonly ChatMessage[], tools: readonly unknown[]): string {
    return this.template.render({ messages, ...(tools.length ? { tools } : {}), ...this.special });
  }
}

/** Return a special token's text; tokenizer_config.json has a string or {"content": ...}. */
function contentOf(token: unknown): string {
  const content = typeof token === "object" && token !== null ? (token as { content?: unknown }).content : token;
  return typeof content === "string" ? content : "";
}
