// Says, above a panel's result, when its controls no longer answer. A kernel cannot say so once it is gone, so this looks at what the
// page shows: whether the panel's controls are there and connected, and what the notebook's kernel indicator says.
const GONE = ["dead", "unknown", "disconnected", "terminating"];

// What there is to say: nothing, or why the controls do not answer. status: the kernel's, null where the page does not show it.
function trouble(present, connected, status) {
  if (status !== null && GONE.includes(status)) return "The kernel is gone, and the controls of this result do not answer.";
  if (!present) return "The controls of this result are gone: the page was loaded anew.";
  return connected ? "" : "The kernel was restarted, and the controls of this result no longer answer.";
}

function kernelStatus(twin) {
  const notebook = twin.closest(".jp-NotebookPanel, .jp-MainAreaWidget") || document;
  const indicator = notebook.querySelector(".jp-Notebook-ExecutionIndicator") || document.querySelector(".jp-Notebook-ExecutionIndicator");
  return (indicator && indicator.dataset.status) || null;
}

function look(twin) {
  const line = twin.querySelector(".mia-gone"), controls = document.querySelector(`.mia-id-${twin.dataset.controls}`);
  const connected = controls !== null && !controls.matches(".jupyter-widgets-disconnected")
    && controls.querySelector(".jupyter-widgets-disconnected") === null;
  const said = trouble(controls !== null, connected, kernelStatus(twin));
  line.querySelector(".mia-why").textContent = said;
  line.style.display = said ? "block" : "none";
}

// One timer a page: results are replaced many times a second while text streams in.
if (typeof window !== "undefined" && !window.miaTwins)
  window.miaTwins = setInterval(() => document.querySelectorAll(".mia-twin[data-controls]").forEach(look), 1000);
