/** The token that a link sends: as a subprotocol, as browsers set no headers. */

import { SUBPROTOCOL } from "../protocol/wire.js";
import { LinkRefused } from "./address.js";

/** Returns a bearer token; called again when the last one may have expired. */
export type TokenProvider = () => Promise<string>;

/** A fixed token, one that a provider gives, or none. */
export class Authorization {
  /** The result of `token`; null: it must be asked. */
  private bearer: string | null = null;

  /** Throws LinkRefused for a token that cannot be sent. */
  constructor(private readonly token: string | TokenProvider | null) {
    if (typeof token === "string") checkToken(token);
  }

  /** Subprotocols of the handshake. Throws the provider's errors, and LinkRefused for a token that cannot be sent. */
  async protocols(): Promise<string[]> {
    if (!this.token) return [SUBPROTOCOL];
    const token = this.bearer ?? (typeof this.token === "string" ? this.token : await this.token());
    checkToken(token);
    this.bearer = token;
    return [SUBPROTOCOL, `bearer.${token}`];
  }

  /** The handshake failed: browsers do not tell whether by HTTP 401, so the token may have expired. */
  failed(): void {
    this.bearer = null;
  }
}

function checkToken(token: string): void {
  if (/^[\w!#$%&'*+.^`|~-]*$/.test(token)) return;
  throw new LinkRefused("the token holds characters that a browser cannot send; ask for another one");
}
