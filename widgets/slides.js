// One page of a .mia-slides at a time, chosen by a range input. Without this script all pages stand one under the other.

/** The index that a start stands for among n pages. */
function within(start, n) {
  return Math.max(0, Math.min(n - 1, Math.trunc(Number(start)) || 0));
}

/** The index of a label, or another index where it is none of them. */
function indexOr(labels, label, otherwise) {
  const found = labels.indexOf(label);
  return found < 0 ? otherwise : found;
}

function element(tag, style, text) {
  const made = document.createElement(tag);
  made.style.cssText = style;
  made.textContent = text;
  return made;
}

/** The row of controls: name, range between the first and the last label, and the label that is shown. */
function controls(name, labels) {
  const row = element("label", "display:flex;flex-wrap:wrap;gap:10px;align-items:center;margin:8px 0", "");
  const input = element("input", "width:320px;flex:0 1 320px", "");
  Object.assign(input, {type: "range", min: 0, max: labels.length - 1, step: 1});
  input.setAttribute("aria-label", name);
  input.dataset.lmSuppressShortcuts = "true"; // JupyterLab takes the arrow keys of what is focused, unless it says so itself
  const output = element("output", "font-weight:bold;min-width:9em", "");
  row.append(element("span", "", name), element("small", "opacity:0.75", labels[0]), input,
             element("small", "opacity:0.75", labels[labels.length - 1]), output);
  return {row, input, output};
}

/** Slides inside a page go to where those of the same name stood on the page before. */
function carry(from, to) {
  for (const inner of to.querySelectorAll(".mia-slides")) {
    const name = inner.getAttribute("aria-label");
    const same = [...from.querySelectorAll(".mia-slides")].find((other) => other.getAttribute("aria-label") === name);
    if (same?.miaLabel && inner.miaGo) inner.miaGo(same.miaLabel());
  }
}

function enhance(root) {
  const pages = [...root.children].filter((child) => child.classList.contains("mia-page"));
  const labels = pages.map((page) => page.dataset.label);
  root.dataset.mia = "live";
  if (pages.length < 2) return;
  const {row, input, output} = controls(root.getAttribute("aria-label"), labels);
  let at = within(root.dataset.start, pages.length);
  function show(next) {
    if (next !== at) carry(pages[at], pages[next]);
    at = next;
    pages.forEach((page, i) => { page.style.display = i === at ? "" : "none"; });
    input.value = at;
    input.setAttribute("aria-valuetext", labels[at]);
    output.textContent = labels[at];
  }
  for (const page of pages) page.firstElementChild.style.display = "none";
  input.addEventListener("input", () => show(within(input.value, pages.length)));
  root.miaLabel = () => labels[at];
  root.miaGo = (label) => show(indexOr(labels, label, at));
  root.prepend(row);
  show(at);
}

document.querySelectorAll(".mia-slides:not([data-mia])").forEach(enhance);
