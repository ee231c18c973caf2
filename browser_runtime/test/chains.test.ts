import assert from "node:assert/strict";
import { test } from "node:test";
import { LocalUnderstudy, type UnderstudyThread } from "../src/answer/understudyThread.js";
import { Sampling } from "../src/protocol/sampling.js";
import { TokenTree } from "../src/protocol/tree.js";
import type { Settled } from "../src/session/settled.js";
import { Tuning } from "../src/session/tuning.js";
import { type Arm, ChainArm, FIRST_TOKENS } from "../src/speed/arms.js";
import { Controller } from "../src/speed/controller.js";
import { CostModel } from "../src/speed/costModel.js";
import { Understudy } from "../src/targets/understudy.js";
import { FakeTarget } from "./fakeTarget.js";
import { ALPHABET, FakeVerifier, plain } from "./fakeVerifier.js";
import { PROMPT, read, runtimeOf } from "./runtimes.js";

const CONTEXT = 200;

function threadOf(model: FakeTarget): LocalUnderstudy {
  return new LocalUnderstudy(async () => new Understudy(model, ALPHABET, () => ""));
}

test("a warm understudy drafts where the link is slow, and the answer stays the target's own", async () => {
  const verifier = new FakeVerifier();
  verifier.delay = 0.01;
  const model = new FakeTarget(CONTEXT);
  const ahead: number[] = [];
  const understudy = threadOf(model);
  const draftAhead = understudy.draftAhead.bind(understudy);
  understudy.draftAhead = async (count, cancelled) => {
    ahead.push(count);
    await draftAhead(count, cancelled);
  };
  const runtime = runtimeOf(verifier, { policy: { understudy: "warm" }, understudy });
  let [chains, rounds] = [0, 0];
  for (const prompt of [PROMPT, [...PROMPT, 7], [1], [2, 3]]) {
    const { tokenIds, stats } = await read(runtime.generate(prompt, { maxNewTokens: 120 }));
    assert.deepEqual(tokenIds, plain(prompt, 120));
    assert.ok(stats.chains <= stats.rounds);
    chains += stats.chains;
    rounds += stats.rounds;
  }
  assert.ok(chains > 1, `${chains} chains of ${rounds} rounds`);
  assert.ok(ahead.length > 0);
  await runtime.close();
});

test("a cold understudy drafts nothing, and one that fails leaves it to the drafter", async () => {
  for (const kind of ["cold", "warm"] as const) {
    const verifier = new FakeVerifier();
    const model = new FakeTarget(CONTEXT);
    const thread = threadOf(model);
    let asked = 0;
    const understudy: UnderstudyThread = {
      present: true,
      agreed: (...given) => thread.agreed(...given),
      nextToken: (...given) => thread.nextToken(...given),
      draft: async () => {
        asked++;
        throw new Error("out of memory");
      },
      draftAhead: async () => assert.fail("there is no chain"),
      review: () => {},
      unload: () => thread.unload(),
      close: () => thread.close(),
    };
    const runtime = runtimeOf(verifier, { policy: { understudy: kind }, understudy });
    const { tokenIds, stats } = await read(runtime.generate(PROMPT, { maxNewTokens: 60 }));
    assert.deepEqual(tokenIds, plain(PROMPT, 60));
    assert.equal(stats.chains, 0);
    assert.equal(asked, kind === "warm" ? 1 : 0);
    await runtime.close();
  }
});

test("the time of a chain is that of its steps, and drafting on ends as another job waits", async () => {
  const model = new FakeTarget(CONTEXT);
  const thread = threadOf(model);
  const of = { text: PROMPT, promptLength: PROMPT.length, sampling: new Sampling() };
  const foreseen = plain(PROMPT, 60);
  assert.ok(foreseen.length > 40);
  await thread.draftAhead(8, () => false); // behind nothing
  assert.equal(model.steps, 0);
  const first = (await thread.draft(of, 5, () => false))!;
  assert.deepEqual(first.tokens, foreseen.slice(0, 5));
  assert.equal(first.steps, 4); // the first ended the reading
  assert.ok(first.seconds > 0);
  await thread.draftAhead(3, () => false);
  const steps = model.steps;
  const known = (await thread.draft({ ...of, text: [...PROMPT, ...foreseen.slice(0, 2)] }, 6, () => false))!;
  assert.deepEqual([known.tokens, known.steps], [foreseen.slice(2, 8), 0]);
  assert.equal(model.steps, steps);
  let asked = 0;
  let next: ReturnType<typeof thread.nextToken> | null = null;
  await thread.draftAhead(30, () => {
    if (++asked === 6) next = thread.nextToken(of, () => false);
    return false;
  });
  assert.ok(model.steps > steps && model.steps < steps + 6);
  assert.equal((await next!)!.token, foreseen[0]);
  asked = 0;
  const after = model.steps;
  await thread.draftAhead(30, () => ++asked >= 6); // the session's version changes
  assert.ok(model.steps > after && model.steps < after + 6);
  assert.equal(await thread.draft(of, 5, () => true), null);
  thread.unload();
  const before = model.steps;
  await thread.draftAhead(8, () => false);
  assert.equal(model.steps, before);
  model.broken = true;
  await assert.rejects(
    thread.draft(of, 5, () => false),
    /out of memory/,
  );
  await thread.close();
});

test("drafting on ends as its memory is wanted back", async () => {
  const model = new FakeTarget(CONTEXT);
  const thread = threadOf(model);
  await thread.draft({ text: PROMPT, promptLength: PROMPT.length, sampling: new Sampling() }, 2, () => false);
  const { steps } = model;
  let asked = 0;
  await thread.draftAhead(30, () => {
    if (++asked === 6) thread.unload();
    return false;
  });
  assert.ok(model.steps > steps && model.steps < steps + 6);
  await thread.close();
});

function tuningOf(arm: Arm): Tuning {
  const tuning = new Tuning();
  tuning.controller.arm = arm;
  return tuning;
}

test("a chain has the room that there is, and none of one token is asked for", () => {
  const tuning = tuningOf("chain");
  const { chain } = tuning.controller;
  assert.equal(tuning.chain(64, 1, true), 0);
  assert.ok(chain.ready);
  assert.equal(tuning.chain(2, 64, true), 2);
  assert.equal(tuning.chain(64, 64, true), FIRST_TOKENS);
  const next = new Tuning(tuning.controller); // of the next answer, whose understudy has read nothing
  assert.ok(!chain.ready && next.chain(64, 64, false) === 0);
});

test("chains are drafted on with, unless the user chose otherwise", () => {
  const tunings = [null, true, false].map(ahead => new Tuning(new Controller(), { ahead }));
  const chosen = tunings.map(tuning => tuning.draftsAhead("chain"));
  assert.deepEqual(chosen, [true, true, false]);
});

test("an understudy that fails leaves comparing to the drafter", () => {
  const tuning = tuningOf("stream");
  const compared = (drafts: boolean) => {
    for (let token = 0; token < 99; token++) {
      const asked = tuning.comparison(drafts);
      if (asked) return asked.arm;
    }
    return null;
  };
  assert.equal(compared(true), "chain");
  assert.equal(compared(true), null); // that one is under way
  tuning.understudyFailed();
  assert.ok(!tuning.controller.chain.ready);
  assert.equal(compared(false), "tree");
  tuning.understudyFailed();
  assert.equal(compared(false), null); // the drafter's still is
});

test("of a chain behind which the answer ended, the tokens before its end are judged", () => {
  const judged = (ended: boolean) => {
    const tuning = new Tuning();
    const judgements: number[][] = [];
    tuning.controller.chain.verified = (...given) => judgements.push(given);
    const settled: Settled = {
      ...{ arm: "chain", tree: TokenTree.chain([1, 2, 3, 4]), scores: [], afterOpen: false, askedFor: false },
      ...{ accepted: [0, 1], tokens: [1, 2, 7], wait: 0.1, engine: 0.001, ended, sameStep: false },
      late: false,
    };
    tuning.answered(settled, 0.1);
    return judgements;
  };
  assert.deepEqual(judged(false), [[4, 2]]);
  assert.deepEqual(judged(true), [[2, 2]]);
});

test("rates of chains stay finite where nothing takes time", () => {
  const chains = new ChainArm();
  chains.drafted(4, 0);
  assert.ok(Number.isFinite(chains.best(new CostModel()).rate));
});
