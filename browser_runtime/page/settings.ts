/** The user's settings, kept in this browser; the token only on request. */

import type { Arm, Options, Policy, Request } from "../src/index.js";
import { find } from "./dom.js";

export interface Settings {
  /** "": the origin of the page. */
  server: string;
  token: string;
  keepToken: boolean;
  writer: Policy["writer"];
  onReturn: Policy["onReturn"];
  offline: Policy["offline"];
  understudy: Policy["understudy"];
  mode: Arm | "";
  temperature: number;
  /** "": a new one each time. */
  seed: string;
  maxNewTokens: number;
}

const KEY = "outrider.settings";
const DEFAULTS: Settings = {
  server: "",
  token: "",
  keepToken: false,
  writer: "prefer-cloud",
  onReturn: "repair",
  offline: "sentence",
  understudy: "off", // a large download, only on request
  mode: "",
  temperature: 0,
  seed: "",
  maxNewTokens: 400,
};

export function loadSettings(): Settings {
  try {
    return { ...DEFAULTS, ...JSON.parse(localStorage.getItem(KEY) ?? "{}") };
  } catch {
    return { ...DEFAULTS };
  }
}

export function saveSettings(settings: Settings): void {
  const kept = { ...settings, token: settings.keepToken ? settings.token : "" };
  try {
    localStorage.setItem(KEY, JSON.stringify(kept));
  } catch {
    // without storage, the settings last as long as this page
  }
}

/** Return the address to dial; null: none. */
export function serverOf(settings: Settings): string | null {
  return settings.writer === "device-only" ? null : settings.server.trim() || location.origin;
}

export function optionsOf({ token, writer, onReturn, offline, understudy, mode }: Settings): Options {
  return { token: token || null, mode: mode || null, policy: { writer, onReturn, offline, understudy } };
}

export function requestOf({ temperature, seed, maxNewTokens }: Settings): Request {
  return { temperature, maxNewTokens, ...(seed ? { seed: BigInt(seed) } : {}) };
}

/** Show the dialog; return the saved settings, or null. */
export async function askSettings(now: Settings): Promise<Settings | null> {
  const dialog = find<HTMLDialogElement>("settings");
  const form = dialog.querySelector("form")!;
  const field = (name: keyof Settings) => form.elements.namedItem(name) as HTMLInputElement;
  for (const [name, value] of Object.entries(now)) {
    const input = field(name as keyof Settings);
    if (typeof value === "boolean") input.checked = value;
    else input.value = String(value);
  }
  dialog.returnValue = "";
  dialog.showModal();
  await new Promise(resolve => dialog.addEventListener("close", resolve, { once: true }));
  if (dialog.returnValue !== "save") return null;
  const text = (name: keyof Settings) => field(name).value;
  return {
    server: text("server"),
    token: text("token"),
    keepToken: field("keepToken").checked,
    writer: text("writer") as Settings["writer"],
    onReturn: text("onReturn") as Settings["onReturn"],
    offline: text("offline") as Settings["offline"],
    understudy: text("understudy") as Settings["understudy"],
    mode: text("mode") as Settings["mode"],
    temperature: Number(text("temperature")),
    seed: text("seed"),
    maxNewTokens: Number(text("maxNewTokens")),
  };
}
