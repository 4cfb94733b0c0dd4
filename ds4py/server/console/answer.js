// Owns: how one answer looks while it is written and afterwards. Refuses to know: requests.
// Invariant: at most one update of the page per frame, however fast the pieces come; screen readers
// are told when the answer is whole, not of every piece.

import { byId, count, make, number } from "./dom.js";
import { show } from "./markdown.js";

let showReasoning = false; // as the reader last chose

/** One answer in the conversation; `node` belongs into the page. */
export class Answer {
  text = "";
  reasoning = "";
  #begun = performance.now();
  #thought = 0; // seconds, once the reasoning has ended
  #firstPiece = 0;
  #frame = 0;
  #text = make("div", { class: "text" });
  #summary = make("summary", {}, "Thinking…");
  #thoughts = make("div", { class: "thoughts" });
  #details = make("details", { class: "reasoning" }, this.#summary, this.#thoughts);
  #cost = make("p", { class: "cost" });

  constructor(name) {
    const title = make("h3", { class: "hidden" }, `${name} answers`);
    this.node = make("article", { class: "turn answer", "aria-busy": "true" }, title);
    this.node.append(this.#details, this.#text, this.#cost);
    this.#details.hidden = true;
    this.#summary.addEventListener("click", () => {
      showReasoning = !this.#details.open;
    });
  }

  /** Take a piece of the reasoning or of the answer. */
  add({ reasoning = "", text = "" }) {
    this.#firstPiece ||= performance.now();
    if (text && this.reasoning && !this.#thought) this.#thought = this.#seconds();
    this.reasoning += reasoning;
    this.text += text;
    this.#frame ||= requestAnimationFrame(() => this.#draw());
  }

  /** Show all that came, and a line about what it cost or why it ended early. */
  end({ finish = "", usage = null, timings = null, note = "" }) {
    if (this.reasoning && !this.#thought) this.#thought = this.#seconds();
    this.#draw();
    const words = [note, finish === "length" && "cut off at the token limit"];
    if (usage) words.push(...this.#figures(usage, timings));
    this.#cost.textContent = words.filter(Boolean).join(" · ");
    this.node.setAttribute("aria-busy", "false");
  }

  #figures(usage, timings) {
    const { prompt_tokens: prompt, completion_tokens: written } = usage;
    const cached = usage.prompt_tokens_details?.cached_tokens ?? 0;
    const decoding = (performance.now() - this.#firstPiece) / 1000;
    const rate = timings?.predicted_per_second || written / decoding;
    return [
      `${count(written, "token")} at ${number(rate)} tokens/s`,
      `prompt ${count(prompt, "token")}, ${cached.toLocaleString("en")} cached`,
    ];
  }

  #seconds() {
    return Math.max(1, Math.round((performance.now() - this.#begun) / 1000));
  }

  #draw() {
    cancelAnimationFrame(this.#frame);
    this.#frame = 0;
    keepEndInView(() => {
      if (this.reasoning) {
        if (this.#details.hidden) this.#details.open = showReasoning;
        this.#details.hidden = false;
        show(this.#thoughts, this.reasoning.trim());
      }
      if (this.#thought) this.#summary.textContent = `Thought for ${this.#thought} s`;
      show(this.#text, this.text);
    });
  }
}

/** Change the conversation; if its end was in view, it still is afterwards. */
export function keepEndInView(change) {
  const log = byId("log");
  const atEnd = log.scrollHeight - log.scrollTop - log.clientHeight < 40;
  change();
  if (atEnd) log.scrollTop = log.scrollHeight;
}
