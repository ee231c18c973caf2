import assert from "node:assert/strict";
import { test } from "node:test";
import { type Draft, NO_DRAFT, treeShape } from "../src/drafting/drafter.js";
import type { ServerMessage, Welcome } from "../src/protocol/messages.js";
import { RowShape } from "../src/protocol/rows.js";
import { TokenTree } from "../src/protocol/tree.js";
import type { Action } from "../src/session/actions.js";
import { RowsSeen } from "../src/session/featureRows.js";
import { policy } from "../src/session/policy.js";
import { Session } from "../src/session/session.js";
import { RoundTimer } from "../src/session/timeouts.js";
import { Tuning } from "../src/session/tuning.js";
import { Controller } from "../src/speed/controller.js";
import { type Any, constraint, counted, fields, fromHex, message, read, same, sampling } from "./vectors.js";

test("every recorded session replays: the same actions and states", () => {
  const traces = read("sessions");
  const calls = new Set<string>();
  const exits: Record<string, Set<string>> = {};
  let steps = 0;
  for (const trace of traces) {
    const session = sessionOf(trace.setup);
    let before: string = session.state;
    for (const [number, [call, given, wanted, state]] of trace.steps.entries()) {
      calls.add(call);
      const actions = callOf(session, call, given).map(json);
      const where = `${trace.name}, step ${number}: ${call}`;
      const shown = `${where} gives\n${JSON.stringify(actions)}, not\n${JSON.stringify(wanted)}`;
      assert.ok(same(wanted, actions), shown);
      assert.equal(session.state, state, where);
      if (state !== before) {
        exits[before] ??= new Set();
        exits[before].add(call);
      }
      before = state;
      steps++;
    }
  }
  assert.equal(calls.size, 16);
  assert.equal(Object.keys(exits).length, 5, "every state but the last is left");
  for (const [state, left] of Object.entries(exits)) {
    const others = [...left].filter(call => !["tick", "cancel", "stop"].includes(call));
    assert.ok(others.length, `${state} is left by a time-out alone, or where somebody gives up`);
  }
  counted("sessions", traces.length);
  counted("events of sessions", steps);
});

test("a session that acts otherwise is noticed", () => {
  const [, , wanted] = read("sessions")[0].steps.find((step: Any) => step[2].length > 0);
  assert.ok(!same(wanted, wanted.slice(1)));
});

function sessionOf(setup: Any): Session {
  const { prompt, max_new: maxNew, max_context: maxContext, stream, patience, timer } = setup;
  const { on_return: onReturn, min_confidence: minConfidence, offline_rate: _, ...others } = setup.policy;
  const session = new Session({
    prompt,
    maxNew,
    maxContext,
    stream,
    patience,
    sampling: sampling(setup.sampling),
    eosIds: new Set(setup.eos_ids),
    rowShape: new RowShape(setup.row_shape[0], setup.row_shape[1]),
    sessionId: fromHex(setup.session),
    rowsSeen: new RowsSeen(),
    timer: new RoundTimer(timer.floor, timer.ceiling, timer.first),
    policy: policy({ ...others, onReturn, minConfidence }),
    understudy: setup.understudy,
    obeys: setup.obeys,
    drafter: setup.drafter,
    constraint: setup.constraint ? constraint(setup.constraint) : null,
    sentenceEnds: new Set(setup.sentence_ends),
    tuning: tuningOf(setup),
  });
  session.arm = setup.arm;
  session.verifier.pinned = setup.arithmetic ?? "";
  return session;
}

/** Sessions that are not free to choose have one mode, and trees as large as they come. */
function tuningOf({ tuning, arm }: Any): Tuning {
  if (tuning) {
    const { nodes, depth, breadth, gain, shaping } = tuning;
    return new Tuning(new Controller(), { largest: treeShape({ nodes, depth, breadth, gain }), shaping });
  }
  const largest = treeShape({ nodes: 255, depth: 64 });
  return new Tuning(new Controller(arm), { largest, shaping: false });
}

function callOf(session: Session, call: string, given: Any[]): Action[] {
  switch (call) {
    case "start":
      return session.start(given[0]);
    case "link_up":
      return session.linkUp(message(given[0]) as Welcome, given[1], given[2] ?? null);
    case "link_down":
      return session.linkDown(given[0], given[1] === true);
    case "message":
      return session.message(message(given[0]) as ServerMessage, given[1]);
    case "tree_ready":
      return session.treeReady(draftOf(given[0]), given[1], given[2], given[3] ?? 0);
    case "tree_compared":
      return session.treeCompared(draftOf(given[0]), given[1], given[2]);
    case "token_written":
      return session.tokenWritten(given[0], given[1], given[2], given[3]);
    case "text_read":
      return session.textRead(given[0], given[1]);
    case "understudy_failed":
      return session.understudyFailed(given[0], given[1]);
    case "set_obeys":
      return session.setObeys(given[0], given[1]);
    case "tick":
      return session.tick(given[0]);
    case "set_arm":
      session.tuning.controller.pinned = given[0];
      return session.setArm(given[0], given[1]);
    case "pause":
      return session.pause(given[0]);
    case "proceed":
      return session.proceed(given[0]);
    case "cancel":
      return session.cancel();
    case "stop":
      return session.stop(given[0]);
    default:
      throw new Error(`no event ${call}`);
  }
}

/** A tree; where more is recorded of its draft, that too. */
function draftOf(of: Any): Draft {
  const tree = new TokenTree(of.tokens, of.parents);
  if (!of.scores) return { ...NO_DRAFT, tree };
  const { scores, steps, ahead, kept } = of;
  return { tree, scores, steps, ahead, kept };
}

function json(action: Action): Any {
  const { type, ...rest } = action as Any;
  if (type === "Send") return [type, fields(rest.message)];
  if (type === "AddRows") return [type, { positions: rest.positions }];
  if (rest.gain === null) delete rest.gain;
  return [type, rest];
}
