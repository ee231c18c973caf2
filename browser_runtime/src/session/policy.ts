/** An app's policy for its answers. */

/**
 * Whose text an answer is. prefer-cloud: the target's; the device writes where the target is silent. prefer-device: the
 * device writes at once, at most `lead` tokens ahead; the target corrects it. cloud-only: the target's alone: the device
 * drafts, but never writes. device-only: the device's alone: no verifier is asked.
 */
export type WhoWrites = "prefer-cloud" | "prefer-device" | "cloud-only" | "device-only";

/**
 * What happens to text that the device wrote alone, once the target is back. repair: the target's text replaces what differs
 * from it. keep: it stays, and the target continues behind it; the text is then not the target's own.
 */
export type OnReturn = "repair" | "keep";

/**
 * How far the device writes alone. sentence: an understudy to the end of the answer; the drafter to the end of its sentence.
 * continue: to the end of the answer, or until it repeats itself. pause: until the mean probability of the last tokens falls
 * below `minConfidence`.
 */
export type Offline = "sentence" | "continue" | "pause";

/**
 * What the understudy does, where there is one. cold: it reads the text when the target falls silent, and the drafter writes
 * until it has. warm: it reads along, so that it can write at once, and drafts for the target where that is faster. off:
 * nothing: the drafter alone writes.
 */
export type UnderstudyUse = "cold" | "warm" | "off";

/**
 * Who writes, and what becomes of text that the device wrote alone.
 *
 * offline: "device-only", which waits for no link, goes on where "sentence" would wait; "pause" does not hold where an
 * understudy is about to write.
 * minConfidence: mean probability of the last tokens written, for "pause".
 * lead: unverified tokens at most, for "prefer-device".
 * offlineRate: tokens per second written alone while the target may come back, at most. A writer that was slow, or whose
 * words replace others, makes up for a second of it. It does not hold "device-only" up.
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
