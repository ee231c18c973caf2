/** A network whose faults can be switched on by hand: for demonstrations and tests. */

import { ABNORMAL, type MakeSocket, type Socket } from "./websocket.js";

/** Sockets made by `makeSocket` behave as the fields say, at any time. */
export class Weather {
  /** Nothing gets through in either direction, silently. */
  silent = false;
  /** Seconds by which each message is delayed, in each direction. */
  delay = 0;
  private isCut = false;
  private readonly sockets = new Set<DelayedSocket>();

  constructor(
    private readonly make: MakeSocket = (url, protocols) => new WebSocket(url, protocols) as unknown as Socket,
  ) {}

  /** Whether the link is cut: connections are closed, and dialling fails. */
  get cut(): boolean {
    return this.isCut;
  }

  set cut(cut: boolean) {
    this.isCut = cut;
    if (cut) for (const socket of [...this.sockets]) socket.break();
  }

  readonly makeSocket: MakeSocket = (url, protocols) => {
    const socket = new DelayedSocket(this.isCut ? null : this.make(url, protocols), this);
    this.sockets.add(socket);
    return socket;
  };

  forget(socket: DelayedSocket): void {
    this.sockets.delete(socket);
  }
}

class DelayedSocket implements Socket {
  binaryType = "arraybuffer";
  onopen: Socket["onopen"] = null;
  onmessage: Socket["onmessage"] = null;
  onclose: Socket["onclose"] = null;
  /** When the last message of each direction arrives: none overtakes another. */
  private lastUp = 0;
  private lastDown = 0;

  constructor(
    private readonly inner: Socket | null,
    private readonly weather: Weather,
  ) {
    if (!inner) {
      setTimeout(() => this.break());
      return;
    }
    inner.binaryType = "arraybuffer";
    inner.onopen = event => this.onopen?.(event);
    inner.onmessage = event => {
      if (!this.weather.silent) this.lastDown = this.later(this.lastDown, () => this.onmessage?.(event));
    };
    inner.onclose = event => {
      this.weather.forget(this);
      this.onclose?.(event);
    };
  }

  send(data: Uint8Array<ArrayBuffer>): void {
    if (!this.weather.silent) this.lastUp = this.later(this.lastUp, () => this.inner?.send(data));
  }

  get bufferedAmount(): number {
    return this.inner?.bufferedAmount ?? 0;
  }

  close(): void {
    this.weather.forget(this);
    this.inner?.close();
  }

  /** End without a closing handshake. */
  break(): void {
    this.weather.forget(this);
    if (this.inner) {
      this.inner.onopen = this.inner.onmessage = this.inner.onclose = null;
      this.inner.close();
    }
    this.onclose?.({ code: ABNORMAL, reason: "the link is cut by hand" });
  }

  /** Run `deliver` after the delay, and after earlier messages; return when. */
  private later(last: number, deliver: () => void): number {
    const now = performance.now();
    const due = Math.max(last, now + 1000 * this.weather.delay);
    if (due <= now) deliver();
    else setTimeout(deliver, due - now);
    return due;
  }
}
