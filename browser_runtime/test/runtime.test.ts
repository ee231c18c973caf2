import assert from "node:assert/strict";
import { test } from "node:test";
import { DrafterFailed } from "../src/answer/answer.js";
import { LocalDrafter } from "../src/answer/drafterThread.js";
import { Drafter, NO_DRAFT, treeShape } from "../src/drafting/drafter.js";
import type { Event } from "../src/events.js";
import { LinkRefused, verifierUrl } from "../src/link/address.js";
import { Weather } from "../src/link/weather.js";
import { CONNECT_TIMEOUT, Link, type Socket } from "../src/link/websocket.js";
import { OBEYS_BIAS, OBEYS_JSON } from "../src/protocol/constraint.js";
import { Sampling } from "../src/protocol/sampling.js";
import { EdgeRuntime, type Request } from "../src/runtime.js";
import type { AnswerRecord } from "../src/session/record.js";
import { EOS, FakeVerifier, plain } from "./fakeVerifier.js";
import { HashEngine } from "./hashEngine.js";
import { bundle, drafterOf, draftIds, PROMPT, read, runtimeOf, shape } from "./runtimes.js";

test("an answer is the target's own, by trees and by a stream", async () => {
  for (const mode of ["tree", "stream"] as const) {
    const verifier = new FakeVerifier();
    const runtime = runtimeOf(verifier, { mode });
    for (const prompt of [PROMPT, [...PROMPT, 7], [1]]) {
      const finished = await read(runtime.generate(prompt, { maxNewTokens: 60 }));
      assert.deepEqual(finished.tokenIds, plain(prompt, 60), mode);
      assert.equal(finished.stats.tokens, finished.tokenIds.length);
      assert.ok(finished.stats.bytesUp > 0 && finished.stats.bytesDown > 0);
      assert.equal(finished.stats.streamed > 0, mode === "stream");
      assert.equal(finished.provisional, "");
    }
    await runtime.close();
  }
});

test("what was said before is remembered until it is forgotten, also where the answer is left", async () => {
  const drafter = drafterOf();
  const calls: string[] = [];
  drafter.remember = text => void calls.push(`remember ${text.slice(0, PROMPT.length)}`);
  drafter.forget = () => void calls.push("forget");
  const { makeSocket } = new FakeVerifier();
  const runtime = new EdgeRuntime(bundle, drafter, "127.0.0.1:1", { makeSocket });
  const ask = (prompt: number[]) => read(runtime.generate(prompt, { maxNewTokens: 4 }));
  await ask(PROMPT);
  await ask([1, 2, 3]);
  await ask([1, 2, 3, ...(await ask([1, 2, 3])).tokenIds, 7]); // a further turn of the same conversation
  assert.deepEqual(calls, [`remember ${PROMPT}`, "remember 1,2,3"]);
  calls.length = 0;
  await read(runtime.generate(PROMPT, { maxNewTokens: 50 }), event => {
    if (event.type !== "verified" || calls.includes("forget")) return;
    runtime.cancel();
    runtime.forget();
  });
  assert.deepEqual(calls, ["remember 1,2,3", "forget", "forget"]);
  await ask([1, 2, 3]);
  await ask(PROMPT);
  assert.deepEqual(calls.slice(3), ["remember 1,2,3"]);
  await runtime.close();
});

test("a new device knows what its drafting takes, where it was measured", async () => {
  const costs = new Uint8Array(Uint32Array.of(1, 1e9).buffer);
  const begun = async (stepSeconds: number) => {
    const verifier = Object.assign(new FakeVerifier(), { costs });
    const drafter = Object.assign(drafterOf(), { started: { stepSeconds } });
    const runtime = new EdgeRuntime(bundle, drafter, "127.0.0.1:1", { makeSocket: verifier.makeSocket });
    await read(runtime.generate(PROMPT, { maxNewTokens: 4 }));
    await runtime.close();
    return verifier.received.find(name => name === "Generate" || name === "Verify");
  };
  assert.equal(await begun(1e6), "Generate");
  assert.equal(await begun(0), "Verify");
});

test("ten idle minutes bring no frame and no dial after hanging up", async context => {
  const { timers } = context.mock;
  timers.enable({ apis: ["setTimeout", "Date"] });
  const pass = async (seconds: number) => {
    for (let tenths = 0; tenths < 10 * seconds; tenths++) {
      timers.tick(100);
      await new Promise(resolve => setImmediate(resolve));
    }
  };
  const verifier = new FakeVerifier();
  const runtime = runtimeOf(verifier);
  const dials = () => verifier.subprotocols.length;
  await pass(59);
  assert.ok(runtime.connected);
  await pass(2);
  assert.deepEqual([runtime.connected, runtime.linkError, dials()], [false, "", 1]);
  const frames = verifier.received.length;
  for (let minute = 0; minute < 10; minute++) {
    await pass(60);
    runtime.networkChanged();
  }
  assert.deepEqual([verifier.received.length, dials()], [frames, 1]);
  let tokens: readonly number[] | null = null;
  void read(runtime.generate(PROMPT, { maxNewTokens: 20 })).then(end => (tokens = end.tokenIds));
  while (!tokens) await pass(0.1);
  assert.deepEqual([tokens, dials()], [plain(PROMPT, 20), 2]);
  runtime.networkChanged();
  await pass(1);
  assert.deepEqual([runtime.connected, dials()], [true, 3]);
  runtime.background();
  await pass(600);
  assert.deepEqual([runtime.connected, dials()], [false, 3]);
  runtime.foreground();
  await pass(1);
  assert.deepEqual([runtime.connected, dials()], [true, 4]);
  timers.setTime(Date.now() + 3_600_000); // the computer slept
  runtime.foreground();
  await pass(1);
  assert.deepEqual([runtime.connected, dials()], [true, 5]);
  await runtime.close();
});

test("a token is asked for again when a dial failed", async () => {
  const verifier = new FakeVerifier();
  const refused = (): Socket => {
    const socket = { binaryType: "", bufferedAmount: 0, onopen: null, onmessage: null, send() {}, close() {} };
    const refusing: Socket = { ...socket, onclose: null };
    setTimeout(() => refusing.onclose?.({ code: 1006, reason: "" }));
    return refusing;
  };
  const makeSocket = (url: string, protocols: string[]) =>
    protocols.includes("bearer.first") ? refused() : verifier.makeSocket(url, protocols);
  const tokens = ["first", "two words", "second", "third"];
  const runtime = runtimeOf(verifier, { makeSocket, token: async () => tokens.shift()! });
  const answers = [await read(runtime.generate(PROMPT, { maxNewTokens: 20 }))];
  runtime.networkChanged();
  answers.push(await read(runtime.generate(PROMPT, { maxNewTokens: 20 })));
  for (const { tokenIds } of answers) assert.deepEqual(tokenIds, plain(PROMPT, 20));
  assert.deepEqual(
    verifier.subprotocols,
    [1, 2].map(() => ["outrider.v1", "bearer.second"]),
  );
  await runtime.close();
});

test("a token is kept where the handshake was done", async () => {
  const verifier = new FakeVerifier();
  const tokens = ["first", "second"];
  verifier.hash = "another"; // HELLO is refused, not the token
  const runtime = runtimeOf(verifier, { token: async () => tokens.shift()! });
  const answer = read(runtime.generate(PROMPT, { maxNewTokens: 20 }));
  while (verifier.subprotocols.length < 2) await new Promise(resolve => setTimeout(resolve, 5));
  verifier.hash = "target";
  assert.deepEqual((await answer).tokenIds, plain(PROMPT, 20));
  for (const protocols of verifier.subprotocols) assert.deepEqual(protocols, ["outrider.v1", "bearer.first"]);
  await runtime.close();
});

test("a cut at any moment, a silence and a killed verifier lose nothing", async () => {
  const cut = async (seed: number) => {
    const verifier = new FakeVerifier();
    const weather = new Weather(verifier.makeSocket);
    const mode = seed % 2 ? ("tree" as const) : ("stream" as const);
    const patience = { open: 0.1, silence: 0.05 };
    const runtime = runtimeOf(weather, { mode, patience, policy: { offlineRate: 500, offline: "continue" } });
    const faults = [() => (weather.cut = true), () => (weather.silent = true), () => verifier.kill()];
    let [seen, alone] = [0, 0];
    const finished = await read(runtime.generate(PROMPT, { maxNewTokens: 120 }), event => {
      seen++;
      const written = event.type === "provisional" ? event.token : null;
      alone += written === null ? 0 : 1;
      if (seen === 2 + (seed % 7)) faults[seed % 3]();
      if (alone > 4 * (seed % 5) || written === EOS) weather.cut = weather.silent = false;
    });
    assert.deepEqual(finished.tokenIds, plain(PROMPT, 120), `${seed}`);
    assert.equal(finished.reason, finished.tokenIds.at(-1) === EOS ? "stop" : "length");
    if (seed % 3 < 2) assert.ok(alone > 0, `${seed}: nothing was written alone`);
    await runtime.close();
  };
  await Promise.all(Array.from({ length: 50 }, (_, seed) => cut(seed)));
});

test("a page that is closed in mid-answer goes on from its record, in text and on the screen", async () => {
  const verifier = new FakeVerifier();
  const first = runtimeOf(verifier, { mode: "tree" });
  let written = "";
  let shown = "";
  for await (const event of first.generate(PROMPT, { maxNewTokens: 100, temperature: 0.7, seed: 2n ** 62n + 1n })) {
    written = JSON.stringify(first.record);
    shown = event.verified;
    if (event.verified.length > 20) break;
  }
  assert.ok(shown.length > 20);
  await first.close();
  const second = runtimeOf(verifier);
  const record: AnswerRecord = JSON.parse(written);
  const finished = await read(second.resume(record), event => assert.ok(event.verified.startsWith(shown)));
  assert.deepEqual(finished.tokenIds, plain(PROMPT, 100));
  assert.throws(() => second.resume({ ...record, target: "another" }), RangeError);
  assert.throws(() => second.resume({ ...record, version: 7 }), RangeError);
  await second.close();
});

test("a seed of -1 is drawn anew for each answer", async () => {
  const runtime = runtimeOf(new FakeVerifier());
  const seeds = new Set<string>();
  for (const seed of [-1, -1n, undefined]) {
    for await (const _ of runtime.generate(PROMPT, { maxNewTokens: 9, temperature: 0.7, seed }))
      if (runtime.record) seeds.add(runtime.record.sampling.seed);
  }
  assert.equal(seeds.size, 3);
  assert.throws(() => runtime.generate(PROMPT, { seed: -2 }), RangeError);
  await runtime.close();
});

test("no answer mixes two arithmetics, and the next one takes what there is", async () => {
  const [whole, eight] = ["torch-float32", "onnx-8-v6"];
  assert.notDeepEqual(plain(PROMPT, 60, whole), plain(PROMPT, 60, eight));
  const verifier = new FakeVerifier();
  verifier.fleet = [whole, eight, eight];
  const patience = { open: 0.1, silence: 0.05, offline: 3 };
  const first = runtimeOf(verifier, { mode: "tree", patience, policy: { offlineRate: 500 } });
  let written = "";
  let seen = 0;
  const said: string[] = [];
  const finished = await read(first.generate(PROMPT, { maxNewTokens: 60 }), event => {
    if (event.type === "verified" && seen++ < 2) {
      written = JSON.stringify(first.record);
      verifier.kill();
    }
    if (event.type === "link") said.push(event.detail);
  });
  assert.deepEqual(finished.tokenIds, plain(PROMPT, 60, whole));
  assert.ok(
    said.some(detail => detail.includes("begun in")),
    said.join("; "),
  );
  const record: AnswerRecord = JSON.parse(written);
  assert.equal(record.arithmetic, whole);
  assert.throws(() => first.resume({ ...record, arithmetic: "two\nlines" }), RangeError);
  await first.close();

  verifier.fleet = [eight];
  const second = runtimeOf(verifier, { mode: "tree", patience: { ...patience, offline: 0.5 } });
  while (!second.connected) await new Promise(resolve => setTimeout(resolve, 5));
  const alone = await read(second.resume(record)); // no verifier here has that arithmetic: as for another target
  assert.equal(alone.reason, "unreachable");
  assert.match(alone.detail, /begun in/);
  const next = await read(second.generate(PROMPT, { maxNewTokens: 60 }));
  assert.deepEqual(next.tokenIds, plain(PROMPT, 60, eight));
  verifier.fleet = [eight, whole];
  verifier.kill();
  const resumed = await read(second.resume(record));
  assert.deepEqual(resumed.tokenIds, plain(PROMPT, 60, whole));
  await second.close();
});

test("alone, at its end, cancelled and twice at once", async () => {
  const runtime = runtimeOf(null);
  const finished = await read(runtime.generate(PROMPT, { maxNewTokens: 30 }));
  assert.equal(finished.reason, finished.tokenIds.at(-1) === EOS ? "stop" : "length");
  assert.equal(finished.verified, "");
  assert.ok(finished.provisional.length > 0);
  const left = runtime.generate(PROMPT);
  await left.next();
  await assert.rejects(read(runtime.generate(PROMPT)), /an answer is on its way/);
  await left.return(undefined);
  await read(runtime.generate(PROMPT, { maxNewTokens: 3 }));
  assert.throws(() => runtime.generate([]), RangeError);
  assert.throws(() => runtime.generate([99]), RangeError);
  assert.throws(() => runtime.generate(PROMPT, { maxNewTokens: 0 }), RangeError);
  assert.throws(() => runtime.generate(PROMPT, { temperature: -1 }), RangeError);
  await runtime.close();
  await assert.rejects(read(runtime.generate(PROMPT)), /closed/);
});

test("what a cancelled answer asked for fails alone", async () => {
  const engine = new HashEngine(Array.from(draftIds), 2, 2, []);
  let fail = () => {};
  const stuck = new Promise<void>(resolve => {
    fail = resolve;
  });
  const step = engine.step.bind(engine);
  let steps = 0;
  engine.step = async (...inputs) => {
    if (steps++) return step(...inputs);
    await stuck;
    throw new Error("out of memory");
  };
  const drafter = new Drafter(engine, { draftIds, rowShape: shape, saKvHeads: 1, maxContext: 200 });
  const runtime = new EdgeRuntime(bundle, new LocalDrafter(drafter, async () => {}), null, {});
  const left = runtime.generate(PROMPT);
  await left.next();
  await new Promise(resolve => setTimeout(resolve, 20));
  assert.equal(steps, 1);
  await left.return(undefined);
  const finished = await read(runtime.generate(PROMPT, { maxNewTokens: 4 }), fail);
  assert.equal(finished.tokenIds.length, 4);
  await runtime.close();
});

test("an engine that fails ends the answer as failed, and is thrown behind its last event", async () => {
  const engine = new HashEngine(Array.from(draftIds), 2, 2, []);
  engine.step = () => Promise.reject(new Error("out of memory"));
  const drafter = new Drafter(engine, { draftIds, rowShape: shape, saKvHeads: 1, maxContext: 200 });
  const runtime = new EdgeRuntime(bundle, new LocalDrafter(drafter, async () => {}), null, {});
  const events: Event[] = [];
  await assert.rejects(
    read(runtime.generate(PROMPT), event => events.push(event)),
    DrafterFailed,
  );
  const last = events.at(-1);
  assert.ok(last?.type === "finished" && last.reason === "failed");
  assert.match(last.detail, /engine failed: out of memory/);
  await runtime.close();
});

test("a tree for comparison ends when the target falls silent, and nothing comes of it", async () => {
  const drafter = drafterOf();
  const compare = () => drafter.draft(PROMPT, new Sampling(), treeShape({ gain: 0 }), null);
  drafter.want("one", false);
  assert.equal((await compare()).result.tree.size, 32);
  drafter.want("two", true);
  assert.equal((await compare()).result, NO_DRAFT);
  await drafter.close();
});

test("an answer that goes on after a pause says so", async () => {
  const runtime = runtimeOf(null);
  const shown: string[] = [];
  await read(runtime.generate(PROMPT, { maxNewTokens: 6 }), event => {
    if (event.type === "link") {
      shown.push(event.state);
      if (event.state === "waiting") runtime.proceed();
    } else if (event.type === "provisional" && shown.length === 2) runtime.pause();
  });
  assert.deepEqual(shown, ["connecting", "alone", "waiting", "alone"]);
  await runtime.close();
});

test("without an understudy the drafter finishes its sentence, and no more", async () => {
  const weather = new Weather(new FakeVerifier().makeSocket);
  weather.cut = true;
  const runtime = runtimeOf(weather, { patience: { connect: 0.05 }, policy: { offlineRate: 1000 } });
  const details: string[] = [];
  const finished = await read(runtime.generate(PROMPT, { maxNewTokens: 60 }), event => {
    if (event.type !== "link") return;
    details.push(event.detail);
    if (event.state === "waiting") weather.cut = false;
  });
  assert.ok(
    details.some(detail => detail.includes("would not be worth reading")),
    details.join(),
  );
  assert.ok(finished.stats.provisional <= 24);
  assert.deepEqual(finished.tokenIds, plain(PROMPT, 60));
  assert.deepEqual(finished.spans, [{ begin: 0, end: finished.tokenIds.length, writer: "target" }]);
  await runtime.close();
});

test("an answer that waits is cancelled at once", async () => {
  const weather = new Weather(new FakeVerifier().makeSocket);
  weather.cut = true;
  const waiting = runtimeOf(weather, { policy: { writer: "cloud-only" } });
  setTimeout(() => waiting.cancel(), 50);
  const began = performance.now();
  const finished = await read(waiting.generate(PROMPT));
  assert.equal(finished.reason, "cancelled");
  assert.ok(performance.now() - began < 900);
  await waiting.close();
});

test("a stop string ends the answer, and is not part of it", async () => {
  const runtime = runtimeOf(new FakeVerifier(), { mode: "tree" });
  const whole = bundle.tokenizer.decode(plain(PROMPT, 100));
  const stop = whole.slice(17, 20);
  const finished = await read(runtime.generate(PROMPT, { maxNewTokens: 100, stop }));
  assert.equal(finished.verified, whole.slice(0, whole.indexOf(stop)));
  assert.equal(finished.reason, "stop");
  await runtime.close();
});

test("a verifier of another target is told apart, and another one at its address is taken", async () => {
  const verifier = new FakeVerifier();
  verifier.hash = "another";
  const runtime = runtimeOf(verifier, { policy: { offlineRate: 1000, offline: "continue" } });
  const details: string[] = [];
  const finished = await read(runtime.generate(PROMPT, { maxNewTokens: 100 }), event => {
    if (event.type === "link") details.push(event.detail);
    if (event.type === "provisional" && event.provisional.length === 20) verifier.hash = "target";
  });
  assert.ok(
    details.some(detail => detail.includes("target differs")),
    details.join(),
  );
  assert.deepEqual(finished.tokenIds, plain(PROMPT, 100));
  await runtime.close();
});

test("an engine that fails ends the answer with its reason", async () => {
  const drafter = drafterOf();
  drafter.nextToken = () => Promise.reject(new Error("out of memory"));
  const runtime = new EdgeRuntime(bundle, drafter, null);
  await assert.rejects(read(runtime.generate(PROMPT)), /the drafter's engine failed: out of memory/);
  await runtime.close();
});

test("addresses and tokens", () => {
  assert.equal(verifierUrl("example.org:8765").href, "ws://example.org:8765/v1/verify");
  assert.equal(verifierUrl("https://example.org/").href, "wss://example.org/v1/verify");
  assert.equal(verifierUrl("wss://example.org/outrider").href, "wss://example.org/outrider/v1/verify");
  for (const wrong of ["", "ftp://x", "a b", "ws://:80", "x:0", "x:99999"]) {
    assert.throws(() => verifierUrl(wrong), LinkRefused, wrong);
  }
  const hello = { type: "Hello" as const, protocol: 1, targetHash: "", drafterHash: "", client: "", arithmetic: "" };
  const link = (server: string, token: string) =>
    new Link(
      server,
      hello,
      () => {},
      token,
      () => assert.fail(),
    );
  assert.throws(() => link("ws://example.org", "secret"), /clear text/);
  assert.throws(() => link("wss://example.org", "sec ret"), /cannot send/);
  assert.ok(link("ws://localhost:1", "secret"));
  assert.ok(link("wss://example.org", "secret"));
});

const FORM: Request = {
  responseFormat: { type: "json_schema", json_schema: { schema: { type: "object" } } },
  logitBias: { 7: 1.5 },
  presencePenalty: 0.5,
  maxNewTokens: 40,
};

test("OPEN carries what an answer is held to, also from a record, and nothing is written alone under a grammar", async () => {
  const verifier = new FakeVerifier();
  verifier.constraints = OBEYS_BIAS | OBEYS_JSON;
  const first = runtimeOf(verifier, { mode: "tree", patience: { open: 0.2, silence: 0.1 } });
  let written = "";
  let seen = 0;
  const finished = await read(first.generate(PROMPT, FORM), event => {
    assert.equal(event.provisional, "");
    if (event.type !== "verified" || seen++ !== 1) return;
    written = JSON.stringify(first.record);
    verifier.kill();
  });
  assert.deepEqual(finished.tokenIds, plain(PROMPT, 40));
  await first.close();
  const second = runtimeOf(verifier);
  const record: AnswerRecord = JSON.parse(written);
  assert.equal(record.version, 1);
  assert.deepEqual((await read(second.resume(record))).tokenIds, plain(PROMPT, 40));
  const held = [PROMPT.length, 0, 0.5, Uint8Array.of(7, 0, 0, 0), Uint8Array.of(0, 0, 192, 63), 2, '{"type":"object"}'];
  assert.ok(verifier.held.length >= 3);
  for (const one of verifier.held) assert.deepEqual(one, held);
  assert.throws(() => second.resume({ ...record, constraint: undefined! }), RangeError);
  assert.throws(() => second.resume({ ...record, constraint: { ...record.constraint!, grammar: 9 } }), RangeError);
  await second.close();
});

test("a verifier that does not support a constraint is not asked, and who writes alone refuses a grammar", async () => {
  const verifier = new FakeVerifier();
  const runtime = runtimeOf(verifier, { patience: { offline: 0.2 } });
  const finished = await read(runtime.generate(PROMPT, FORM));
  assert.equal(finished.reason, "refused");
  assert.match(finished.detail, /does not support the answer's constraint/);
  assert.ok(!verifier.received.includes("Open"));
  await runtime.close();
  const alone = runtimeOf(null);
  assert.throws(
    () => alone.generate(PROMPT, FORM),
    /response_format and tools need a verifier: this device writes alone and does not support them: no grammar/,
  );
  const biased = await read(alone.generate(PROMPT, { logitBias: { 7: 100 }, maxNewTokens: 5 }));
  assert.deepEqual(biased.tokenIds, [7, 7, 7, 7, 7]);
  const spread = await read(
    alone.generate(PROMPT, { logitBias: { 7: 50, 8: 49 }, presencePenalty: 2, maxNewTokens: 2 }),
  );
  assert.deepEqual(spread.tokenIds, [7, 8]);
  await alone.close();
});

const HELLO = { type: "Hello" as const, protocol: 1, targetHash: "", drafterHash: "", client: "", arithmetic: "" };

/** A socket whose other end is the test, and the link that dials it. */
function dialled() {
  const sockets: (Socket & { bufferedAmount: number })[] = [];
  const states: string[] = [];
  const make = () => {
    const handlers = { onopen: null, onmessage: null, onclose: null };
    const socket = { binaryType: "", bufferedAmount: 0, ...handlers, send: () => {}, close: () => {} };
    sockets.push(socket);
    return socket as Socket;
  };
  const link = new Link("ws://localhost:1", HELLO, event => states.push(event.type), null, make);
  return { sockets, states, link };
}

test("each phase of a connection has its time, and more after a time-out", async t => {
  t.mock.timers.enable({ apis: ["setTimeout"] });
  const { sockets, states, link } = dialled();
  const settled = async () => {
    for (let turn = 0; turn < 20; turn++) await Promise.resolve();
  };
  const pass = async (seconds: number) => {
    t.mock.timers.tick(1000 * seconds);
    await settled();
  };
  void link.run();
  await settled();
  await pass(0.9 * CONNECT_TIMEOUT);
  sockets[0].onopen?.(undefined as never);
  await pass(0.9 * CONNECT_TIMEOUT);
  assert.deepEqual(states, [], "it waits for WELCOME");
  await pass(0.2 * CONNECT_TIMEOUT);
  assert.deepEqual(states, ["down"]);
  await pass(1);
  assert.equal(sockets.length, 2);
  await pass(1.9 * CONNECT_TIMEOUT);
  assert.deepEqual(states, ["down"], "it waits twice as long");
  await pass(0.2 * CONNECT_TIMEOUT);
  assert.deepEqual(states, ["down", "down"]);
  link.close({ type: "Close", stream: 0 });
});

test("a long message on its way is not silence; one that is stuck is", async t => {
  t.mock.timers.enable({ apis: ["setTimeout"] });
  const verifier = new FakeVerifier();
  const states: string[] = [];
  const greeting = { ...HELLO, targetHash: "target" };
  const link = new Link("ws://localhost:1", greeting, event => states.push(event.type), null, verifier.makeSocket);
  void link.run();
  for (let turn = 0; turn < 20; turn++) {
    t.mock.timers.tick(10);
    await Promise.resolve();
  }
  assert.deepEqual(states, ["up"]);
  const [socket] = verifier.sockets;
  const probed = () => verifier.received.filter(name => name === "Cancel").length;
  for (const left of [90_000, 60_000, 30_000]) {
    socket.bufferedAmount = left;
    link.renew();
    t.mock.timers.tick(10);
    assert.equal(probed(), 0);
  }
  link.renew();
  t.mock.timers.tick(10);
  assert.equal(probed(), 1, "it is asked whether it is there, and another one is dialled");
  link.close({ type: "Close", stream: 0 });
});
