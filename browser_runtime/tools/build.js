// Builds dist/page, which any web server can host, and dist/outrider, the library for pages without a bundler.

import { createHash } from "node:crypto";
import { cpSync, mkdirSync, readdirSync, readFileSync, rmSync, statSync, writeFileSync } from "node:fs";
import { join } from "node:path";
import { fileURLToPath } from "node:url";
import { gzipSync } from "node:zlib";
import { build } from "esbuild";

const root = fileURLToPath(new URL("..", import.meta.url));
const [page, library] = [join(root, "dist/page"), join(root, "dist/outrider")];
const runtime = join(root, "node_modules/onnxruntime-web/dist");
const RUNTIME_FILES = ["ort-wasm-simd-threaded", "ort-wasm-simd-threaded.asyncify"].flatMap(name => [
  `${name}.mjs`,
  `${name}.wasm`,
]);
const STATIC = ["index.html", "style.css", "icon.svg", "app.webmanifest"];
/** Smaller files are not worth a second request header. */
const COMPRESSED_FROM = 1024;

const options = {
  bundle: true,
  format: "esm",
  target: "es2022",
  minify: true,
  legalComments: "linked",
  logLevel: "warning",
  conditions: ["onnxruntime-web-use-extern-wasm"],
};

for (const folder of [page, library]) {
  rmSync(folder, { recursive: true, force: true });
  mkdirSync(join(folder, "ort"), { recursive: true });
  for (const name of RUNTIME_FILES) cpSync(join(runtime, name), join(folder, "ort", name));
}
const worker = join(root, "src/engine/worker.ts");
const understudyWorker = join(root, "src/engine/understudyWorker.ts");
const splitting = { splitting: true, chunkNames: "chunk-[hash]" };
await build({
  ...options,
  ...splitting,
  entryPoints: [join(root, "page/app.ts"), worker, understudyWorker],
  outdir: page,
  entryNames: "[name]",
});
await build({
  ...options,
  ...splitting,
  entryPoints: { outrider: join(root, "src/index.ts"), worker, understudyWorker },
  outdir: library,
});
for (const name of STATIC) cpSync(join(root, "page", name), join(page, name));

// the files that the page needs to start without a network: all but the graphics card's runtime
const files = readdirSync(page, { recursive: true })
  .filter(
    name => statSync(join(page, name)).isFile() && !name.includes("asyncify") && !/LEGAL|chunk-.*webgpu/.test(name),
  )
  .sort();
const hash = createHash("sha256");
for (const name of files) hash.update(name).update(readFileSync(join(page, name)));
await build({
  ...options,
  format: "iife",
  entryPoints: [join(root, "page/sw.ts")],
  outdir: page,
  define: {
    SHELL_FILES: JSON.stringify(["", ...files.filter(name => name !== "index.html")]),
    SHELL_VERSION: JSON.stringify(hash.digest("hex").slice(0, 16)),
  },
});

let compressed = 0;
for (const name of readdirSync(page, { recursive: true })) {
  const path = join(page, name);
  if (!statSync(path).isFile() || statSync(path).size < COMPRESSED_FROM) continue;
  const small = gzipSync(readFileSync(path), { level: 9 });
  writeFileSync(`${path}.gz`, small);
  if (files.includes(name)) compressed += small.length;
}
console.log(`dist/page: ${files.length} files, ${(compressed / 1e6).toFixed(2)} MB compressed, without the bundle`);
