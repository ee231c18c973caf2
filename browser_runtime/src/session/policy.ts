/** What an app decides about its answers. */

/** How the target is asked: to verify draft trees, or to write alone. */
export type Mode = "tree" | "stream";

/**
 * Who writes, and what becomes of text that the drafter wrote alone.
 *
 * writer: "prefer-cloud": the target's text; the drafter writes where the target is silent. "prefer-device": the drafter
 * writes at once and the target corrects it, at most `lead` tokens behind. "cloud-only": the drafter drafts but never
 * writes. "device-only": nobody is asked.
 * onReturn: "repair": the target's text replaces what differs from it. "keep": what was written stays, and the target goes
 * on behind it; the text is then not the target's own.
 * offline: "sentence": an understudy writes to the end of the answer; without one the drafter finishes its sentence, as more
 * of its own is not worth reading, and the answer waits for the link. "continue": whoever writes goes on to the end of the
 * answer, or until it repeats itself. "pause": until the mean probability of the last tokens written falls below
 * `minConfidence`, unless an understudy is about to take over. "device-only", which waits for no link, goes on where
 * "sentence" would wait.
 * understudy: where there is one. "cold": it reads the text when the target falls silent, and the drafter writes until it
 * has. "warm": it reads along, so that it can write at once, and drafts for the target where that is faster. "off": the
 * drafter alone writes.
 * offlineRate: tokens per second written alone while the target may come back, at most. A writer that was slow, or
 * whose words replace others, makes up for a second of it. Nothing holds "device-only" up.
 */
export interface Policy {
  writer: "prefer-cloud" | "prefer-device" | "cloud-only" | "device-only";
  onReturn: "repair" | "keep";
  offline: "sentence" | "continue" | "pause";
  minConfidence: number;
  lead: number;
  offlineRate: number;
  understudy: "cold" | "warm" | "off";
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

/** Whether the target writes wherever it can, so that trees and streams are alternatives. */
export function targetFirst({ writer }: Policy): boolean {
  return writer === "prefer-cloud" || writer === "cloud-only";
}
