// Owns: making elements, and how figures read. Refuses to know: what they are figures of.
// Invariant: text becomes text nodes; nothing here parses markup.

const UNKNOWN = "–";

/** Find an element of the page by its id. */
export const byId = (id) => document.getElementById(id);

/** Make an element with attributes and children, each an element or a text. */
export function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

/** Change an element's text only if it differs, so that screen readers stay where they are. */
export function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

/** "0.42", "7.3", "88", "1,204": three figures where there are any behind the point. */
export function number(value) {
  if (!Number.isFinite(value)) return UNKNOWN;
  const digits = value === 0 || value >= 100 ? 0 : value >= 1 ? 1 : 2;
  return value.toLocaleString("en", { maximumFractionDigits: digits });
}

/** Microseconds in the unit that suits them. */
export function duration(usec) {
  if (!Number.isFinite(usec)) return UNKNOWN;
  if (usec < 1000) return `${number(Math.round(usec))} µs`;
  return usec < 1e6 ? `${number(usec / 1e3)} ms` : `${number(usec / 1e6)} s`;
}

/** Bytes in the unit that suits them. */
export function bytes(value) {
  if (!Number.isFinite(value)) return UNKNOWN;
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  while (value >= 1024 && unit < units.length - 1) [value, unit] = [value / 1024, unit + 1];
  return `${number(value)} ${units[unit]}`;
}

/** A share between 0 and 1 as a percentage. */
export const percent = (share) =>
  Number.isFinite(share) ? `${Math.round(share * 100)} %` : UNKNOWN;

/** Seconds as people say them: "48 s", "12 min", "3 h 20 min", "5 d 2 h". */
export function age(seconds) {
  const minutes = Math.floor(seconds / 60);
  const hours = Math.floor(minutes / 60);
  if (minutes < 1) return `${Math.floor(seconds)} s`;
  if (hours < 1) return `${minutes} min`;
  if (hours < 24) return `${hours} h ${minutes % 60} min`;
  return `${Math.floor(hours / 24)} d ${hours % 24} h`;
}

/** The time of day of Unix seconds, on the reader's clock. */
export const clock = (seconds) =>
  new Date(seconds * 1000).toLocaleTimeString("en-GB", { hourCycle: "h23" });

/** "1 token", "2 tokens". */
export const count = (n, noun) => `${n.toLocaleString("en")} ${noun}${n === 1 ? "" : "s"}`;
