// Applies the chosen colours before anything is drawn. A classic script: a module would run after the first paint.
(() => {
  let chosen = null;
  try {
    chosen = localStorage.getItem("quipu.theme");
  } catch {
    // storage may be forbidden: then the system's colours apply
  }
  if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
})();
