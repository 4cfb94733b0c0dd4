// Owns: the conversation, the form below it, one request at a time. Refuses to know: how answers
// are drawn, the stream's format. Invariant: what is sent is what is seen: turns that failed are
// neither, and their text goes back into the form.

import { Answer, keepEndInView } from "./answer.js";
import { complete } from "./completion.js";
import { byId, make, setText } from "./dom.js";

const THINK = { on: true, off: false };

let turns = []; // {user, answer}, oldest first
let running = null; // AbortController of the request under way

/** Bring the chat to life. */
export function startChat() {
  const message = byId("message");
  byId("composer").addEventListener("submit", (event) => {
    event.preventDefault();
    send();
  });
  message.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    send();
  });
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape") stop();
  });
  byId("stop").addEventListener("click", stop);
  byId("clear").addEventListener("click", clear);
}

function stop() {
  running?.abort();
}

function clear() {
  stop();
  turns = [];
  byId("log").replaceChildren();
  setBusy(false);
  say("Conversation cleared");
  byId("message").focus();
}

async function send() {
  const message = byId("message");
  const user = message.value.trim();
  if (!user || running || !byId("settings").reportValidity()) return;
  const mine = (running = new AbortController());
  const turn = { user, answer: new Answer(byId("model").textContent || "The model") };
  const nodes = [userNode(user), turn.answer.node];
  message.value = "";
  setBusy(true);
  say("Waiting for the server");
  keepEndInView(() => byId("log").append(...nodes));
  byId("log").scrollTop = byId("log").scrollHeight;
  message.focus();
  const failure = await receive(turn, mine.signal);
  if (running !== mine) return; // the conversation was cleared meanwhile
  setBusy(false);
  if (turn.answer.text || turn.answer.reasoning) turns.push(turn);
  else takeBack(nodes, user);
  say(failure || "Answered", failure ? "error" : "");
}

/** Stream an answer into its turn; returns why it failed, "" if it did not. */
async function receive(turn, signal) {
  const outcome = {};
  try {
    for await (const event of complete(request(turn.user), signal)) {
      if (event.place) say(`Waiting, place ${event.place}`);
      else if (event.progress) showProgress(event.progress);
      else if (event.text || event.reasoning) {
        if (!turn.answer.text) say(event.text ? "Answering" : "Thinking");
        turn.answer.add(event);
      } else Object.assign(outcome, event);
    }
    turn.answer.end(outcome);
    return "";
  } catch (error) {
    const stopped = signal.aborted;
    turn.answer.end({ note: stopped ? "stopped" : "broken off" });
    return stopped ? "Stopped" : error.message;
  }
}

function request(user) {
  const system = byId("system").value.trim();
  const messages = system ? [{ role: "system", content: system }] : [];
  for (const turn of turns) {
    const { text: content, reasoning: reasoning_content } = turn.answer;
    messages.push({ role: "user", content: turn.user });
    messages.push({ role: "assistant", content, ...(reasoning_content && { reasoning_content }) });
  }
  messages.push({ role: "user", content: user });
  const temperature = byId("temperature").valueAsNumber;
  const max_tokens = byId("max-tokens").valueAsNumber;
  const think = THINK[byId("thinking").value];
  return {
    messages,
    default_system: true,
    ...(Number.isFinite(temperature) && { temperature }),
    ...(Number.isFinite(max_tokens) && { max_tokens }),
    ...(think !== undefined && { think }),
  };
}

function userNode(text) {
  const title = make("h3", { class: "hidden" }, "You");
  return make("article", { class: "turn user" }, title, make("p", { class: "text" }, text));
}

/** Undo a turn without an answer: its text can be sent again. */
function takeBack(nodes, user) {
  nodes.forEach((node) => node.remove());
  const message = byId("message");
  if (!message.value) message.value = user;
}

function setBusy(busy) {
  if (!busy) running = null;
  byId("composer").classList.toggle("busy", busy);
  byId("send").disabled = busy;
  byId("stop").disabled = !busy;
  byId("prefill").value = 0;
}

function showProgress({ done, total }) {
  say(`Reading the prompt, ${total.toLocaleString("en")} tokens`);
  byId("prefill").value = done < total ? done / total : 0;
}

function say(words, level = "") {
  const status = byId("chat-state");
  setText(status, words);
  status.dataset.level = level;
}
