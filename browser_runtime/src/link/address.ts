/** Addresses of verifiers. */

const PATH = "/v1/verify";

/** The link was refused: invalid address, other target, drafter or protocol, no valid token. */
export class LinkRefused extends Error {}

/**
 * `host:port`, `ws://host:port`, `wss://...` or the address of a page -> the WebSocket URL of the verifier's endpoint.
 *
 * Throws LinkRefused for an address that cannot be dialled.
 */
export function verifierUrl(server: string): URL {
  const text = (server.includes("://") ? server : `ws://${server}`).replace(/^http/, "ws").replace(/\/+$/, "");
  const url = /\s/.test(text) ? null : parsed(text);
  if (!url || !/^wss?:$/.test(url.protocol) || !url.hostname || url.port === "0") {
    throw new LinkRefused(`"${server}" is not an address; write host:port, ws://host:port or wss://host`);
  }
  if (!url.pathname.endsWith(PATH)) url.pathname = url.pathname.replace(/\/$/, "") + PATH;
  return url;
}

function parsed(text: string): URL | null {
  try {
    return new URL(text);
  } catch {
    return null;
  }
}
