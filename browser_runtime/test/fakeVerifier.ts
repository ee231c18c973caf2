/** A verifier in this process: its target's text is computed by a function. Sockets to it can be cut or fall silent. */

import { decode, encode as pack } from "@msgpack/msgpack";
import type { MakeSocket, Socket } from "../src/link/websocket.js";
import { fmix32 } from "../src/protocol/noise.js";

export const EOS = 0;
export const ROW_BYTES = 6; // heads 1, headDim 2
export const ALPHABET = 40;

/** Return the target's token after `text`; it ends answers now and then. */
export function target(text: readonly number[], arithmetic = ""): number {
  const h = text.slice(-3).reduce((hash, token) => fmix32(hash ^ token), text.length + 7 * arithmetic.length);
  return h % 61 === 0 ? EOS : 1 + (h % (ALPHABET - 1));
}

/** Return the text of plain decoding after `prompt`. */
export function plain(prompt: readonly number[], maxNew: number, arithmetic = ""): number[] {
  const text = [...prompt];
  while (text.length < prompt.length + maxNew) {
    text.push(target(text, arithmetic));
    if (text.at(-1) === EOS) break;
  }
  return text.slice(prompt.length);
}

export class FakeVerifier {
  readonly received: string[] = [];
  readonly subprotocols: string[][] = [];
  hash = "target";
  /** The supported constraints, as bits of WELCOME, and the constraints of OPENs; they do not change its target's text. */
  constraints = 0;
  /** The cost curve of WELCOME, packed. */
  costs = new Uint8Array();
  readonly held: unknown[] = [];
  /** The arithmetics of the verifiers here, one connection after another; "": an older one, which reports none. */
  fleet = [""];
  /** Seconds until a reply. */
  delay = 0.001;
  sockets: FakeSocket[] = [];
  /** Makes a socket to this verifier. */
  readonly makeSocket: MakeSocket = (_url, protocols) => {
    this.subprotocols.push(protocols);
    const socket = new FakeSocket(this, this.fleet[(this.subprotocols.length - 1) % this.fleet.length]);
    this.sockets.push(socket);
    return socket;
  };

  /** End all connections, as a killed process does. */
  kill(): void {
    for (const socket of this.sockets) socket.onclose?.({ code: 1006, reason: "" });
    this.sockets = [];
  }
}

class FakeSocket implements Socket {
  binaryType = "";
  bufferedAmount = 0;
  onopen: Socket["onopen"] = null;
  onmessage: Socket["onmessage"] = null;
  onclose: Socket["onclose"] = null;
  private text: number[] = [];
  private streaming = 0;

  constructor(
    private readonly verifier: FakeVerifier,
    private readonly arithmetic: string,
  ) {
    setTimeout(() => this.onopen?.(undefined as never), 0);
  }

  close(): void {
    this.streaming++;
    this.verifier.sockets = this.verifier.sockets.filter(other => other !== this);
  }

  send(frame: Uint8Array): void {
    let end = frame.length;
    while (frame[end - 1] === 0) end--;
    const [type, ...fields] = decode(frame.subarray(0, end - 1), { useBigInt64: true }) as never[];
    setTimeout(() => this.handle(Number(type), fields), 1000 * this.verifier.delay);
  }

  private handle(type: number, fields: never[]): void {
    const names = ["", "Hello", "", "Open", "", "", "Verify", "", "", "Generate", "Cancel", "Close"];
    this.verifier.received.push(names[type]);
    const [stream, seq, baseLen] = fields as unknown as number[];
    if (type === 1) {
      const [, hash, , , begun = ""] = fields as unknown as string[];
      const here = this.arithmetic;
      const differ = hash !== this.verifier.hash ? "target differs" : here && begun && begun !== here ? "begun in" : "";
      const welcome = [2, 1, "target", "drafter", 64, 512, 64, 32];
      const { constraints, costs } = this.verifier;
      if (here || constraints || costs.length) welcome.push(...(["", costs, constraints] as never[]));
      if (here) welcome.push(here as never);
      this.reply(differ ? [12, 2, differ, -1, 0] : welcome);
    } else if (type === 3) {
      this.text = ids(fields[3]);
      this.verifier.held.push(fields[6]);
      this.reply([4, stream, this.text.length, 0]);
    } else if (type === 6) {
      if (baseLen !== this.text.length) this.reply([8, stream, this.text.length]);
      else this.verify(stream, seq, ids(fields[3]), [...(fields[4] as Uint8Array)]);
    } else if (type === 9) {
      this.generate(stream, seq, ++this.streaming);
    } else if (type === 10) {
      if (!this.text.length) this.reply([12, 4, "no stream", stream, 0]);
      this.streaming++;
    }
  }

  private verify(stream: number, seq: number, tokens: number[], parents: number[]): void {
    const base = this.text.length;
    const accepted: number[] = [];
    let at = 255;
    for (;;) {
      const token = target(this.text, this.arithmetic);
      this.text.push(token);
      const node = tokens.findIndex((one, index) => one === token && parents[index] === at);
      if (node < 0 || token === EOS) break;
      accepted.push((at = node));
    }
    this.verdict(stream, seq, base, accepted);
  }

  private generate(stream: number, seq: number, run: number): void {
    if (run !== this.streaming || !this.verifier.sockets.includes(this)) return;
    const base = this.text.length;
    this.text.push(target(this.text, this.arithmetic));
    this.verdict(stream, seq, base, []);
    if (this.text.at(-1) !== EOS) setTimeout(() => this.generate(stream, seq, run), 1000 * this.verifier.delay);
  }

  private verdict(stream: number, seq: number, base: number, accepted: number[]): void {
    const bonus = this.text.at(-1)!;
    const rows = new Uint8Array(ROW_BYTES * (accepted.length + 1));
    const finish = bonus === EOS ? 1 : 0;
    this.reply([7, stream, seq, base, Uint8Array.from(accepted), bonus, finish, rows, 32, 10, 500]);
  }

  private reply(values: unknown[]): void {
    const data = Uint8Array.of(...pack(values), 0x80);
    this.onmessage?.({ data: data.buffer });
  }
}

function ids(data: unknown): number[] {
  const bytes = data as Uint8Array;
  return Array.from(new Uint32Array(bytes.slice().buffer));
}
