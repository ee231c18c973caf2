/** An app's policy for its answers. */

/**
 * Whose text an answer is. prefer-cloud: the target's; the device writes while the target is silent. prefer-device: the
 * device writes at once, at most `lead` tokens ahead; the target corrects it. cloud-only: the target's alone: the device
 * drafts, but never writes. device-only: the device's alone: no verifier is contacted.
 */
export type WhoWrites = "prefer-cloud" | "prefer-device" | "cloud-only" | "device-only";

/**
 * Treatment of offline text once the target is back. repair: the target's text replaces what differs from it. keep: it
 * stays, and the target continues after it; the text is then not the target's own.
 */
export type OnReturn = "repair" | "keep";

/**
 * The limit of offline writing. sentence: an understudy to the end of the answer; the drafter to the end of its sentence.
 * continue: to the end of the answer, or until it repeats itself. pause: until the mean probability of the last tokens falls
 * below `minConfidence`.
 */
export type Offline = "sentence" | "continue" | "pause";

/**
 * Use of the understudy, if the bundle has one. cold: it reads the text when the target falls silent, and the drafter writes
 * until it has. warm: it reads along, so that it can write at once, and drafts for the target if that is faster. off:
 * unused: the drafter alone writes.
 */
export type UnderstudyUse = "cold" | "warm" | "off";

/**
 * An app's choice who writes, and what happens to offline text.
 *
 * offline: "device-only", which waits for no link, continues where "sentence" would wait; "pause" is not applied while an
 * understudy is about to write.
 * minConfidence: mean probability of the last tokens written, for "pause".
 * lead: most unverified tokens, for "prefer-device".
 * offlineRate: most tokens per second written offline while the target may come back. A writer that was slow, or whose words
 * replace others, may catch up one second of it. It does not limit "device-only".
 * understudy: "warm" costs computing time while the link is up.
 */
export interface Policy {
  writer: WhoWrites;
  onReturn: OnReturn;
  offline: Offline;
  minConfidence: number;
  lead: number;
  offlineRate: number;
  understudy: UnderstudyUse;
}

/** The default with some fields changed. Throws RangeError on a rate that is not above 0. */
export function policy(of: Partial<Policy> = {}): Policy {
  const whole: Policy = {
    writer: "prefer-cloud",
    onReturn: "repair",
    offline: "sentence",
    minConfidence: 0.35,
    lead: 48,
    offlineRate: 20,
    understudy: "cold",
    ...of,
  };
  if (!(whole.offlineRate > 0)) {
    throw new RangeError(`offlineRate is tokens per second and above 0, not ${whole.offlineRate}`);
  }
  return whole;
}

/** Whether the target writes whenever it can, so that trees and streams are alternatives. */
export function targetFirst({ writer }: Policy): boolean {
  return writer === "prefer-cloud" || writer === "cloud-only";
}
