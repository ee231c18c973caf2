import assert from "node:assert/strict";
import { spawnSync } from "node:child_process";
import { test } from "node:test";
import { fileURLToPath } from "node:url";
import { PYTHON, ROOT } from "./python.js";

const inIt = (...command: string[]) =>
  spawnSync(PYTHON, ["-m", "tests.broken_network", ...command], { cwd: ROOT, encoding: "utf8" });

test("a verifier whose first address swallows packets is reached over the second within a second", context => {
  if (inIt("true").status !== 0) return context.skip("no network of its own can be made here");
  const script = fileURLToPath(new URL("firstAddress.js", import.meta.url));
  const { stdout, stderr } = inIt(process.execPath, "--experimental-websocket", script, "{}");
  assert.ok(Number(stdout) > 0.2 && Number(stdout) < 1, stdout + stderr);
});
