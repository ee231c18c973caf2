import assert from "node:assert/strict";
import { test } from "node:test";
import { Drafter, treeShape } from "../src/drafting/drafter.js";
import { Lookup } from "../src/drafting/lookup.js";
import { RowCost } from "../src/drafting/rowCost.js";
import { largest, likeliest, nthLargest } from "../src/drafting/select.js";
import { RowShape } from "../src/protocol/rows.js";
import { Sampling } from "../src/protocol/sampling.js";
import { TokenTree } from "../src/protocol/tree.js";
import type { Settled } from "../src/session/settled.js";
import { Tuning } from "../src/session/tuning.js";
import { Controller } from "../src/speed/controller.js";
import { HashEngine } from "./hashEngine.js";
import { type Any, constraint, counted, fromHex, read, sampling } from "./vectors.js";

const near = (one: number, other: number, by: number, where = "") =>
  assert.ok(Math.abs(one - other) <= by, `${where}: ${one}, not ${other}`);

test("the same trees are drafted bit for bit, with the same probabilities", async () => {
  let drafts = 0;
  const conversations = read("drafter");
  for (const [number, { setup, steps }] of conversations.entries()) {
    const drafter = drafterOf(setup);
    const held = setup.constraint ? constraint(setup.constraint) : null;
    for (const [place, [call, ...given]] of steps.entries()) {
      const where = `conversation ${number}, step ${place}: ${call}`;
      if (call === "draft") {
        const [prefix, settings, shape, wanted] = given;
        const draft = await drafter.draft(prefix, sampling(settings), treeShape(shape), undefined, held);
        assert.deepEqual([draft.tree.tokens, draft.tree.parents], [wanted.tokens, wanted.parents], where);
        for (const [node, score] of draft.scores.entries()) near(score, wanted.scores[node], 1e-5, where);
        const { steps: took, ahead, kept } = wanted;
        assert.deepEqual([draft.steps, draft.ahead, draft.kept], [took, ahead, kept], where);
        drafts++;
      } else if (call === "ahead") {
        let asked = 0;
        assert.equal(await drafter.draftAhead(treeShape(given[0]), () => asked++ === 3), given[1], where);
      } else if (call === "rows") {
        drafter.addRows(given[0], Float32Array.from(given[1]));
      } else if (call === "write") {
        const written = await drafter.nextToken(given[0], sampling(given[1]), held);
        assert.equal(written.token, given[2], where);
        near(written.probability, given[3], 1e-9, where);
      } else if (call === "remember") {
        drafter.remember(given[0]);
      } else if (call === "forget") {
        drafter.forget();
      } else {
        assert.equal(call, "keep");
        drafter.keepRows(given[0]);
      }
    }
  }
  assert.ok(drafts > 80);
  counted("drafter", conversations.length);
});

test("the same cost of a row is learnt", () => {
  const vectors = read("row_cost");
  for (const { steps } of vectors) {
    const learnt = new RowCost();
    for (const [rows, seconds, wanted] of steps) {
      learnt.took(rows, seconds);
      near(learnt.value, wanted, 1e-12);
    }
  }
  counted("row_cost", vectors.length);
});

test("shapes have bounds, and nothing is drafted beyond the context", async () => {
  for (const wrong of [{ nodes: 0 }, { nodes: 256 }, { breadth: 65 }, { depth: 100, breadth: 8 }]) {
    assert.throws(() => treeShape(wrong), RangeError);
  }
  const setup = { draftIds: [1, 2], rowShape: new RowShape(1, 2), saKvHeads: 1, maxContext: 8 };
  const drafter = new Drafter(new HashEngine([1, 2], 2, 2), setup);
  assert.equal((await drafter.draft(Array(8).fill(1), new Sampling(), treeShape())).tree.size, 0);
  const { tree } = await drafter.draft(Array(7).fill(1), new Sampling(), treeShape({ gain: 0 }));
  assert.equal(Math.max(...tree.depths), 1);
  assert.equal(await drafter.draftAhead(treeShape(), () => false), 0);
});

test("the largest are found", () => {
  let state = 7;
  const random = (below: number) => {
    state = (Math.imul(state, 1664525) + 1013904223) >>> 0;
    return (state >>> 4) % below;
  };
  for (let round = 0; round < 300; round++) {
    const kinds = round % 2 ? 20 : 2000;
    const values = Array.from({ length: 1 + random(900) }, () => random(kinds) / 16);
    const count = 1 + random(Math.min(values.length, 100));
    const order = [...values.keys()].sort((one, other) => values[other] - values[one] || one - other);
    const wanted = order.slice(0, count).sort((one, other) => one - other);
    assert.equal(nthLargest(Float64Array.from(values), count), values[order[count - 1]]);
    assert.deepEqual(largest(Float64Array.from(values), count), wanted);
    assert.deepEqual(likeliest(Float32Array.from(values), Math.max(...values), count), wanted);
  }
});

test("lookup finds the longest run", () => {
  const lookup = new Lookup();
  lookup.follow([1, 2, 3, 4, 9, 2, 3, 5, 2, 3]);
  assert.deepEqual(lookup.guess([]), { token: 5, rate: 0.5 });
  assert.deepEqual(lookup.guess([1, 2, 3]), { token: 4, rate: 0.57 });
  assert.equal(lookup.guess([77]), null);
  lookup.follow([8]);
  assert.equal(lookup.guess([]), null);
});

test("earlier texts are looked up and forgotten", () => {
  const lookup = new Lookup(6);
  lookup.remember([0, 1, 2, 3, 4, 5, 6, 7, 8, 9]);
  assert.equal(lookup.guess([1, 2, 3, 4]), null); // of 8 runs the first two are forgotten
  assert.deepEqual(lookup.guess([5, 6, 7, 8]), { token: 9, rate: 0.32 });
  assert.deepEqual(lookup.guess([1, 2, 3, 4, 5, 6, 7, 8]), { token: 9, rate: 0.63 });
  lookup.remember([2, 3, 4, 5, 60]); // seen again: now the newest, and what followed last counts
  lookup.remember([100, 101, 102, 103, 104, 105]);
  assert.deepEqual(lookup.guess([2, 3, 4, 5]), { token: 60, rate: 0.32 });
  assert.equal(lookup.guess([3, 4, 5, 6]), null);
  lookup.forget();
  assert.equal(lookup.guess([2, 3, 4, 5]), null);
  const long = Array.from({ length: 40 }, (_, at) => 70_000 + at);
  const whole = new Lookup();
  whole.remember(long);
  assert.deepEqual(whole.guess(long.slice(0, 16)), { token: 70_016, rate: 0.7 });
  whole.follow([1, 2, 3, 4, 5, 6, 77, 1, 2, 3, 4, 5, 6]);
  whole.remember([2, 3, 4, 5, 6, 88]);
  assert.deepEqual(whole.guess([]), { token: 77, rate: 0.82 }); // what it says itself is surer
});

test("the controller measures and chooses as the vectors have it", () => {
  const rows = read("controller");
  for (const row of rows) {
    const controller = new Controller(row.pinned);
    for (const [call, given, wanted] of row.steps) {
      measure(controller, call, given);
      const rates = controller.rates();
      assert.deepEqual([...rates.keys()].toSorted(), Object.keys(wanted.rates).toSorted());
      for (const [arm, rate] of rates) near(rate / wanted.rates[arm], 1, 1e-9, call);
      if (wanted.gain === null) assert.equal(controller.tree.gain(controller.costs), null);
      else near(controller.tree.gain(controller.costs)!, wanted.gain, 1e-9, call);
      assert.equal(controller.chain.best(controller.costs).length, wanted.chain);
      assert.deepEqual([controller.compares("tree"), controller.compares("chain")], wanted.compares);
      assert.equal(controller.ahead.now, wanted.ahead);
      assert.equal(controller.tree.worthDrafting(), wanted.drafting);
      const [tokens, parents, scores] = wanted.tree;
      assert.equal(
        controller.tree.worthSending(new TokenTree(tokens, parents), scores, controller.costs),
        wanted.nodes,
      );
      const arm = wanted.call === "choose" ? controller.choose() : controller.begin(wanted.call === "begin");
      assert.deepEqual([arm, controller.trial], [wanted.arm, wanted.trial]);
    }
  }
  counted("controller", rows.length);
});

/** A controller that has met a verifier of this curve: tokens and microseconds in turn. */
function linked(curve: readonly number[], queueUs = 0): Controller {
  const controller = new Controller();
  const costs = new Uint8Array(Uint32Array.from(curve).buffer);
  controller.linked({ costs, streamTokens: 0, queueUs }, 0.01);
  return controller;
}

test("a curve that falls to nothing leaves rates finite", () => {
  const controller = linked([1, 100, 2, 50]);
  controller.verified(TokenTree.chain([1, 2]), [-0.1, -0.2], 1, 0.02, 0.01);
  for (const rate of controller.rates().values()) assert.ok(rate > 0 && rate < 1e9);
});

test("a queue that was told is a guess, which a stream's first verdict replaces too", () => {
  const first: Settled = {
    ...{ arm: "stream", tree: TokenTree.EMPTY, scores: [], accepted: [], tokens: [1], ended: false, late: false },
    ...{ wait: 0.05, engine: 0.02, afterOpen: false, sameStep: false, askedFor: true },
  };
  for (const byStream of [false, true]) {
    const controller = linked([1, 100], 2 ** 31);
    const tuning = new Tuning(controller);
    if (byStream) tuning.answered(first, 0);
    else controller.verified(TokenTree.chain([1]), [], 1, 0.05, 0.02);
    near(controller.costs.between, 0.03, 1e-9);
    controller.costs.waited(0);
    near(controller.costs.between, 0.025, 1e-9);
    tuning.answered({ ...first, wait: 3, afterOpen: true }, 0); // its own prompt was read
    tuning.answered({ ...first, wait: 3, sameStep: true }, 0);
    tuning.answered({ ...first, wait: 3, late: true }, 0);
    near(controller.costs.between, 0.025, 1e-9);
  }
});

test("a path through a tree is known once the text has left it", () => {
  const tree = new TokenTree([1, 2, 3], [-1, 0, 0]);
  const paths = [[], [1], [9], [1, 3, 7]].map(tokens => tree.foreseen(tokens));
  assert.deepEqual(paths, [null, null, [], [0, 2]]);
});

function measure(controller: Controller, call: string, given: Any[]): void {
  if (call === "linked") {
    const [costs, rtt, streamTokens, queueUs] = given;
    controller.linked({ costs: fromHex(costs), streamTokens, queueUs }, rtt);
  } else if (call === "drafted") controller.tree.drafted(given[0], given[1]);
  else if (call === "streamed") controller.streamed(given[0], given[1], given[2]);
  else if (call === "waited") controller.waited(given[0]);
  else if (call === "prepared") controller.prepared();
  else if (call === "chain_ready") controller.chain.ready = given[0];
  else if (call === "chain_drafted") controller.chain.drafted(given[0], given[1]);
  else if (call === "chain_verified") controller.chainVerified(given[0], given[1], given[2], given[3]);
  else if (call === "compared") controller.chain.verified(given[0], given[1]);
  else if (call === "verified") {
    controller.verified(new TokenTree(given[0], given[1]), given[2], given[3].length, given[4], given[5]);
  } else {
    assert.equal(call, "foreseen");
    controller.foreseen(new TokenTree(given[0], given[1]), given[2], given[3].length, given[4]);
  }
}

function drafterOf(setup: Any): Drafter {
  const rowShape = new RowShape(setup.heads, setup.head_dim);
  const engine = new HashEngine(setup.draft_ids, setup.sa_kv_heads * rowShape.headDim, rowShape.values / 2);
  return new Drafter(engine, {
    draftIds: setup.draft_ids,
    rowShape,
    saKvHeads: setup.sa_kv_heads,
    maxContext: setup.max_context,
    lookup: setup.lookup,
    nullRow: setup.null_row && Float32Array.from(setup.null_row),
    confidenceTemperature: setup.confidence_temperature,
    rowCost: setup.row_cost,
  });
}
