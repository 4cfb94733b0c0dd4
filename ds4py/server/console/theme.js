// Owns: the chosen colour scheme, set before the first paint; so no module, which would come later.
try {
  const chosen = localStorage.getItem("ds4py.theme");
  if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
} catch {
  // a browser that keeps nothing follows the system
}
