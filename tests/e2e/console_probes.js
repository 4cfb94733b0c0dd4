// Functions that the tests run in the page to measure it.

/** Where bars begin and end, as parts of their axis. */
function barSpans(kind = ".bar") {
  return [...document.querySelectorAll(`.track ${kind}`)].map((bar) => {
    const axis = bar.parentElement.getBoundingClientRect();
    const { left, right } = bar.getBoundingClientRect();
    return [(left - axis.left) / axis.width, (right - axis.left) / axis.width];
  });
}

/** Markdown texts as the markup of what is shown for them. */
async function showAll(texts, done) {
  const { show } = await import("/console/markdown.js");
  const shown = texts.map((text) => {
    const host = document.createElement("div");
    show(host, text);
    return host.innerHTML;
  });
  done(shown);
}

/** The same, each text given character by character. */
async function showGrowing(texts, done) {
  const { show } = await import("/console/markdown.js");
  const shown = texts.map((text) => {
    const host = document.createElement("div");
    for (let end = 0; end <= text.length; end += 1) show(host, text.slice(0, end));
    return host.innerHTML;
  });
  done(shown);
}

/** How long texts of one mark repeated are when shown, given to `done`. */
async function showMany(marks, times, done) {
  const { show } = await import("/console/markdown.js");
  const host = document.createElement("div");
  const length = (mark) => {
    show(host, mark.repeat(times));
    return host.textContent.length;
  };
  done(marks.map(length));
}

/** Elements that are cut off or push their surroundings beyond the screen. */
function overflowing() {
  const scrolls = (element) => ["auto", "scroll"].includes(getComputedStyle(element).overflowX);
  const inScroller = (element) => element.closest("pre") !== null;
  const wide = [...document.querySelectorAll("body *")].filter((element) => {
    const { right, width } = element.getBoundingClientRect();
    return width > 0 && right > innerWidth + 0.5 && !inScroller(element);
  });
  const scrolled = [document.scrollingElement, ...document.querySelectorAll("section, #log, #events")];
  const sideways = scrolled.filter((element) => element.scrollWidth > element.clientWidth);
  return [...wide, ...sideways].map((element) => element.id || element.className || element.tagName);
}

function channels(colour) {
  const [red, green, blue, alpha = 1] = colour.match(/[\d.]+/g).map(Number);
  return { rgb: [red, green, blue], alpha };
}

function luminance(rgb) {
  const linear = rgb.map((value) => {
    const share = value / 255;
    return share <= 0.04045 ? share / 12.92 : ((share + 0.055) / 1.055) ** 2.4;
  });
  return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2];
}

/** The first background behind an element that cannot be seen through. */
function groundOf(element) {
  for (let one = element; one; one = one.parentElement) {
    const { rgb, alpha } = channels(getComputedStyle(one).backgroundColor);
    if (alpha === 1) return rgb;
  }
  return [255, 255, 255];
}

/** Visible texts whose contrast (WCAG 2.2, 1.4.3) is below the least one. */
function poorContrasts(least) {
  const poor = [];
  for (const element of document.querySelectorAll("body *")) {
    const own = [...element.childNodes].some((node) => node.nodeType === 3 && node.data.trim());
    const field = element.matches("input, textarea, select");
    if ((!own && !field) || !element.checkVisibility({ visibilityProperty: true })) continue;
    for (const pseudo of field ? [null, "::placeholder"] : [null]) {
      const text = luminance(channels(getComputedStyle(element, pseudo).color).rgb);
      const ground = luminance(groundOf(element));
      const ratio = (Math.max(text, ground) + 0.05) / (Math.min(text, ground) + 0.05);
      if (ratio < least) poor.push([element.id || element.className || element.tagName, ratio]);
    }
  }
  return poor;
}

/** Keep the pauses that the page asks for, and make them short. */
function recordPauses() {
  const real = window.setTimeout.bind(window);
  window.pauses = [];
  window.setTimeout = (run, pause) => {
    window.pauses.push(pause);
    return real(run, 0);
  };
}

/** Keep the pauses that the page asks for; none of them ends. */
function holdTimers() {
  window.pauses = [];
  window.setTimeout = (_, pause) => window.pauses.push(pause);
}

/** Make the page believe that it is seen, or not. */
function setHidden(hidden) {
  Object.defineProperty(document, "hidden", { value: hidden, configurable: true });
  document.dispatchEvent(new Event("visibilitychange"));
}

/** What moved outside the conversation since the page was opened, given to `done`. */
function shifts(done) {
  const found = [];
  const observer = new PerformanceObserver((list) => found.push(...list.getEntries()));
  observer.observe({ type: "layout-shift", buffered: true });
  requestAnimationFrame(() =>
    requestAnimationFrame(() => {
      found.push(...observer.takeRecords());
      const moved = found.flatMap(({ sources }) => sources.map(({ node }) => node));
      const elements = moved.map((node) => (node?.nodeType === 3 ? node.parentElement : node));
      const outside = elements.filter((element) => element && !element.closest("#log"));
      done(outside.map((element) => element.id || element.className || element.tagName));
    }),
  );
}
