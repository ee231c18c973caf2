/** A real verifier process and a real browser, for the tests of the page. */

import { type ChildProcess, execFileSync, spawn } from "node:child_process";
import { mkdtempSync, rmSync } from "node:fs";
import { createServer } from "node:net";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { createInterface } from "node:readline";
import { type Browser, type BrowserContext, chromium, type Page } from "playwright-core";
import { PYTHON, ROOT } from "../test/python.js";

export const BUNDLE = process.env.OUTRIDER_BUNDLE ?? join(ROOT, "build/bundle");
const PAGE = join(ROOT, "browser_runtime/dist/page");
const FLAGS = [
  "--headless=new",
  "--no-sandbox",
  "--disable-gpu",
  "--disable-background-networking",
  "--disable-component-update",
  "--disable-sync",
  "--no-first-run",
];
/** Seconds until a verifier must be ready; until the page must be, and an answer must end. */
const START_PATIENCE = 240;
const PATIENCE = 120;

/** Return the path of the named or an installed browser; null: there is none. */
export function browserPath(): string | null {
  const named = process.env.OUTRIDER_CHROMIUM;
  if (named) return named;
  for (const name of ["chromium", "chromium-browser", "google-chrome"]) {
    try {
      return execFileSync("which", [name], { encoding: "utf8" }).trim();
    } catch {
      // try the next one
    }
  }
  return null;
}

/** A verifier of the default target that serves the page; it can be killed, stopped and restarted at the same address. */
export class Verifier {
  private process: ChildProcess | null = null;

  private constructor(
    readonly port: number,
    private readonly module: string[],
    private readonly flags: string[],
  ) {}

  /** module: the Python module to run in place of the verifier. flags: further ones. */
  static async start(module = ["cloud.verifier"], flags: string[] = []): Promise<Verifier> {
    const verifier = new Verifier(await freePort(), module, flags);
    await verifier.start();
    return verifier;
  }

  get url(): string {
    return `http://127.0.0.1:${this.port}/`;
  }

  async start(): Promise<void> {
    const flags = [
      "--port",
      `${this.port}`,
      "--page",
      PAGE,
      "--page-bundle",
      BUNDLE,
      "--max-model-len",
      "1024",
      ...this.flags,
    ];
    const env = { ...process.env, PYTHONPATH: ROOT, OMP_NUM_THREADS: "1" };
    const child = spawn(PYTHON, ["-m", ...this.module, ...flags], {
      cwd: ROOT,
      env,
      stdio: ["ignore", "pipe", "pipe"],
    });
    this.process = child;
    let said = "";
    child.stderr.on("data", text => (said = (said + text).slice(-4000)));
    const timer = setTimeout(() => child.kill("SIGKILL"), 1000 * START_PATIENCE);
    for await (const line of createInterface({ input: child.stdout })) {
      if (!line.includes("verifier ready")) continue;
      clearTimeout(timer);
      child.stdout.resume();
      return;
    }
    throw new Error(`the verifier did not start: ${said}`);
  }

  /** Kill it, like a machine that loses power. */
  async kill(): Promise<void> {
    const child = this.process;
    if (!child || child.exitCode !== null || child.signalCode !== null) return;
    const ended = new Promise(resolve => child.once("exit", resolve));
    child.kill("SIGKILL");
    await ended;
  }

  /** Silent: connections stay open, but nothing is sent on them. */
  silence(silent: boolean): void {
    this.process?.kill(silent ? "SIGSTOP" : "SIGCONT");
  }

  /** Return the text of plain decoding by the target. */
  async plain(
    question: string,
    settings: { maxNewTokens: number; temperature?: number; seed?: number },
  ): Promise<string> {
    const { maxNewTokens: max_tokens, temperature = 0, seed = 0 } = settings;
    const messages = [{ role: "user", content: question }];
    const models = (await (await fetch(`${this.url}v1/models`)).json()) as { data: { id: string }[] };
    const model = models.data[0].id;
    const response = await fetch(`${this.url}v1/chat/completions`, {
      method: "POST",
      headers: { "content-type": "application/json" },
      body: JSON.stringify({ model, messages, max_tokens, temperature, seed }),
    });
    const answer = (await response.json()) as { choices?: { message: { content: string } }[] };
    if (!answer.choices) throw new Error(JSON.stringify(answer));
    return answer.choices[0].message.content;
  }
}

/** A browser with a profile of its own. */
export class Chromium {
  private constructor(
    private readonly browser: Browser,
    private readonly folder: string,
  ) {}

  static async start(executablePath: string, ...flags: string[]): Promise<Chromium> {
    const folder = mkdtempSync(join(tmpdir(), "outrider-chromium-"));
    const env = { ...process.env, HOME: folder } as Record<string, string>;
    return new Chromium(await chromium.launch({ executablePath, args: [...FLAGS, ...flags], env }), folder);
  }

  async context(options: Parameters<Browser["newContext"]>[0] = {}): Promise<BrowserContext> {
    return this.browser.newContext({ viewport: { width: 390, height: 844 }, ...options });
  }

  async close(): Promise<void> {
    await this.browser.close();
    rmSync(this.folder, { recursive: true, force: true });
  }
}

/** The stored settings of the page. */
export type PageSettings = Record<string, string | number | boolean>;

/** The page, opened and ready. `faults` lists its logged errors and its requests to other servers. */
export class ChatPage {
  readonly faults: string[] = [];

  private constructor(
    readonly page: Page,
    url: string,
  ) {
    page.on("pageerror", error => this.faults.push(error.message));
    page.on("request", request => {
      const { origin } = new URL(request.url());
      if (origin !== new URL(url).origin && !request.url().startsWith("blob:")) this.faults.push(request.url());
    });
    page.on("console", message => {
      const harmless = /net::ERR_|WebSocket connection|Failed to load resource/; // a cut link causes these
      if (message.type() === "error" && !harmless.test(message.text())) this.faults.push(message.text());
    });
  }

  static async open(context: BrowserContext, url: string, settings: PageSettings = {}): Promise<ChatPage> {
    const chat = new ChatPage(await context.newPage(), url);
    await context.addInitScript(kept => {
      if (!localStorage.getItem("outrider.settings")) localStorage.setItem("outrider.settings", kept);
    }, JSON.stringify(settings));
    await chat.page.goto(url);
    return chat;
  }

  /** Wait until the drafter is ready. */
  async ready(): Promise<void> {
    const enabled = () => !(document.getElementById("send") as HTMLButtonElement).disabled;
    await this.page.waitForFunction(enabled, null, { timeout: 1000 * PATIENCE });
  }

  async ask(question: string): Promise<void> {
    await this.page.fill("#question", question);
    await this.page.press("#question", "Enter");
  }

  /** Wait until the answer's text, provisional part included, has this length. */
  async grown(characters: number): Promise<void> {
    const long = (least: number) => {
      const answers = document.querySelectorAll(".turn.assistant");
      const answer = answers[answers.length - 1];
      const text = `${answer?.firstChild?.textContent ?? ""}${answer?.querySelector(".provisional")?.textContent ?? ""}`;
      return text.length >= least;
    };
    await this.page.waitForFunction(long, characters, { timeout: 1000 * PATIENCE });
  }

  /** Wait until this many characters are written offline; the drafter may end an answer after one word. */
  async alone(characters = 1): Promise<void> {
    const writes = (least: number) => {
      const all = document.querySelectorAll(".turn.assistant .provisional");
      return (all[all.length - 1]?.textContent ?? "").length >= least;
    };
    await this.page.waitForFunction(writes, characters, { timeout: 1000 * PATIENCE });
  }

  /** Wait until the answer has ended; return its verified text, the offline text after it, and the line below. */
  async finished(): Promise<{ verified: string; provisional: string; note: string }> {
    const ended = () => {
      const notes = document.querySelectorAll(".turn.assistant .note");
      return Boolean(notes[notes.length - 1]?.textContent) && document.getElementById("send")?.textContent === "Ask";
    };
    await this.page.waitForFunction(ended, null, { timeout: 1000 * PATIENCE });
    return this.page.evaluate(() => {
      const answer = [...document.querySelectorAll(".turn.assistant")].at(-1)!;
      const text = (selector: string) => answer.querySelector(selector)?.textContent ?? "";
      const verified = (answer.firstChild as Text).data;
      return { verified, provisional: text(".provisional"), note: text(".note") };
    });
  }

  /** Wait until the understudy in the settings has been fetched. */
  async understudyHere(): Promise<void> {
    const gone = () => (document.getElementById("understudy") as HTMLElement).hidden;
    await this.page.waitForFunction(gone, null, { timeout: 300_000 });
  }

  async understudyWrites(): Promise<void> {
    const writes = () => document.getElementById("state")?.textContent === "The understudy writes alone";
    await this.page.waitForFunction(writes, null, { timeout: 1000 * PATIENCE });
  }

  async reload(): Promise<void> {
    await this.page.reload();
  }
}

function freePort(): Promise<number> {
  return new Promise((resolve, reject) => {
    const server = createServer().on("error", reject);
    server.listen(0, "127.0.0.1", () => {
      const address = server.address();
      server.close(() => resolve(typeof address === "object" && address ? address.port : 0));
    });
  });
}
