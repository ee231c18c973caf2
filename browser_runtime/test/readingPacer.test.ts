/** Offline tokens appear at a reader's pace. */

import assert from "node:assert/strict";
import { test } from "node:test";
import { Reader } from "../src/answer/readingPacer.js";

const near = (found: number, wanted: number) => assert.ok(Math.abs(found - wanted) < 1e-9, `${found}, not ${wanted}`);

test("tokens written alone come when a reader does", () => {
  const reader = new Reader(10);
  near(reader.due(7, 0), 0);
  for (const written of [0, 1, 2]) reader.shown(7, written, 100 + written / 10);
  near(reader.due(7, 3), 100.3);
  for (const written of [1, 2]) {
    near(reader.due(7, written), 100 + written / 10); // the last two were withdrawn
    reader.shown(7, written, 100.21);
  }
  near(reader.due(7, 3), 100.3); // the reader has not moved
  reader.shown(7, 3, 109); // a slow writer catches up one second
  near(reader.due(7, 4), 108.1);
  near(reader.due(8, 1), 109.1); // reading begins again after newly verified tokens
  reader.shown(8, 1, 110);
  near(reader.due(8, 2), 110.1);
});
