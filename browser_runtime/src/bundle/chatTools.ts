/**
 * Writes conversations with tools for chat templates that cannot, in plain turns and a form of our own
 * (`outrider_core/chat/tools.py`).
 */

import type { ChatMessage, ToolCall } from "./chatBoundary.js";
import { wellFormed } from "./tokenizer.js";

const SYSTEM = (
  tools: string,
) => `You may call functions. They are described in <tools></tools>, one JSON object a line:
<tools>
${tools}
</tools>
To call one, write exactly this, once for each call:
<tool_call>
{"name": "the function's name", "arguments": {...}}
</tool_call>`;
const RESULT_TAG = "<tool_response>";
const TAGS = /<(\/?\s*tool_response)/gi;
/** A conversation to test a template with. */
const PROBE = { type: "function", function: { name: "probe_f", description: "probe_d", parameters: {} } };
const CALLED: ToolCall = { id: "probe_id", type: "function", function: { name: "probe_f", arguments: { probe_a: 1 } } };
const FORM = /<tool_call>\s*\{"name":\s*"probe_f",\s*"arguments":\s*\{"probe_a":\s*1\}\}\s*<\/tool_call>(?!.*probe_f)/s;

export type Render = (messages: readonly Turn[], tools: readonly unknown[]) => string;

/** Whether there are tools, calls or results to write. */
export function usesTools(messages: readonly ChatMessage[], tools: readonly unknown[]): boolean {
  return tools.length > 0 || messages.some(({ role, tool_calls }) => role === "tool" || tool_calls?.length);
}

/** Whether a template writes functions, results, and calls in the form that answers have here. */
export function writesTools(render: Render): boolean {
  const tried: Turn[] = [
    { role: "user", content: "probe_u" },
    { role: "assistant", content: "", tool_calls: [CALLED] },
    { role: "tool", content: "probe_r", tool_call_id: "probe_id", name: "probe_f" },
  ];
  const text = attempted(render, tried, [PROBE]);
  return text.split("probe_u")[0].includes("probe_d") && text.includes("probe_r") && FORM.test(text);
}

/** Whether a template writes turns of role `tool` that differ from a user's. */
export function takesResults(render: Render): boolean {
  const before: Turn[] = [
    { role: "user", content: "probe_u" },
    { role: "assistant", content: "probe_c" },
  ];
  const text = attempted(render, [...before, { role: "tool", content: "probe_r" }], []);
  return text.includes("probe_r") && text !== attempted(render, [...before, { role: "user", content: "probe_r" }], []);
}

/** Whether the template writes results between tags that are not tokens, which content could hold too. */
export function tagsResults(template: string, tokens: readonly { content: string }[]): boolean {
  return template.includes(RESULT_TAG) && !tokens.some(({ content }) => content === RESULT_TAG);
}

/** Break the tag of results in all content, for templates that write results as text into a user's turn. */
export function withoutResults(messages: readonly Turn[]): Turn[] {
  return messages.map(message =>
    message.role === "assistant" ? message : { ...message, content: untagged(message.content) },
  );
}

/** Return the conversation with content alone. results: it may hold turns of role `tool`. */
export function plainMessages(messages: readonly Turn[], tools: readonly unknown[], results: boolean): Turn[] {
  const plain: { role: string; content: string }[] = [];
  let previous = "";
  for (const { role, content: said, tool_calls } of messages) {
    const becomesUser = role === "tool" && !results;
    let content = said;
    if (role === "assistant") content = joined([content, ...(tool_calls ?? []).map(callText)]);
    else if (becomesUser) {
      content = `${RESULT_TAG}\n${pythonJson(content).replaceAll("<", "\\u003c")}\n</tool_response>`;
    } else if (!results) content = untagged(content);
    const last = plain[plain.length - 1];
    if (becomesUser && previous === "tool") last.content = joined([last.content, content]);
    else plain.push({ role: becomesUser ? "user" : role, content });
    previous = role;
  }
  if (!tools.length) return plain;
  const described = SYSTEM(tools.map(pythonJson).join("\n"));
  const first = plain[0];
  if (first?.role !== "system") return [{ role: "system", content: described }, ...plain];
  first.content = `${first.content}\n\n${described}`.trimStart();
  return plain;
}

/** The roles of a conversation. */
export const ROLES = ["system", "developer", "user", "assistant", "tool"];

/** A message in the form of chat templates. */
export interface Turn extends ChatMessage {
  content: string;
}

/**
 * Return the messages in the form of templates: content is text, arguments are objects, and "developer" is "system". Throws
 * RangeError that names the message.
 */
export function asTemplatesTake(messages: readonly ChatMessage[]): Turn[] {
  return messages.map((message, index) => {
    const { role, tool_calls } = message;
    const wrong = (what: string) => new RangeError(`messages[${index}]: ${what}`);
    if (!ROLES.includes(role)) throw wrong(`role must be one of ${ROLES.join(", ")}, not "${role}"`);
    if ((message as { function_call?: unknown }).function_call) {
      throw wrong("functions are OpenAI's old form of tools; use tool_calls");
    }
    if (tool_calls?.length && role !== "assistant") throw wrong("only an assistant has tool_calls");
    if (tool_calls?.some(({ type }) => type && type !== "function")) throw wrong("only functions are called here");
    const content = contentOf(message, wrong);
    const turn = { ...message, role: role === "developer" ? "system" : role, content };
    if (!tool_calls) return turn;
    const calls = tool_calls.map(call => ({
      ...call,
      function: { ...call.function, arguments: argumentsOf(call) },
    }));
    return { ...turn, tool_calls: calls };
  });
}

function contentOf({ role, content }: ChatMessage, wrong: (what: string) => Error): string {
  if (typeof content === "string") return content;
  if (content === null || content === undefined) {
    if (role === "assistant" || role === "tool") return "";
    throw wrong(`a message of role ${role} needs content`);
  }
  const texts = Array.isArray(content)
    ? content.map(part => (part?.type === "text" ? part.text : undefined))
    : [undefined];
  if (texts.some(text => typeof text !== "string")) {
    throw wrong(
      'content must be text, or parts {"type": "text", "text": ...}; images, audio and files are not supported',
    );
  }
  return texts.join("");
}

function argumentsOf({ function: { name, arguments: given } }: ToolCall): Record<string, unknown> {
  const wrong = new RangeError(`the arguments of ${name} are not the text of a JSON object`);
  let value: unknown = given;
  if (typeof given === "string") {
    try {
      value = JSON.parse(given || "{}");
    } catch {
      throw wrong;
    }
  }
  if (typeof value !== "object" || value === null || Array.isArray(value)) throw wrong;
  return value as Record<string, unknown>;
}

function callText(call: ToolCall): string {
  const { name, arguments: given } = call.function;
  return `<tool_call>\n${pythonJson({ name, arguments: given })}\n</tool_call>`;
}

function attempted(render: Render, messages: readonly Turn[], tools: readonly unknown[]): string {
  try {
    return render(messages, tools);
  } catch {
    return ""; // templates raise any exception
  }
}

function untagged(content: string): string {
  return content.replace(TAGS, "&lt;$1");
}

function joined(parts: readonly string[]): string {
  return parts.filter(part => part !== "").join("\n");
}

/** Write JSON with Python's spaces, so that a prompt has the same tokens on every device; whole numbers have no `.0`. */
export function pythonJson(value: unknown): string {
  if (Array.isArray(value)) return `[${value.map(pythonJson).join(", ")}]`;
  if (typeof value === "string") return JSON.stringify(wellFormed(value)); // JSON.stringify would escape half characters
  if (typeof value !== "object" || value === null) return JSON.stringify(value ?? null);
  const known = Object.entries(value).filter(([, of]) => of !== undefined);
  return `{${known.map(([key, of]) => `${pythonJson(key)}: ${pythonJson(of)}`).join(", ")}}`;
}
