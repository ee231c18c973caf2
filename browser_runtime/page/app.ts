/** The page: puts the parts together. */

import {
  type Bundle,
  BundleStore,
  EdgeRuntime,
  type Event,
  type LinkStatus,
  type Sight,
  startDrafter,
  Weather,
  type WorkerDrafter,
} from "../src/index.js";
import { AnswerView, showQuestion } from "./answerView.js";
import { Conversations, titleOf } from "./conversations.js";
import { announce, bytes, find, make } from "./dom.js";
import { askSettings, loadSettings, optionsOf, requestOf, saveSettings, serverOf } from "./settings.js";
import { TreeView } from "./treeView.js";
import { UnderstudyView } from "./understudyView.js";

const BUNDLE_URL = "bundle/";
const EXAMPLES = ["Why is the sky blue?", "Tell me a story about a lighthouse.", "How do I bake bread?"];
/** Milliseconds between two saves of an answer in progress, at least; closing the page saves it too. */
const JOURNAL_MS = 250;
const BADGE_MS = 250;
const STATES: Record<LinkStatus | "idle", string> = {
  idle: "Ready",
  connecting: "Connecting",
  verified: "Verified by the cloud",
  alone: "The device writes alone", // the drafter, if no other writer is named
  waiting: "Waiting for the cloud",
};
const UNDERSTUDY_WRITES = "The understudy writes alone";

const store = new BundleStore();
const weather = new Weather();
const conversations = await Conversations.open();
let settings = loadSettings();
let bundle: Bundle | null = null;
let drafter: WorkerDrafter | null = null;
let runtime: EdgeRuntime | null = null;
let understudy: UnderstudyView | null = null;
let tree: TreeView | null = null;
let stop: (() => void) | null = null;
let journalled = 0;

const button = (id: string) => find<HTMLButtonElement>(id);
const question = find<HTMLTextAreaElement>("question");

// --- the drafter ---

/** Fetch missing files, and start the engine. */
async function open(): Promise<void> {
  const [progress, note] = [find<HTMLProgressElement>("progress"), find("install-note")];
  button("download").hidden = true;
  progress.hidden = false;
  progress.removeAttribute("value");
  note.textContent = "";
  try {
    bundle = await store.open(BUNDLE_URL, (done, all) => {
      progress.max = all;
      progress.value = done;
      note.textContent = `${bytes(done)} of ${bytes(all)}`;
    });
    understudy = new UnderstudyView(bundle, BUNDLE_URL);
    note.textContent = "Starting the drafter";
    progress.removeAttribute("value");
    await begin();
    note.textContent = store.notKept ? `It will be fetched again next time: ${store.notKept}.` : "";
    void navigator.storage?.persist?.();
    await resume();
  } catch (error) {
    note.textContent = error instanceof Error ? error.message : String(error);
    announce(note.textContent);
    button("download").hidden = false;
    button("download").textContent = "Try again";
    tell("idle", "No drafter");
  }
  progress.hidden = true;
}

/** Make a runtime with the present settings. Throws if they are unusable. */
async function begin(): Promise<void> {
  if (!bundle) return;
  button("send").disabled = true;
  await runtime?.close();
  runtime = null;
  drafter = await startDrafter(bundle, { wasmUrl: "ort/" });
  const watch = (sight: Sight) => tree?.see(sight);
  const writer = (await understudy?.begin(settings.understudy !== "off")) ?? null;
  const options = { ...optionsOf(settings), makeSocket: weather.makeSocket, watch, understudy: writer };
  try {
    runtime = new EdgeRuntime(bundle, drafter, serverOf(settings), options);
  } catch (error) {
    await drafter.close();
    throw error;
  }
  tree = new TreeView(token => bundle!.tokenizer.decode([token]));
  const { provider, threads, stepSeconds } = drafter.started;
  const engine = provider === "webgpu" ? "WebGPU" : `WebAssembly, ${threads} thread${threads > 1 ? "s" : ""}`;
  const { target, targetHash, engineFile } = bundle.manifest;
  find("engine-note").textContent = engineFile
    ? `Drafter for ${target} (${targetHash}), ${engine}, ${(1000 * stepSeconds).toFixed(1)} ms for a step of eight tokens`
    : `${target} (${targetHash}), without a drafter: an understudy drafts, which the settings fetch`;
  document.documentElement.dataset.step = (1000 * stepSeconds).toFixed(2);
  button("send").disabled = false;
  tell("idle");
  showBadge();
}

// --- answers ---

async function ask(text: string): Promise<void> {
  if (!runtime || stop) return;
  const { present } = conversations;
  present.messages.push({ role: "user", content: text });
  conversations.save();
  find("welcome").hidden = true;
  showQuestion(text);
  await follow(() => {
    const request = requestOf(settings);
    const { ids, dropped } = runtime!.fitMessages(present.messages, request.maxNewTokens);
    if (dropped.length) announce("The oldest turns do not fit any more and are left out");
    return runtime!.generate(ids, request);
  });
}

/** Continue the answer that was in progress when the page was closed. */
async function resume(): Promise<void> {
  const { pending } = conversations.present;
  if (pending && runtime) await follow(() => runtime!.resume(pending));
}

async function follow(start: () => AsyncGenerator<Event>): Promise<void> {
  const { present } = conversations;
  const view = new AnswerView();
  button("send").textContent = "Stop";
  try {
    stop = () => runtime?.cancel();
    for await (const event of start()) {
      view.show(event);
      if (event.type === "link") tell(event.state, "", event.detail);
      if (event.type === "link") tree?.link(event.state === "verified");
      if (event.type === "handedOver")
        tell("alone", event.writer === "understudy" ? UNDERSTUDY_WRITES : "", event.detail);
      journal(event.type === "finished");
      if (event.type !== "finished") continue;
      present.pending = null;
      present.messages.push({ role: "assistant", content: event.verified + event.provisional });
      announce(`Answer: ${event.verified}${event.provisional}`);
    }
  } catch (error) {
    const why = error instanceof Error ? error.message : String(error);
    view.remark(why);
    announce(why);
    present.pending = null;
    // a question that failed can be changed and asked again
    const unanswered = present.messages.at(-1)?.role === "user" ? present.messages.pop() : null;
    if (unanswered) question.value ||= unanswered.content;
  }
  stop = null;
  button("send").textContent = "Ask";
  button("send").disabled = !runtime;
  if (find("badge").dataset.state !== "waiting") tell("idle");
  conversations.save();
  if (conversations.notKept) view.remark(conversations.notKept);
}

function journal(now: boolean): void {
  const record = runtime?.record;
  if (!record || (!now && performance.now() < journalled + JOURNAL_MS)) return;
  journalled = performance.now();
  conversations.present.pending = record;
  conversations.save();
}

// --- what is shown ---

function tell(state: LinkStatus | "idle", text = "", detail = ""): void {
  const badge = find("badge");
  const changed = badge.dataset.state !== state;
  badge.dataset.state = state;
  find("state").textContent = text || STATES[state];
  badge.title = detail;
  if (changed && state !== "idle") announce(STATES[state]);
}

function showBadge(): void {
  if (!runtime) return;
  const { stats, traffic, roundTrip, mode } = runtime;
  const parts: string[] = [];
  if (!runtime.connected && traffic) parts.push(runtime.linkError || "not connected");
  else if (roundTrip !== null) parts.push(`${Math.round(1000 * roundTrip)} ms`);
  if (runtime.connected) parts.push(mode === "tree" ? "trees" : "stream");
  if (stats?.tokens) parts.push(`${stats.tokensPerSecond.toFixed(1)} tokens/s`);
  if (stats?.rounds) parts.push(`tau ${stats.tau.toFixed(1)}`);
  if (traffic) parts.push(`↑ ${bytes(traffic.up)} ↓ ${bytes(traffic.down)}`);
  // lines break only between figures
  find("figures").replaceChildren(...parts.flatMap((part, index) => [index ? " · " : "", make("span", "", part)]));
}

function showConversation(): void {
  find("log").replaceChildren();
  const { messages } = conversations.present;
  for (const { role, content } of messages) {
    if (role === "user") showQuestion(content);
    else find("log").append(make("p", "turn assistant", content));
  }
  find("welcome").hidden = messages.length > 0 && bundle !== null;
}

function listConversations(): void {
  const entries = conversations.list.map(conversation => {
    const entry = make("li");
    const choose = make("button", "", titleOf(conversation));
    choose.addEventListener("click", () => change(() => conversations.choose(conversation)));
    const remove = make("button", "", "Delete");
    remove.setAttribute("aria-label", `Delete ${titleOf(conversation)}`);
    remove.addEventListener("click", () => change(() => conversations.delete(conversation), false));
    entry.append(choose, remove);
    return entry;
  });
  find("conversation-list").replaceChildren(...entries);
}

/** Show another conversation, unless an answer is in progress or another tab has it open. */
async function change(how: () => Promise<boolean>, close = true): Promise<void> {
  if (stop) return;
  if (!(await how())) return announce("That conversation is open in another tab");
  showConversation();
  if (close) find<HTMLDialogElement>("conversations").close();
  else listConversations();
  void resume();
}

// --- the user's hands ---

find<HTMLFormElement>("ask").addEventListener("submit", event => {
  event.preventDefault();
  if (stop) return stop();
  const text = question.value.trim();
  if (!text || !runtime) return;
  question.value = "";
  void ask(text);
});
question.addEventListener("keydown", event => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing || stop) return;
  event.preventDefault();
  find<HTMLFormElement>("ask").requestSubmit();
});
button("download").addEventListener("click", () => void open());
button("cut").addEventListener("click", () => {
  weather.cut = !weather.cut;
  button("cut").setAttribute("aria-checked", String(weather.cut));
  button("cut").textContent = weather.cut ? "Link is cut" : "Cut the link";
});
find<HTMLInputElement>("delay").addEventListener("input", ({ target }) => {
  const { value } = target as HTMLInputElement;
  weather.delay = Number(value) / 2000;
  find("delay-shown").textContent = `${value} ms`;
});
button("open-settings").addEventListener("click", async () => {
  await understudy?.describe();
  const chosen = await askSettings(settings);
  if (!chosen) return;
  stop?.();
  settings = chosen;
  saveSettings(settings);
  await begin().catch(error => tell("idle", error instanceof Error ? error.message : String(error)));
});
button("delete-bundle").addEventListener("click", async () => {
  await store.delete();
  find("settings-note").textContent =
    "The drafter is deleted from this browser; this page keeps it until it is closed.";
});
button("delete-understudy").addEventListener("click", async () => {
  await understudy?.delete();
  find("settings-note").textContent = "The understudy is deleted from this browser.";
});
button("open-conversations").addEventListener("click", () => {
  listConversations();
  find<HTMLDialogElement>("conversations").showModal();
});
button("close-conversations").addEventListener("click", () => find<HTMLDialogElement>("conversations").close());
button("new-conversation").addEventListener("click", () => change(() => conversations.begin()));
button("export").addEventListener("click", () => {
  const link = make("a");
  link.href = URL.createObjectURL(conversations.export());
  link.download = "outrider-conversations.json";
  link.click();
  URL.revokeObjectURL(link.href);
});
addEventListener("pagehide", () => journal(true));
document.addEventListener("visibilitychange", () => (document.hidden ? runtime?.background() : runtime?.foreground()));

// --- start ---

for (const example of EXAMPLES) {
  const offer = make("button", "", example);
  offer.type = "button";
  offer.addEventListener("click", () => void ask(example));
  find("examples").append(offer);
}
setInterval(showBadge, BADGE_MS);
showConversation();
tell("idle", "Starting");
if ("serviceWorker" in navigator && isSecureContext) void navigator.serviceWorker.register("sw.js");
const kept = await store.manifest().catch(() => null);
const local = ["localhost", "127.0.0.1", "[::1]"].includes(location.hostname);
if (kept || local) void open();
else tell("idle", "The drafter is not here yet");
