/** Calls of OpenAI's JavaScript client to one of our endpoints, in Node or in a page. */

import OpenAI from "openai";

type Fields = Record<string, unknown>;

const QUESTION = { role: "user", content: "Name three uses of copper." } as const;
const PLACE = {
  type: "object",
  properties: { city: { type: "string", maxLength: 12 }, large: { type: "boolean" } },
  required: ["city", "large"],
  additionalProperties: false,
};
const ADD = {
  type: "object",
  properties: { a: { type: "integer", maximum: 999 }, b: { type: "integer", maximum: 999 } },
  required: ["a", "b"],
  additionalProperties: false,
};
const TOOL = { type: "function", function: { name: "add", description: "Add two numbers", parameters: ADD } };
const FORM = { type: "json_schema", json_schema: { name: "place", schema: PLACE, strict: true } };
/** Each is requested whole and streamed: both must give the same text. */
const FIELDS: Fields[] = [
  {},
  { max_tokens: 1 },
  { max_tokens: undefined, max_completion_tokens: 3 },
  { temperature: 0.7, top_p: 0.9, seed: 5 },
  { frequency_penalty: 2, presence_penalty: -2 },
  { logit_bias: { "28": -100, "30": 5 } },
  { top_k: 20, min_p: 0.05, temperature: 1, seed: 2 },
  { response_format: { type: "json_object" } },
  { response_format: FORM, max_tokens: 60 },
  { tools: [TOOL], tool_choice: "none" },
  { user: "me", store: false, metadata: { a: "b" }, service_tier: "auto" },
];

function check(holds: unknown, ...told: unknown[]): asserts holds {
  if (!holds) throw new Error(JSON.stringify(told));
}

/** Make every call of the client; return the texts. Throws if a reply violates the API. */
export async function cases(baseURL: string): Promise<string[]> {
  const client = new OpenAI({
    baseURL,
    apiKey: "none",
    maxRetries: 0,
    timeout: 300_000,
    dangerouslyAllowBrowser: true,
  });
  const model = (await client.models.list()).data[0].id;
  check((await client.models.retrieve(model)).id === model);
  const base = { model, messages: [QUESTION], max_tokens: 16, temperature: 0 };
  // The client's types have only OpenAI's own fields; ours are tested too.
  const whole = (fields: Fields): Promise<OpenAI.ChatCompletion> =>
    client.chat.completions.create({ ...base, ...fields } as OpenAI.ChatCompletionCreateParamsNonStreaming);
  const texts: string[] = [];

  for (const fields of FIELDS) {
    const answer = await whole(fields);
    const stream = client.chat.completions.stream({
      ...base,
      ...fields,
      stream_options: { include_usage: true },
    } as Parameters<typeof client.chat.completions.stream>[0]);
    const { choices, usage } = await stream.finalChatCompletion();
    const [one, other] = [answer.choices[0], choices[0]];
    check(one.message.content === other.message.content, fields, one.message, other.message);
    check(one.finish_reason === other.finish_reason && usage?.completion_tokens === answer.usage?.completion_tokens);
    texts.push(one.message.content ?? "");
  }

  const text = texts[0];
  const stopped = await whole({ stop: text.slice(4, 7) });
  check(stopped.choices[0].message.content === text.slice(0, text.indexOf(text.slice(4, 7))), text);
  check((await whole({ n: 3, seed: 5, temperature: 1 })).choices.map(each => each.index).join() === "0,1,2");

  const called = await whole({ tools: [TOOL], tool_choice: "required", parallel_tool_calls: false, max_tokens: 60 });
  const [call] = called.choices[0].message.tool_calls ?? [];
  check(call?.type === "function" && call.function.name === "add", called);
  check(Number.isInteger(JSON.parse(call.function.arguments).a), call);
  const messages = [QUESTION, called.choices[0].message, { role: "tool", tool_call_id: call.id, content: "42" }];
  texts.push(call.function.arguments, (await whole({ messages, tools: [TOOL] })).choices[0].message.content ?? "");

  const completion = await client.completions.create({ model, prompt: "The sea is", max_tokens: 8, temperature: 0 });
  const request = { model, input: "Say hi.", temperature: 0, max_output_tokens: 12 };
  const response = await client.responses.create(request);
  let streamed = "";
  for await (const event of await client.responses.create({ ...request, stream: true }))
    if (event.type === "response.output_text.delta") streamed += event.delta;
  check(streamed === response.output_text && streamed, streamed, response);
  texts.push(completion.choices[0].text, streamed);

  const bad: Fields[] = [{ temperature: 3 }, { n: 0 }, { messages: [] }, { top_p: 2 }, { min_tokens: 3 }];
  for (const fields of bad) {
    const error: unknown = await whole(fields).catch((error: unknown) => error);
    check(error instanceof OpenAI.BadRequestError && error.param === Object.keys(fields)[0] && error.code, fields);
  }
  const missing: unknown = await whole({ model: "nobody" }).catch((error: unknown) => error);
  check(missing instanceof OpenAI.NotFoundError, missing);

  const long = await client.chat.completions.create({ ...base, messages: [QUESTION], max_tokens: 400, stream: true });
  for await (const _ of long) break; // hangs up
  check((await whole({})).choices[0].message.content === text);
  return texts;
}
