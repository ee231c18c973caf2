/** Finds the largest of many values, such as the logits of a whole vocabulary, without sorting them. */

/** The `n`-th largest of `values`, 1 being the largest: a heap of the n largest so far, the least of them on top. */
export function nthLargest(values: Float64Array, n: number): number {
  const heap = values.slice(0, n);
  for (let place = (n >> 1) - 1; place >= 0; place--) sink(heap, place);
  for (let index = n; index < values.length; index++) {
    if (values[index] > heap[0]) {
      heap[0] = values[index];
      sink(heap, 0);
    }
  }
  return heap[0];
}

function sink(heap: Float64Array, from: number): void {
  const value = heap[from];
  let place = from;
  for (;;) {
    let child = 2 * place + 1;
    if (child >= heap.length) break;
    if (child + 1 < heap.length && heap[child + 1] < heap[child]) child++;
    if (heap[child] >= value) break;
    heap[place] = heap[child];
    place = child;
  }
  heap[place] = value;
}

/** The places of the `count` largest of `values`, ascending; of equals the first. */
export function largest(values: Float64Array, count: number): number[] {
  const bound = nthLargest(values, count);
  let equals = count;
  for (const value of values) if (value > bound) equals--;
  const places: number[] = [];
  for (let place = 0; place < values.length; place++) {
    if (values[place] > bound || (values[place] === bound && equals-- > 0)) places.push(place);
  }
  return places;
}

/** Buckets of `likeliest`, and how many of them the logits of one unit fall into. */
const BUCKETS = 1024;
const BUCKETS_PER_UNIT = 32;
const counts = new Int32Array(BUCKETS);

/**
 * The places of the `count` largest of `values`, ascending; of equals the first. high: the largest of them.
 *
 * Values are counted by their distance from the largest one. The bucket of the last place is a bound, below which values are
 * skipped.
 */
export function likeliest(values: Float32Array, high: number, count: number): number[] {
  const bucket = (value: number) => Math.min(Math.trunc((high - value) * BUCKETS_PER_UNIT), BUCKETS - 1);
  counts.fill(0);
  for (let place = 0; place < values.length; place++) counts[bucket(values[place])]++;
  let last = 0;
  for (let covered = counts[0]; covered < count; ) covered += counts[++last];
  const near: number[] = [];
  for (let place = 0; place < values.length; place++) if (bucket(values[place]) <= last) near.push(place);
  const best = largest(
    Float64Array.from(near, place => values[place]),
    count,
  );
  return best.map(index => near[index]);
}
