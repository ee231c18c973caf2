/** Return the threads for WebAssembly: one if the page is not cross-origin isolated. wanted: 0 for the machine's choice. */
export function threadsFor(wanted: number): number {
  if (globalThis.crossOriginIsolated !== true) return 1;
  return wanted || Math.min(4, Math.max(1, (navigator.hardwareConcurrency ?? 2) - 1));
}
