/** Imports in src, of types too, form no cycles: neither between files nor between rooms. */

import assert from "node:assert/strict";
import { readdirSync, readFileSync } from "node:fs";
import { test } from "node:test";
import { ROOT_URL } from "./vectors.js";

/** `from` imports `to`: paths below src, without an extension. */
interface Arrow {
  from: string;
  to: string;
}

const text = ({ from, to }: Arrow) => `${from} -> ${to}`;

/** The room of a file is its folder; a file directly in src is a room of its own. */
const room = (file: string) => file.replace(/\/[^/]*$/, "");

/** The imports of the file `from` within src. */
function arrowsOf(from: string, source: string): Arrow[] {
  const paths = source.matchAll(/\b(?:from|import)\s*\(?\s*"(\.{1,2}\/[^"]+)\.js"/g);
  return [...paths].map(([, path]) => ({ from, to: new URL(path, `src:/${from}`).pathname.slice(1) }));
}

/** Return those of `arrows` that are part of a cycle, if all files of one `place` count as one. */
function circular(arrows: readonly Arrow[], place: (file: string) => string): string[] {
  const across = arrows.filter(({ from, to }) => place(from) !== place(to));
  const reached = (start: string) => {
    const seen = new Set([start]); // grows while it is walked
    for (const at of seen) for (const { from, to } of across) if (place(from) === at) seen.add(place(to));
    return seen;
  };
  return across.filter(({ from, to }) => reached(place(to)).has(place(from))).map(text);
}

const circles = (arrows: readonly Arrow[]) => [...circular(arrows, file => file), ...circular(arrows, room)];

const SRC = new URL("browser_runtime/src/", ROOT_URL);
const files = readdirSync(SRC, { recursive: true, encoding: "utf8" })
  .filter(path => path.endsWith(".ts"))
  .map(path => path.slice(0, -3));
const all = files.flatMap(file => arrowsOf(file, readFileSync(new URL(`${file}.ts`, SRC), "utf8")));

test("no imports form a circle", () => {
  assert.deepEqual(circles(all), []);
});

test("every file of src is read", () => {
  assert.deepEqual(
    [...new Set(all.map(({ to }) => to))].filter(file => !files.includes(file)),
    [],
  );
  const joined = new Set(all.flatMap(({ from, to }) => [from, to]));
  assert.deepEqual(
    files.filter(file => !joined.has(file)),
    [],
  );
});

test("circles are found, of types and of calls too", () => {
  const types = arrowsOf("a/x", 'import type { Y } from "../b/y.js";\nimport z from "z";\n');
  const values = arrowsOf("b/z", 'export {\n  X,\n} from "../a/w.js";\nawait import("./v.js");\n');
  assert.deepEqual([...types, ...values].map(text), ["a/x -> b/y", "b/z -> a/w", "b/z -> b/v"]);
  assert.deepEqual(circles(types), []);
  assert.deepEqual(circles([...types, ...values]), ["a/x -> b/y", "b/z -> a/w"]); // of rooms, not of files
  assert.deepEqual(circles([...types, ...arrowsOf("b/y", 'import "../a/x.js";')]).slice(0, 2), [
    "a/x -> b/y",
    "b/y -> a/x",
  ]);
});
