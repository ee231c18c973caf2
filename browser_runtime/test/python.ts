/** The Python side, which makes the expected results of tests. */

import { existsSync } from "node:fs";
import { fileURLToPath } from "node:url";
import { ROOT_URL } from "./vectors.js";

export const ROOT = fileURLToPath(ROOT_URL);
const IN_VENV = fileURLToPath(new URL(".venv/bin/python", ROOT_URL));
export const PYTHON = process.env.OUTRIDER_PYTHON ?? (existsSync(IN_VENV) ? IN_VENV : "python3");
