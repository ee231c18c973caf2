/** Common prefixes of texts. */

/** Returns the length of the longest common prefix of two texts, in tokens. */
export function commonPrefix(one: readonly number[], other: readonly number[]): number {
  const end = Math.min(one.length, other.length);
  let length = 0;
  while (length < end && one[length] === other[length]) length++;
  return length;
}
