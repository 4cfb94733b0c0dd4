// Owns: starting the parts of the page, and the small controls around them: the API key, the colour
// scheme, and on narrow screens which of the two views is seen.

import { keepKey } from "./api.js";
import { startChat } from "./chat.js";
import { ask, startCluster } from "./cluster.js";
import { byId } from "./dom.js";

function startKey() {
  const form = byId("key-form");
  document.addEventListener("keywanted", () => {
    form.hidden = false;
  });
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    keepKey(byId("key").value.trim());
    byId("key").value = "";
    form.hidden = true;
    byId("message").focus();
    ask();
  });
}

function startTheme() {
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const button = byId("theme");
  const root = document.documentElement;
  const isDark = () => (root.dataset.theme ?? (dark.matches ? "dark" : "light")) === "dark";
  const say = () => button.setAttribute("aria-pressed", String(isDark()));
  button.addEventListener("click", () => {
    root.dataset.theme = isDark() ? "light" : "dark";
    try {
      localStorage.setItem("ds4py.theme", root.dataset.theme);
    } catch {
      // the choice then lasts as long as the page
    }
    say();
  });
  dark.addEventListener("change", say);
  say();
}

function startViews() {
  const buttons = document.querySelectorAll("#views button");
  for (const button of buttons) {
    button.addEventListener("click", () => {
      document.body.dataset.view = button.dataset.view;
      buttons.forEach((one) => one.setAttribute("aria-pressed", String(one === button)));
    });
  }
}

startTheme();
startViews();
startKey();
startChat();
startCluster();
