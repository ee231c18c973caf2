/** The understudy on the page: its download, on request, and its settings. */

import { type Bundle, openUnderstudy, UnderstudyStore, type WorkerUnderstudy } from "../src/index.js";
import { announce, bytes, find } from "./dom.js";

const note = find("understudy-note");
const progress = find<HTMLProgressElement>("understudy-progress");
const stopButton = find<HTMLButtonElement>("understudy-stop");
const store = new UnderstudyStore();

export class UnderstudyView {
  private download: AbortController | null = null;
  /** Belongs to the present runtime. */
  private understudy: WorkerUnderstudy | null = null;

  /** url: the bundle's. */
  constructor(
    private readonly bundle: Bundle,
    private readonly url: string,
  ) {
    stopButton.onclick = () => {
      this.download?.abort();
      find("understudy").hidden = true;
    };
  }

  /** Return the understudy for a runtime, or null if the bundle has none. Missing files are fetched meanwhile. */
  async begin(wanted: boolean): Promise<WorkerUnderstudy | null> {
    if (!wanted) this.download?.abort();
    if (!wanted || !this.entry) return null;
    this.understudy = await openUnderstudy(this.bundle, { wasmUrl: "ort/", store });
    if (!this.understudy.present) void this.fetch();
    return this.understudy;
  }

  /** Show the understudy's description in the settings. */
  async describe(): Promise<void> {
    const { entry } = this;
    const here = entry !== null && (await store.has(entry));
    find<HTMLButtonElement>("delete-understudy").hidden = !here;
    find("understudy-size").textContent = entry
      ? `A complete model, ${entry.name}: ${here ? "kept in this browser," : "fetched once,"} ${bytes(entry.bytes)}`
      : "This bundle carries none.";
    find("settings").querySelector<HTMLSelectElement>("[name=understudy]")!.disabled = !entry;
  }

  async delete(): Promise<void> {
    this.download?.abort();
    await store.delete();
    await this.understudy?.look();
    await this.describe();
  }

  private get entry() {
    const { understudy } = this.bundle.manifest;
    return understudy?.format === "onnx" ? understudy : null;
  }

  private async fetch(): Promise<void> {
    if (this.download) return;
    const download = new AbortController();
    this.download = download;
    find("understudy").hidden = progress.hidden = stopButton.hidden = false;
    progress.removeAttribute("value");
    note.textContent = "Fetching the understudy";
    try {
      const tell = (done: number, all: number) => {
        progress.max = all;
        progress.value = done;
        note.textContent = `Understudy: ${bytes(done)} of ${bytes(all)}`;
      };
      await store.fetch(this.url, this.entry!, tell, download.signal);
      await this.understudy?.look();
      find("understudy").hidden = true;
      announce("The understudy is here");
    } catch (error) {
      progress.hidden = stopButton.hidden = true;
      note.textContent = `No understudy: ${error instanceof Error ? error.message : error}`;
      if (!download.signal.aborted) announce(note.textContent);
    }
    this.download = null;
  }
}
