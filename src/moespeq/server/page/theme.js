// Light, dark, or as the system is; the choice is kept in this browser.

const CHOICES = ["auto", "light", "dark"];
const system = matchMedia("(prefers-color-scheme: dark)");

// changed: called when colours are others.
export function useTheme(button, changed) {
  let choice = kept();
  const show = () => {
    document.documentElement.dataset.theme = choice === "auto" ? (system.matches ? "dark" : "light") : choice;
    button.textContent = `Theme: ${choice}`;
    changed();
  };
  button.addEventListener("click", () => {
    choice = CHOICES[(CHOICES.indexOf(choice) + 1) % CHOICES.length];
    try { localStorage.setItem("moespeq-theme", choice); } catch { /* a browser that keeps nothing */ }
    show();
  });
  system.addEventListener("change", show);
  show();
}

function kept() {
  try {
    const choice = localStorage.getItem("moespeq-theme");
    return CHOICES.includes(choice) ? choice : "auto";
  } catch { return "auto"; }
}
