// Owns: when the figures are asked for, and what the page says when they do not come. Refuses to
// know: how they are drawn. Invariant: one question at a time, each with a deadline; a server that
// does not answer, and a page that nobody sees, are asked ever more rarely.

import { request } from "./api.js";
import { byId, clock, setText } from "./dom.js";
import { draw } from "./picture.js";

const PAUSE = 1000; // milliseconds
const LONGEST_PAUSE = 30_000;
const PATIENCE = 5000;

let timer = 0;
let asking = false;
let failures = 0;
let latest = 0; // Unix seconds of the figures on show

/** Follow the server from now on. */
export function startCluster() {
  document.addEventListener("visibilitychange", () => {
    if (!document.hidden) ask();
  });
  byId("retry").addEventListener("click", ask);
  ask();
}

/** Ask now, whatever the pause. */
export async function ask() {
  if (asking) return;
  asking = true;
  clearTimeout(timer);
  let stats = null;
  let failure = null;
  try {
    const response = await request("stats", { signal: AbortSignal.timeout(PATIENCE) });
    stats = await response.json();
  } catch (error) {
    failure = error;
  }
  asking = false;
  failures = failure ? failures + 1 : 0;
  timer = setTimeout(ask, pause());
  if (stats) tell(stats);
  else admit(failure);
}

const pause = () =>
  document.hidden ? LONGEST_PAUSE : Math.min(PAUSE * 2 ** failures, LONGEST_PAUSE);

function tell(stats) {
  latest = stats.time;
  setState(stats.ready ? "ready" : "incomplete", stats.ready ? "Ready" : "Incomplete");
  setText(byId("model"), stats.model.name);
  document.title = `${stats.model.name} · ds4py`;
  setText(byId("freshness"), `Updated ${clock(latest)}`);
  byId("retry").hidden = true;
  byId("cluster").dataset.stale = "false";
  draw(stats);
}

function admit(failure) {
  const refused = failure.status !== undefined;
  const said = refused ? failure.message : "The server does not answer.";
  setState("unreachable", refused ? "No figures" : "Unreachable");
  const since = latest ? ` These figures are from ${clock(latest)}.` : "";
  setText(byId("freshness"), `${said}${since}`);
  byId("retry").hidden = false;
  byId("cluster").dataset.stale = String(latest > 0);
}

function setState(state, words) {
  byId("state").dataset.state = state;
  setText(byId("state"), words);
}
