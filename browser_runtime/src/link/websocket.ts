/**
 * The WebSocket to the verifier: connect when needed, shake hands, receive, and reconnect.
 *
 * It reports what happens as events and never throws for a network reason; `send` drops what cannot be sent, because the
 * session repeats every message after the next link-up.
 */

import { clock } from "../clock.js";
import {
  type ClientMessage,
  computesIn,
  ERR_MISMATCH,
  ERR_UNKNOWN,
  type Hello,
  otherArithmetic,
  type ServerMessage,
  type Welcome,
} from "../protocol/messages.js";
import { decodeServer, encode, frameBytes, PROTOCOL_VERSION, STREAMS, WireError } from "../protocol/wire.js";
import { LinkRefused, verifierUrl } from "./address.js";
import { Authorization, type TokenProvider } from "./authorization.js";

/**
 * Seconds to wait for each phase of a connection: opening, with TCP and TLS; HELLO. A time-out doubles them, up to the
 * longest; a connection sets them to a number of its round trips, but at least the first.
 */
export const [CONNECT_TIMEOUT, LONGEST_TIMEOUT] = [5, 20];
const ROUND_TRIPS = 8;
/** Delays between attempts: the first retry comes fast, because an answer is waiting. */
const [FIRST_RETRY, LAST_RETRY] = [0.1, 3];
/** The longest delay after a refusal: another version may answer at this address, perhaps after an upgrade. */
const REFUSED_RETRY = 30;
/** Seconds, and round trips, that a silent connection has to answer before another one is dialled. */
const [HEAD_START, HEAD_START_TRIPS] = [0.25, 2];
/** Calls of `renew` after which a silent connection is given up, even if it answers probes. */
const RENEWALS = 10;
/**
 * Browsers send no pings. Instead, a message about a stream that is never opened tests the verifier, which refuses it at
 * once, even while the engine runs.
 */
export const PROBE_STREAM = STREAMS - 1;
const LOOPBACK = ["127.0.0.1", "[::1]", "localhost"];
/** Close code of a connection that ended without a closing handshake. */
export const ABNORMAL = 1006;
/** Meanings of a connection's end, in words; other ends bring their own. */
const CLOSED: Record<number, string> = {
  1000: "the verifier closed the connection",
  [ABNORMAL]: "the connection was cut",
  1012: "the verifier is restarting",
};

/**
 * up: rtt is the seconds between HELLO and WELCOME. down: reason: "" if nothing needs the link; refused: the verifier that
 * answered does not accept this device; another one at this address may.
 */
export type LinkEvent =
  | { type: "up"; welcome: Welcome; rtt: number }
  | { type: "down"; reason: string; refused: boolean }
  | { type: "arrived"; message: ServerMessage };

/** Bytes of WebSocket frames, headers and masks included, without TCP and TLS. */
export interface Traffic {
  up: number;
  down: number;
}

/** The part of a WebSocket that this module uses. */
export interface Socket {
  binaryType: string;
  /** Bytes given to `send` that are not on their way yet. */
  readonly bufferedAmount: number;
  onopen: ((event: never) => void) | null;
  onmessage: ((event: { data: unknown }) => void) | null;
  onclose: ((event: { code: number; reason: string }) => void) | null;
  send(data: Uint8Array<ArrayBuffer>): void;
  close(): void;
}

export type MakeSocket = (url: string, protocols: string[]) => Socket;

/** One connection whose handshake is done. */
interface Connection {
  socket: Socket;
  welcome: Welcome;
  rtt: number;
}

/** Keeps one connection to a verifier alive and hands events to `report`, in order; from the start, or as `stay` says. */
export class Link {
  readonly url: string;
  readonly traffic: Traffic = { up: 0, down: 0 };
  /** While there is a connection. */
  welcome: Welcome | null = null;
  private readonly authorization: Authorization;
  private socket: Socket | null = null;
  private closed = false;
  /** Ends the pause between two attempts, and the wait for a connection's end. */
  private wake: () => void = () => {};
  /** Dialling of another connection; `stop` ends it. */
  private beside: { stop: () => void } | null = null;
  /** Since the connection last spoke; whether it has spoken since WELCOME. */
  private renewals = 0;
  private spoke = false;
  /** Dial at once. */
  private changed = false;
  /** If false, nothing is dialled. */
  private needed = true;
  private hangingUp: ReturnType<typeof setTimeout> | undefined;
  /** End of the time given to `stay`, in milliseconds on a clock that runs while the computer sleeps. */
  private end = Number.POSITIVE_INFINITY;
  /** Seconds for each phase of the next connection; of the last one, a round trip. */
  private patience = CONNECT_TIMEOUT;
  private rtt = 0;
  /** Bytes not on their way when it last had to speak. */
  private unsent = Number.POSITIVE_INFINITY;

  /**
   * token: may be a function that returns it, called before the first dial and again after a failed handshake. Throws
   * LinkRefused.
   */
  constructor(
    server: string,
    private hello: Hello,
    private readonly report: (event: LinkEvent) => void,
    token: string | TokenProvider | null = null,
    private readonly makeSocket: MakeSocket = (url, protocols) => new WebSocket(url, protocols) as unknown as Socket,
  ) {
    const url = verifierUrl(server);
    this.url = url.href;
    this.authorization = new Authorization(token);
    if (token && url.protocol === "ws:" && !LOOPBACK.includes(url.hostname)) {
      throw new LinkRefused(`${url.href} would carry the token in clear text; use wss://`);
    }
  }

  /** Connect, receive, reconnect, while `stay` asks for it and until `close`. */
  async run(): Promise<void> {
    const online = () => this.networkChanged();
    const offline = () => this.lose("this device is offline");
    globalThis.addEventListener?.("online", online);
    globalThis.addEventListener?.("offline", offline);
    try {
      let delay = FIRST_RETRY;
      while (!this.closed) {
        if (!this.needed) {
          await new Promise<void>(resolve => (this.wake = resolve));
          continue;
        }
        this.changed = false;
        const refused = await this.attempt();
        if (refused === null) this.changed = false;
        const begun = clock();
        while (this.socket) await new Promise<void>(resolve => (this.wake = resolve));
        // else a server that greets and hangs up would be dialled ten times a second
        if (refused === null && (this.spoke || clock() > begun + LAST_RETRY)) delay = FIRST_RETRY;
        if (!this.changed) await this.sleep(delay * (0.7 + 0.6 * Math.random()));
        delay = this.changed ? FIRST_RETRY : Math.min(refused ? REFUSED_RETRY : LAST_RETRY, delay * 2);
      }
    } finally {
      globalThis.removeEventListener?.("online", online);
      globalThis.removeEventListener?.("offline", offline);
    }
  }

  /** Send `last`, hang up and never dial again. */
  close(last: ClientMessage): void {
    this.closed = true;
    clearTimeout(this.hangingUp);
    this.send(last);
    this.lose("closed");
    this.wake();
  }

  /**
   * Dial, and stay connected for `seconds`; infinity: until the next call; 0: hang up and stop dialling. A connection that
   * outlived that time while the computer slept is dialled anew.
   */
  stay(seconds: number): void {
    if (this.closed) return;
    clearTimeout(this.hangingUp);
    if (seconds <= 0) {
      this.rest();
      return;
    }
    const stale = Date.now() > this.end;
    this.end = Date.now() + 1000 * seconds;
    if (seconds < Number.POSITIVE_INFINITY) this.hangingUp = setTimeout(() => this.rest(), 1000 * seconds);
    if (!this.needed) {
      this.needed = this.changed = true;
      this.wake();
    } else if (stale) {
      this.networkChanged();
    }
  }

  /** Hang up, and forget the last error. */
  private rest(): void {
    this.needed = false;
    this.end = Number.POSITIVE_INFINITY;
    if (this.socket) this.lose("");
    else this.report({ type: "down", reason: "", refused: false });
  }

  /** Dial at once, over the present network, if a connection is needed. */
  networkChanged(): void {
    if (!this.needed) return;
    this.patience = CONNECT_TIMEOUT;
    this.lose("the network has changed");
    this.changed = true;
    this.wake();
  }

  /** Send `message` if there is a connection; a failure is reported as the link's end. */
  send(message: ClientMessage): void {
    if (!this.socket) return;
    const frame = encode(message);
    this.socket.send(frame);
    this.traffic.up += frameBytes(frame.length, true);
  }

  /**
   * From now on HELLO asks for verifiers with this `arithmetic`; "": any. A connection to another one ends.
   *
   * Without a connection, it is dialled at once: a verifier that refused before may fit now.
   */
  pin(arithmetic: string): void {
    const changed = arithmetic !== this.hello.arithmetic;
    this.hello = { ...this.hello, arithmetic };
    if (!this.welcome && changed) {
      this.changed = true;
      this.wake();
    } else if (this.welcome && !computesIn(this.welcome, arithmetic)) {
      this.lose(otherArithmetic(arithmetic, this.welcome.arithmetic), true);
    }
  }

  /**
   * Dial another connection beside a silent one, and keep the one that speaks first.
   *
   * A half-open connection never does; one that waits for a busy verifier answers a probe at once; and one through an outage
   * may speak again before a new one is there. If dialling fails, the silent one is given up too. One that still accepts
   * data is not silent: a long message on a slow link is on its way.
   */
  renew(): void {
    if (!this.socket) return;
    const before = this.unsent;
    this.unsent = this.socket.bufferedAmount;
    if (this.unsent > 0 && this.unsent < before) return;
    this.renewals++;
    if (this.renewals > RENEWALS) this.lose("silent for too long");
    else if (!this.beside) void this.dialBeside();
  }

  /** Dial once. Returns null if there is a connection now; else whether a verifier refused us. */
  private async attempt(): Promise<boolean | null> {
    try {
      const connection = await this.dial();
      if (this.closed || !this.needed) connection.socket.close();
      else this.take(connection);
      return null;
    } catch (error) {
      const refused = error instanceof LinkRefused;
      if (!this.closed && this.needed) this.report({ type: "down", reason: reasonOf(error), refused });
      return refused;
    }
  }

  /** Return a new connection after its handshake. */
  private async dial(stopped?: Promise<never>): Promise<Connection> {
    const socket = this.makeSocket(this.url, await this.authorization.protocols());
    socket.binaryType = "arraybuffer";
    let timer: ReturnType<typeof setTimeout> | undefined;
    const greeted = new Promise<Connection>((resolve, reject) => {
      let asked: number | null = null;
      const wait = () => {
        clearTimeout(timer);
        timer = setTimeout(() => {
          this.patience = Math.min(2 * this.patience, LONGEST_TIMEOUT);
          reject(new Error("no answer in time"));
        }, 1000 * this.patience);
      };
      wait();
      socket.onopen = () => {
        wait();
        asked = clock();
        socket.send(encode(this.hello));
      };
      socket.onclose = ({ code, reason }) => {
        if (asked === null) this.authorization.failed();
        reject(new Error(asked === null ? reason || UNREACHED : closedBy(code, reason)));
      };
      socket.onmessage = ({ data }) => {
        try {
          resolve({ socket, welcome: greeting(data), rtt: clock() - (asked ?? clock()) });
        } catch (error) {
          reject(error);
        }
      };
    });
    return Promise.race(stopped ? [greeted, stopped] : [greeted])
      .catch(error => {
        abandon(socket);
        throw error;
      })
      .finally(() => clearTimeout(timer));
  }

  /** Make `connection` the link. */
  private take({ socket, welcome, rtt }: Connection): void {
    this.socket = socket;
    this.welcome = welcome;
    this.rtt = rtt;
    this.patience = Math.min(Math.max(CONNECT_TIMEOUT, ROUND_TRIPS * rtt), LONGEST_TIMEOUT);
    this.unsent = Number.POSITIVE_INFINITY;
    this.renewals = 0;
    this.spoke = false;
    socket.onmessage = ({ data }) => this.arrived(data);
    socket.onclose = ({ code, reason }) => this.lose(closedBy(code, reason));
    this.report({ type: "up", welcome, rtt });
  }

  private arrived(data: unknown): void {
    this.dialNoMore();
    this.renewals = 0;
    this.spoke = true;
    try {
      const frame = bytesOf(data);
      const message = decodeServer(frame);
      this.traffic.down += frameBytes(frame.length, false);
      if (!isProbe(message)) this.report({ type: "arrived", message });
    } catch (error) {
      this.lose(reasonOf(error));
    }
  }

  /** End the connection, if there is one, without a handshake: half-open links do not answer a close. */
  private lose(reason: string, refused = false): void {
    this.dialNoMore();
    if (!this.socket) return;
    abandon(this.socket);
    this.socket = null;
    this.welcome = null;
    this.report({ type: "down", reason, refused });
    this.wake();
  }

  /** Stop dialling another connection, as this one has spoken or ended. */
  private dialNoMore(): void {
    this.beside?.stop();
    this.beside = null;
  }

  private async dialBeside(): Promise<void> {
    let stop = () => {};
    const stopped = new Promise<never>((_, reject) => (stop = () => reject(STOPPED)));
    stopped.catch(() => {});
    this.beside = { stop };
    this.send({ type: "Cancel", stream: PROBE_STREAM });
    try {
      const wait = 1000 * Math.max(HEAD_START, HEAD_START_TRIPS * this.rtt);
      await Promise.race([new Promise(resolve => setTimeout(resolve, wait)), stopped]);
      const connection = await this.dial(stopped);
      this.beside = null;
      this.lose("silent; another connection spoke first");
      this.take(connection);
    } catch (error) {
      if (error === STOPPED) return;
      this.beside = null;
      this.lose(`silent, and dialling again failed: ${reasonOf(error)}`);
    }
  }

  private sleep(seconds: number): Promise<void> {
    if (this.closed) return Promise.resolve();
    return new Promise(resolve => {
      const timer = setTimeout(resolve, 1000 * seconds);
      this.wake = () => {
        clearTimeout(timer);
        resolve();
      };
    });
  }
}

const STOPPED = new Error("stopped");
/** The message for a refused handshake and for an address without an answer, which browsers do not distinguish. */
const UNREACHED = "no connection: the verifier is not there, or it refuses this page's token or origin";

/** Return the first message of a verifier that accepts us. */
function greeting(data: unknown): Welcome {
  const answer = decodeServer(bytesOf(data));
  if (answer.type === "Error") {
    if (answer.code === ERR_MISMATCH) throw new LinkRefused(answer.text);
    throw new WireError(`the verifier refused: ${answer.text}`);
  }
  if (answer.type !== "Welcome" || answer.protocol !== PROTOCOL_VERSION) {
    throw new LinkRefused("the other side is not an Outrider verifier of this protocol version; update one of them");
  }
  return answer;
}

function bytesOf(data: unknown): Uint8Array {
  if (data instanceof ArrayBuffer) return new Uint8Array(data);
  throw new WireError("a text frame");
}

function isProbe(message: ServerMessage): boolean {
  return message.type === "Error" && message.code === ERR_UNKNOWN && message.stream === PROBE_STREAM;
}

function abandon(socket: Socket): void {
  socket.onopen = socket.onmessage = socket.onclose = null;
  socket.close();
}

function closedBy(code: number, reason: string): string {
  if (code === ABNORMAL && reason) return reason;
  return CLOSED[code] ?? (reason || `the verifier closed the connection with code ${code}`);
}

function reasonOf(error: unknown): string {
  return error instanceof Error ? error.message : String(error);
}
