// Owns: POST /v1/chat/completions and its stream of server-sent events. Refuses to know: the page.
// Invariant: an answer that did not reach its end throws, whatever the reason.

import { request } from "./api.js";

const BROKEN = "The connection broke before the answer's end.";

/**
 * Ask for an answer; yields what happens, one of
 * `{place}` while others are served first (1 is next), `{progress: {done, total}}` while the prompt
 * is read, `{reasoning}` and `{text}` as it is written, `{finish}` once, and `{usage, timings}` last.
 */
export async function* complete(body, signal) {
  const response = await request("v1/chat/completions", {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify({
      ...body,
      stream: true,
      stream_options: { include_usage: true },
      return_progress: true,
    }),
    signal,
  });
  for await (const block of blocks(response.body)) {
    if (block === "data: [DONE]") return;
    yield* block.startsWith(":") ? heard(block) : happenings(chunkOf(block));
  }
  throw new Error(BROKEN);
}

async function* blocks(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const whole = (held + value).split("\n\n");
      held = whole.pop();
      yield* whole;
    }
  } catch (error) {
    throw error.name === "AbortError" ? error : new Error(BROKEN, { cause: error });
  } finally {
    reader.cancel().catch(() => {}); // anyone who reads no further lets go of the server
  }
}

function* heard(comment) {
  const [, doing, first, second] = /^: (queued|prefill) (\d+)(?:\/(\d+))?/.exec(comment) ?? [];
  if (doing === "queued") yield { place: Number(first) };
  if (doing === "prefill") yield { progress: { done: Number(first), total: Number(second) } };
}

function chunkOf(block) {
  const data = block.split("\n").find((line) => line.startsWith("data: ")) ?? "data: {}";
  return JSON.parse(data.slice("data: ".length));
}

function* happenings(chunk) {
  if (chunk.error) throw new Error(chunk.error.message);
  const { delta = {}, finish_reason: finish } = chunk.choices?.[0] ?? {};
  if (delta.reasoning_content) yield { reasoning: delta.reasoning_content };
  if (delta.content) yield { text: delta.content };
  if (finish) yield { finish };
  if (chunk.usage) yield { usage: chunk.usage, timings: chunk.timings };
}
