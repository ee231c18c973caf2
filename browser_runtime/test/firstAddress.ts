/** Prints the seconds until a connection to the address in the argument, at best. */

import { clock } from "../src/clock.js";
import { Link } from "../src/link/websocket.js";
import { PROTOCOL_VERSION } from "../src/protocol/wire.js";

const names = { targetHash: "target", drafterHash: "drafter", client: "outrider-web", arithmetic: "" };

function dial(): Promise<number> {
  const begun = clock();
  return new Promise((resolve, reject) => {
    const hello = { type: "Hello" as const, protocol: PROTOCOL_VERSION, ...names };
    const link = new Link(process.argv[2], hello, event => {
      if (event.type === "up") resolve(clock() - begun);
      else reject(new Error(JSON.stringify(event)));
    });
    void link.run();
  });
}

console.log(Math.min(await dial(), await dial(), await dial()));
process.exit(0);
