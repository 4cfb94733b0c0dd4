// Owns: the picture of the cluster: figures, the way of a token, machines and their layers, events.
// Refuses to know: where the figures come from and when. Invariant: rows are built again only when
// machines or layers change; otherwise only their figures do.

import { age, byId, bytes, clock, count, duration, make, number, percent, setText } from "./dom.js";

let built = ""; // what the rows were built for
let updates = []; // one function per machine, taking its figures
let lastEvents = "";

/** Show the figures of `GET /stats`. */
export function draw(stats) {
  byId("picture").hidden = false;
  drawTotals(stats);
  drawToken(stats.stages);
  drawStages(stats);
  drawEvents(stats.events);
}

function drawTotals({ tokens, requests, sessions, bubble, uptime, version }) {
  setText(byId("decode-rate"), number(tokens.decode_per_second));
  setText(byId("prefill-rate"), number(tokens.prefill_per_second));
  setText(byId("running"), number(requests.running));
  setText(byId("waiting"), number(requests.waiting));
  setText(byId("leased"), number(sessions.leased));
  setText(byId("sessions"), `of ${number(sessions.total)}`);
  setText(byId("bubble"), percent(bubble ?? NaN));
  const served = `${count(requests.served, "request")} served`;
  const others = `${number(requests.failed)} failed, ${number(requests.cancelled)} cancelled`;
  const read = `${count(tokens.prompt, "token")} read (${number(tokens.cached)} cached)`;
  const written = `${number(tokens.completion)} written`;
  setText(byId("since"), `ds4py ${version}, up ${age(uptime)}`);
  setText(byId("sums"), `${served}, ${others} · ${read}, ${written}`);
}

/** Draw where the time of a token goes: evaluation and hop of each machine, to scale. */
function drawToken(stages) {
  const parts = stages.flatMap(({ name, decode, decode_usec: usec }) =>
    decode.tokens ? [[name, "compute", usec.compute], [name, "hop", usec.hop]] : [],
  );
  const total = parts.reduce((sum, [, , usec]) => sum + usec, 0);
  setText(byId("token-time"), total ? duration(total) : "no token yet");
  const words = parts.map(([name, kind, usec]) => `${name} ${kind} ${duration(usec)}`);
  byId("token").setAttribute("aria-label", words.join(", ") || "no token yet");
  byId("token").replaceChildren(
    ...parts.filter(([, , usec]) => usec > 0).map(([name, kind, usec]) => {
      const piece = make("span", { class: kind, title: `${name}: ${kind} ${duration(usec)}` });
      piece.style.flexGrow = usec / total;
      return piece;
    }),
  );
}

function drawStages({ stages, model }) {
  const shape = JSON.stringify([model.layers, stages.map((s) => [s.name, s.layers, s.has_output])]);
  if (shape !== built) {
    built = shape;
    byId("last-layer").textContent = model.layers - 1;
    const rows = stages.map((stage) => stageRow(stage, model.layers));
    updates = rows.map(({ update }) => update);
    const placed = stages.map((stage, at) => [stage.layers?.[0] ?? -1, rows[at].node]);
    const holes = gaps(stages, model.layers).map((gap) => [gap[0], gapRow(gap, model.layers)]);
    const inOrder = [...placed, ...holes].sort(([a], [b]) => a - b);
    byId("stages").replaceChildren(...inOrder.map(([, node]) => node));
    if (!stages.some((stage) => stage.has_output)) byId("stages").append(headlessRow());
  }
  updates.forEach((update, at) => update(stages[at]));
}

/** The runs of layers, first and last, that no machine has. */
export function gaps(stages, nLayers) {
  const served = stages.map((stage) => stage.layers).filter(Boolean);
  const found = [];
  let next = 0;
  for (const [start, end] of [...served.sort(([a], [b]) => a - b), [nLayers, nLayers]]) {
    if (start > next) found.push([next, start - 1]);
    next = Math.max(next, end + 1);
  }
  return found;
}

function stageRow(stage, nLayers) {
  const figures = [
    figure("Compute", (s) => [perToken(s, s.decode_usec.compute)]),
    figure("Hop", (s) => [perToken(s, s.decode_usec.hop || NaN)]),
    figure("Busy", (s) => [percent(s.busy ?? NaN), s.busy]),
    figure("Decode", (s) => [rate(s.decode)]),
    figure("Prefill", (s) => [rate(s.prefill)]),
    figure("Weights", (s) => [bytes(s.weight_bytes ?? NaN)]),
    figure("KV cache", (s) => [memory(s), s.kv_bytes / s.kv_budget_bytes]),
  ];
  const served = stage.layers ? `layers ${range(stage.layers)}` : "no layers";
  const node = make(
    "li",
    { class: "stage" },
    head(stage.name, stage.has_output ? `${served} + output` : served),
    track(stage.layers, nLayers, stage.has_output ? "bar output" : "bar"),
    make("dl", {}, ...figures.map(({ node: one }) => one)),
  );
  return { node, update: (fresh) => figures.forEach(({ update }) => update(fresh)) };
}

function gapRow(gap, nLayers) {
  const name = `Nobody serves ${range(gap)}`;
  return make("li", { class: "stage gap" }, head(name, ""), track(gap, nLayers, "bar missing"));
}

function headlessRow() {
  return make("li", { class: "stage gap" }, head("Nobody serves the output head", ""));
}

function head(name, layers) {
  const title = make("h4", {}, name);
  return make("div", { class: "head" }, title, make("span", { class: "layers" }, layers));
}

/** The axis of all layers with a bar over some of them. */
function track(layers, nLayers, kind) {
  const axis = make("div", { class: "track", "aria-hidden": "true" });
  axis.style.setProperty("--layers", nLayers);
  if (!layers) return axis;
  const bar = make("div", { class: kind });
  bar.style.left = `${(layers[0] / nLayers) * 100}%`;
  bar.style.width = `${((layers[1] - layers[0] + 1) / nLayers) * 100}%`;
  axis.append(bar);
  return axis;
}

/** A labelled figure; `read` takes a machine to a text and, if there is one, a share from 0 to 1. */
function figure(label, read) {
  const value = make("dd");
  const level = make("i", { class: "level", "aria-hidden": "true" });
  const node = make("div", {}, make("dt", {}, label), value, level);
  const update = (stage) => {
    const [text, share = NaN] = read(stage);
    setText(value, text);
    level.classList.toggle("known", Number.isFinite(share));
    level.style.setProperty("--share", Math.min(share || 0, 1));
  };
  return { node, update };
}

const range = ([start, end]) => (start === end ? `${start}` : `${start}–${end}`);

const perToken = (stage, usec) => duration(stage.decode.tokens ? usec : NaN);

const rate = ({ tokens, per_second }) => (tokens ? `${number(per_second)} t/s` : number(NaN));

const memory = ({ kv_bytes: used, kv_budget_bytes: budget }) =>
  used === null ? number(NaN) : bytes(used) + (budget ? ` / ${bytes(budget)}` : "");

function drawEvents(events) {
  const fresh = JSON.stringify(events);
  if (fresh === lastEvents) return;
  lastEvents = fresh;
  const rows = events.toReversed().map(({ time, level, text }) => {
    const at = make("time", { datetime: new Date(time * 1000).toISOString() }, clock(time));
    const weight = make("span", { class: "weight" }, level);
    return make("li", { "data-level": level }, at, weight, make("span", {}, text));
  });
  byId("events").replaceChildren(...rows);
  byId("no-events").hidden = rows.length > 0;
}
