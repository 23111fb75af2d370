// Cells of a .mia-heat are walked by arrow keys, and what is known of the one in focus, or under the pointer, stands in a line below.

/** Where a key of the keyboard leads from a cell [row, column] of a grid of so many rows and columns, or null where it leads nowhere. */
function led(key, [row, column], rows, columns) {
  const to = {ArrowUp: [row - 1, column], ArrowDown: [row + 1, column], ArrowLeft: [row, column - 1], ArrowRight: [row, column + 1],
              Home: [row, 0], End: [row, columns - 1], PageUp: [0, column], PageDown: [rows - 1, column]}[key];
  return to === undefined ? null : [Math.max(0, Math.min(rows - 1, to[0])), Math.max(0, Math.min(columns - 1, to[1]))];
}

/** The line on a cell: where it is, and its note, or its text where there is no note. */
function told(axes, labels, text, note) {
  const what = (note || text).split("\n").filter(Boolean).join(" | ");
  return `${axes[0]} ${labels[0]}, ${axes[1]} ${labels[1]}: ${what || "nothing"}`;
}

/** The two names in the corner of the grid. */
function axesOf(corner) {
  const found = /^(.*) ↓ ?(.*) →$/.exec(corner);
  return found ? [found[1], found[2]] : ["row", "column"];
}

/** The colour of the page behind an element. */
function ground(element) {
  for (let at = element; at; at = at.parentElement) {
    const colour = getComputedStyle(at).backgroundColor;
    if (!/^transparent$|, 0\)$/.test(colour)) return colour;
  }
  return "Canvas";
}

/** Keeps the rows' labels in sight while a wide grid scrolls; the page's colour is looked up then, since a theme may change. */
function pin(frame, labels) {
  frame.addEventListener("scroll", () => {
    const colour = ground(frame);
    for (const label of labels) Object.assign(label.style, {position: "sticky", left: 0, background: colour});
  });
}

function reach(cell) {
  cell.tabIndex = 0;
  cell.dataset.lmSuppressShortcuts = "true"; // JupyterLab takes the arrow keys of what is focused, unless it says so itself
}

function enhance(root) {
  root.dataset.mia = "live";
  const table = root.querySelector("table");
  const heads = [...table.tHead.rows[0].cells].map((cell) => cell.textContent);
  const axes = axesOf(heads[0]);
  const body = [...table.tBodies[0].rows];
  if (!body.length || heads.length < 2) return;
  const line = document.createElement("p");
  line.className = "mia-note";
  line.style.cssText = "min-height:1.4em;margin:4px 0;font-size:13px";
  line.setAttribute("aria-live", "polite");
  line.textContent = "Point at a cell, or walk with the arrow keys, to read it here.";
  root.append(line);

  const at = (cell) => [body.indexOf(cell.parentNode), cell.cellIndex - 1];
  function tell(cell) {
    const [row, column] = at(cell);
    line.textContent = told(axes, [body[row].cells[0].textContent, heads[column + 1]], cell.textContent, cell.title);
  }
  let stop = body[0].cells[1]; // the one stop for Tab
  reach(stop);
  function go(cell) {
    stop.tabIndex = -1;
    stop = cell;
    reach(stop);
    stop.focus();
    stop.scrollIntoView({block: "nearest", inline: "nearest"});
  }
  // Not mouseover, which a grid that scrolls below a resting pointer sends, too.
  table.addEventListener("mousemove", ({target}) => { if (target.tagName === "TD") tell(target); });
  pin(table.parentNode, [table.tHead.rows[0].cells[0], ...body.map((row) => row.cells[0])]);
  table.addEventListener("mouseleave", () => { if (stop === document.activeElement) tell(stop); });
  table.addEventListener("focusin", ({target}) => { if (target.tagName === "TD") tell(target); });
  table.addEventListener("click", ({target}) => { if (target.tagName === "TD") go(target); });
  table.addEventListener("keydown", (event) => {
    const to = event.target.tagName === "TD" && led(event.key, at(event.target), body.length, heads.length - 1);
    if (!to) return;
    event.preventDefault();
    go(body[to[0]].cells[to[1] + 1]);
  });
}

document.querySelectorAll(".mia-heat:not([data-mia])").forEach(enhance);
