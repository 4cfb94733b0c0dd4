// Owns: requests to the server that the page came from, the API key, and what failures are called.
// Refuses to know: what is asked and why. Invariant: whatever goes wrong is an Error whose message
// can be shown; the key leaves the page only as the Authorization header of these requests.

const KEY = "ds4py.key";

/** The server answered, but with a refusal. */
export class RefusedError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

/** Keep the API key until the tab closes; an empty one is forgotten. */
export function keepKey(key) {
  if (key) sessionStorage.setItem(KEY, key);
  else sessionStorage.removeItem(KEY);
}

/** Request a path below the page's own address; resolves when a success begins to arrive. */
export async function request(path, options = {}) {
  const key = sessionStorage.getItem(KEY);
  const headers = { ...options.headers, ...(key && { Authorization: `Bearer ${key}` }) };
  let response;
  try {
    response = await fetch(new URL(path, document.baseURI), { ...options, headers });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Error("The server cannot be reached.", { cause: error });
  }
  if (response.ok) return response;
  const refusal = new RefusedError(response.status, await reason(response));
  if (refusal.status === 401) document.dispatchEvent(new Event("keywanted"));
  throw refusal;
}

async function reason(response) {
  try {
    return (await response.json()).error.message;
  } catch {
    return `The server answered with status ${response.status}.`;
  }
}
