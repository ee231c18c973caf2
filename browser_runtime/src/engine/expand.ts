/**
 * Expands a bundle's 4- and 8-bit tables into float32 if the graph multiplies by them.
 *
 * ONNX Runtime's WebAssembly unpacks the tables of MatMulNBits at every call, which takes several times as long as the
 * product itself. So they are unpacked once, when the bundle is loaded: the download stays small and steps get fast, at the
 * price of memory (59 MB for the default bundle). Tables that the graph reads in other ways stay as they are.
 */

import { BinaryReader, BinaryWriter, WireType } from "@bufbuild/protobuf/wire";

/** The file name of `weights` in the graph. */
export const EXPANDED = "expanded.bin";

/** model: an ONNX file whose products read `weights`, which the engine takes as external data EXPANDED. */
export interface Expanded {
  model: Uint8Array<ArrayBuffer>;
  weights: Uint8Array<ArrayBuffer>;
}

/** A field of a message, with its bytes in the file. */
interface Field {
  number: number;
  type: WireType;
  raw: Uint8Array;
  /** The content of a field with a length. */
  body: Uint8Array;
  /** The value of a number. */
  value: number;
}

/** Numbers of fields in onnx.proto. */
const MODEL = { graph: 7 };
const GRAPH = { node: 1, initializer: 5 };
const NODE = { input: 1, output: 2, name: 3, opType: 4, attribute: 5 };
const ATTRIBUTE = { name: 1, i: 3 };
const TENSOR = { dims: 1, dataType: 2, name: 8, rawData: 9, externalData: 13, dataLocation: 14 };
const ENTRY = { key: 1, value: 2 };
const FLOAT = 1;
const EXTERNAL = 1;

interface Product {
  inputs: string[];
  outputs: string[];
  name: string;
  k: number;
  n: number;
  bits: number;
  block: number;
}

/**
 * model: an ONNX file with tables of MatMulNBits; data: the file beside it, or null. Returns null if there is nothing to
 * expand.
 *
 * Throws RangeError on unsupported tables.
 */
export function expand(model: Uint8Array, data: Uint8Array | null): Expanded | null {
  const fields = fieldsOf(model);
  const graph = fieldsOf(fields.find(({ number }) => number === MODEL.graph)!.body);
  const products = new Map<Field, Product>();
  const usedOtherwise = new Set<string>();
  for (const field of graph.filter(({ number }) => number === GRAPH.node)) {
    const node = fieldsOf(field.body);
    if (textOf(node, NODE.opType) === "MatMulNBits") products.set(field, productOf(node));
    else for (const name of textsOf(node, NODE.input)) usedOtherwise.add(name);
  }
  if (!products.size) return null;
  const tables = new Map<string, Field[]>();
  for (const { number, body } of graph) {
    if (number !== GRAPH.initializer) continue;
    const tensor = fieldsOf(body);
    tables.set(textOf(tensor, TENSOR.name), tensor);
  }
  const all = [...products.values()];
  const weights = new Uint8Array(all.reduce((sum, { k, n }) => sum + 4 * k * n, 0));
  const dropped = new Set(all.flatMap(({ inputs }) => inputs.slice(1)).filter(name => !usedOtherwise.has(name)));
  const written = new BinaryWriter();
  let at = 0;
  for (const field of graph) {
    const product = products.get(field);
    if (product) {
      const target = new Float32Array(weights.buffer, at, product.k * product.n);
      const [packed, scales] = product.inputs.slice(1).map(name => bytesOf(tables.get(name)!, data));
      unpack(product, packed, new Float32Array(scales.slice().buffer), target);
      const name = `${product.outputs[0]}.expanded`;
      message(written, GRAPH.initializer, tensorField(name, product, at));
      message(written, GRAPH.node, matMul(product, name));
      at += target.byteLength;
    } else if (!(field.number === GRAPH.initializer && dropped.has(textOf(fieldsOf(field.body), TENSOR.name)))) {
      written.raw(field.raw);
    }
  }
  const whole = new BinaryWriter();
  for (const field of fields) {
    if (field.number === MODEL.graph) whole.tag(MODEL.graph, WireType.LengthDelimited).bytes(written.finish());
    else whole.raw(field.raw);
  }
  return { model: whole.finish() as Uint8Array<ArrayBuffer>, weights };
}

/** Unpack a table [n, blocks, block * bits / 8] and scales [n, blocks] to weights [k, n], transposed. */
function unpack({ k, n, bits, block }: Product, packed: Uint8Array, scales: Float32Array, out: Float32Array): void {
  const blocks = Math.ceil(k / block);
  const zero = 1 << (bits - 1);
  const rowBytes = (blocks * block * bits) / 8;
  for (let row = 0; row < n; row++) {
    for (let column = 0; column < k; column++) {
      const at = row * rowBytes;
      const pair = bits === 8 ? packed[at + column] : packed[at + (column >> 1)] >> (4 * (column & 1));
      const value = (bits === 8 ? pair : pair & 15) - zero;
      out[column * n + row] = value * scales[row * blocks + Math.trunc(column / block)];
    }
  }
}

function productOf(node: Field[]): Product {
  const attributes = new Map<string, number>();
  for (const { number, body } of node) {
    if (number !== NODE.attribute) continue;
    const attribute = fieldsOf(body);
    attributes.set(textOf(attribute, ATTRIBUTE.name), attribute.find(one => one.number === ATTRIBUTE.i)?.value ?? 0);
  }
  const inputs = textsOf(node, NODE.input);
  const [k, n, bits, block] = ["K", "N", "bits", "block_size"].map(name => attributes.get(name) ?? 0);
  if (inputs.length !== 3 || (bits !== 4 && bits !== 8) || !block) {
    throw new RangeError(`a table of ${bits} bits with ${inputs.length} inputs is not known here; update this runtime`);
  }
  return { inputs, outputs: textsOf(node, NODE.output), name: textOf(node, NODE.name), k, n, bits, block };
}

function matMul({ inputs, outputs, name }: Product, weights: string): BinaryWriter {
  const node = new BinaryWriter();
  text(node, NODE.input, inputs[0]);
  text(node, NODE.input, weights);
  text(node, NODE.output, outputs[0]);
  text(node, NODE.name, name);
  text(node, NODE.opType, "MatMul");
  return node;
}

function tensorField(name: string, { k, n }: Product, offset: number): BinaryWriter {
  const tensor = new BinaryWriter();
  for (const size of [k, n]) tensor.tag(TENSOR.dims, WireType.Varint).int64(size);
  tensor.tag(TENSOR.dataType, WireType.Varint).int32(FLOAT);
  text(tensor, TENSOR.name, name);
  for (const [key, value] of Object.entries({ location: EXPANDED, offset: `${offset}`, length: `${4 * k * n}` })) {
    const entry = new BinaryWriter();
    text(entry, ENTRY.key, key);
    text(entry, ENTRY.value, value);
    message(tensor, TENSOR.externalData, entry);
  }
  tensor.tag(TENSOR.dataLocation, WireType.Varint).int32(EXTERNAL);
  return tensor;
}

/** Return the bytes of a tensor, from the graph's file or from `data` beside it. */
function bytesOf(tensor: Field[], data: Uint8Array | null): Uint8Array {
  const raw = tensor.find(({ number }) => number === TENSOR.rawData);
  if (raw) return raw.body;
  const entries = tensor.filter(({ number }) => number === TENSOR.externalData).map(({ body }) => fieldsOf(body));
  const where = new Map(entries.map(entry => [textOf(entry, ENTRY.key), textOf(entry, ENTRY.value)]));
  const [offset, length] = [Number(where.get("offset") ?? 0), Number(where.get("length"))];
  if (!data || !(offset + length <= data.length)) throw new RangeError("a table stands in no file of the bundle");
  return data.subarray(offset, offset + length);
}

function fieldsOf(bytes: Uint8Array): Field[] {
  const reader = new BinaryReader(bytes);
  const fields: Field[] = [];
  while (reader.pos < reader.len) {
    const begin = reader.pos;
    const [number, type] = reader.tag();
    let body = new Uint8Array();
    let value = 0;
    if (type === WireType.LengthDelimited) body = reader.bytes() as Uint8Array<ArrayBuffer>;
    else if (type === WireType.Varint) value = Number(reader.int64());
    else reader.skip(type, number);
    fields.push({ number, type, raw: bytes.subarray(begin, reader.pos), body, value });
  }
  return fields;
}

function textsOf(fields: readonly Field[], number: number): string[] {
  return fields.filter(field => field.number === number).map(({ body }) => new TextDecoder().decode(body));
}

function textOf(fields: readonly Field[], number: number): string {
  return textsOf(fields, number)[0] ?? "";
}

function text(writer: BinaryWriter, number: number, value: string): void {
  writer.tag(number, WireType.LengthDelimited).string(value);
}

function message(writer: BinaryWriter, number: number, value: BinaryWriter): void {
  writer.tag(number, WireType.LengthDelimited).bytes(value.finish());
}
