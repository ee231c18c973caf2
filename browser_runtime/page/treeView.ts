/** The present draft tree as a picture: tokens, path probabilities, and the accepted path once the verdict has arrived. */

import type { Sight } from "../src/index.js";
import { find } from "./dom.js";

const SVG = "http://www.w3.org/2000/svg";
const [COLUMN, ROW, WIDTH, HEIGHT] = [98, 25, 84, 20];
/** Milliseconds for which a verdict stays visible. */
const HELD_MS = 300;
/** Most characters shown of a token. */
const LETTERS = 10;

type Tree = Extract<Sight, { type: "tree" }>["tree"];

function svg(tag: string, attributes: Record<string, string | number>, text = ""): SVGElement {
  const element = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, String(value));
  if (text) element.textContent = text;
  return element;
}

export class TreeView {
  private nodes: SVGElement[] = [];
  private edges: SVGElement[] = [];
  private tree: Tree | null = null;
  private rows: number[] = [];
  private picture: SVGElement | null = null;
  private waiting: Sight | null = null;
  private timer: ReturnType<typeof setTimeout> | undefined;
  /** Whether the verdict on the visible tree is visible too. */
  private judged = true;
  private heldUntil = 0;

  /** textOf: returns the text of a token. */
  constructor(private readonly textOf: (token: number) => string) {}

  /** Show it; trees that come too fast to see are skipped. */
  see(sight: Sight): void {
    if (sight.type === "tree") {
      this.waiting = sight;
      this.timer ??= setTimeout(() => this.draw(), Math.max(0, this.heldUntil - performance.now()));
      return;
    }
    if (this.waiting && performance.now() < this.heldUntil) {
      this.waiting = null; // its verdict arrived before it could be shown
      return;
    }
    this.draw();
    if (!this.judged) this.accept(sight.path, sight.bonus);
    this.judged = true;
    this.heldUntil = performance.now() + HELD_MS;
  }

  /** Set whether there is a link; without one the last tree stays, greyed out. */
  link(there: boolean): void {
    if (!this.picture) return;
    find("tree-note").textContent = there ? "" : "no link, nothing is sent";
    if (there) return;
    this.waiting = null;
    clearTimeout(this.timer);
    this.timer = undefined;
    this.judged = true;
    this.picture.classList.add("past");
  }

  private draw(): void {
    const sight = this.waiting;
    this.waiting = null;
    clearTimeout(this.timer);
    this.timer = undefined;
    if (sight?.type !== "tree" || !sight.tree.size) return;
    const { tree, scores } = sight;
    this.tree = tree;
    this.judged = false;
    this.rows = rowsOf(tree);
    const height = ROW * (1 + Math.max(...this.rows));
    const width = COLUMN * (1 + Math.max(...tree.depths)) + 4;
    const picture = svg("svg", { width, height, role: "img" });
    picture.append(svg("title", {}, `${tree.size} drafted tokens`));
    this.edges = tree.parents.map((parent, node) => {
      const [x, y] = this.place(node);
      const from = parent < 0 ? null : this.place(parent);
      const chance = Math.exp(scores[node] ?? 0);
      if (!from) return svg("path", { d: "" });
      return svg("path", { d: curve(from, [x, y]), "stroke-width": 0.8 + 3 * chance });
    });
    this.nodes = tree.tokens.map((token, node) => this.box(node, this.textOf(token), Math.exp(scores[node] ?? 0)));
    picture.append(...this.edges, ...this.nodes);
    find("tree-picture").replaceChildren(picture);
    this.picture = picture;
    find("tree-note").textContent = `${tree.size} tokens sent`;
  }

  private accept(path: readonly number[], bonus: number): void {
    const { tree, picture } = this;
    if (!tree || !picture || path.some(node => node >= tree.size)) return;
    for (const node of path) {
      this.nodes[node].classList.add("accepted");
      this.edges[node].classList.add("accepted");
    }
    find("tree-note").textContent = `${tree.size} tokens sent, ${path.length} accepted and 1 more`;
    const last = path.at(-1);
    const depth = last === undefined ? 0 : tree.depths[last];
    const taken = new Set(this.rows.filter((_, node) => tree.depths[node] === depth + 1));
    let row = last === undefined ? 0 : this.rows[last];
    while (taken.has(row)) row++;
    const [x, y] = [depth * COLUMN + 2, row * ROW + 2];
    if (last !== undefined) {
      const edge = svg("path", { d: curve(this.place(last), [x, y]), class: "accepted" });
      picture.insertBefore(edge, this.nodes[0]);
    }
    picture.append(this.boxAt(x, y, this.textOf(bonus), null, "bonus"));
    const least = { width: COLUMN * (depth + 1) + 4, height: ROW * (row + 1) };
    for (const [name, size] of Object.entries(least)) {
      picture.setAttribute(name, String(Math.max(size, Number(picture.getAttribute(name)))));
    }
  }

  private place(node: number): [number, number] {
    return [(this.tree!.depths[node] - 1) * COLUMN + 2, this.rows[node] * ROW + 2];
  }

  private box(node: number, text: string, chance: number): SVGElement {
    const [x, y] = this.place(node);
    return this.boxAt(x, y, text, chance, "node");
  }

  private boxAt(x: number, y: number, text: string, chance: number | null, kind: string): SVGElement {
    const group = svg("g", { class: kind });
    const whole = text.replace(/\n/g, "↵").replace(/ /g, "·") || "∎";
    const shown = whole.length > LETTERS ? `${whole.slice(0, LETTERS - 1)}…` : whole;
    group.append(
      svg("rect", { x, y, width: WIDTH, height: HEIGHT, rx: 5 }),
      svg("text", { x: x + 5, y: y + 14 }, shown),
    );
    if (chance !== null && shown.length < LETTERS - 2) {
      const percent = `${Math.round(100 * chance)}%`;
      group.append(svg("text", { x: x + WIDTH - 4, y: y + 13, "text-anchor": "end", class: "chance" }, percent));
    }
    return group;
  }
}

/** Return the path of a curve from the box at `from` to the one at `to`. */
function curve(from: readonly [number, number], to: readonly [number, number]): string {
  const [fromX, fromY, toY] = [from[0] + WIDTH, from[1] + HEIGHT / 2, to[1] + HEIGHT / 2];
  const middle = (fromX + to[0]) / 2;
  return `M${fromX} ${fromY}C${middle} ${fromY} ${middle} ${toY} ${to[0]} ${toY}`;
}

/** Return the row of each node: a node's likeliest child stays in its row, others get rows below. */
function rowsOf(tree: Tree): number[] {
  const children = Array.from({ length: tree.size + 1 }, (): number[] => []);
  for (const [node, parent] of tree.parents.entries()) children[parent + 1].push(node);
  const rows: number[] = Array(tree.size).fill(0);
  let next = 0;
  const lay = (parent: number, row: number): void => {
    for (const [index, node] of children[parent + 1].entries()) {
      rows[node] = index === 0 ? row : ++next;
      lay(node, rows[node]);
    }
  };
  lay(-1, 0);
  return rows;
}
