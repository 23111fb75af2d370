// The large view of a .mia-heads: one head at a time, its tokens along both sides, its weights read from the image.

/** Rows of weights 0 to 1 from RGBA bytes: the alpha is the weight. */
function weightsOf(bytes, rows, columns) {
  return Array.from({length: rows}, (_, i) => Array.from({length: columns}, (_, j) => bytes[4 * (i * columns + j) + 3] / 255));
}

/** The places of the n largest values that do not show as 0.00, the largest first. */
function largest(values, n) {
  return values.map((value, i) => i).filter((i) => values[i] >= 0.005).sort((a, b) => values[b] - values[a]).slice(0, n);
}

/** A weight with two decimals, and how far off it may be where shades were rounded. */
function number(weight, levels) {
  return weight.toFixed(2) + (levels < 256 ? ` ±${(0.5 / (levels - 1)).toFixed(2)}` : "");
}

/** A sentence on one query's weights, or on one key's. */
function told(label, verb, values, labels, levels) {
  const found = largest(values, 5).map((i) => `${labels[i]} ${number(values[i], levels)}`);
  return `${label} ${verb} ${found.join(", ") || "nothing: every weight here is below 0.005"}`;
}

/** Where a key of the keyboard leads from place i of n, or -1 where it leads nowhere. */
function led(key, i, n) {
  const to = {ArrowRight: i + 1, ArrowDown: i + 1, ArrowLeft: i - 1, ArrowUp: i - 1, Home: 0, End: n - 1}[key];
  return to === undefined ? -1 : Math.max(0, Math.min(n - 1, to));
}

/** The side of a cell in pixels: small enough for a few tokens to fit, large enough for a label to be read. */
function cellSide(rows, columns) {
  return Math.max(14, Math.min(30, Math.floor(460 / Math.max(rows, columns))));
}

/** Pixels for the labels of one axis: what the longest needs, up to 110. Most characters are 7.3 wide, those of East Asia and emoji 13. */
function labelSide(texts) {
  const needs = texts.map((text) => [...text].reduce((sum, sign) => sum + (sign.codePointAt(0) < 0x2e80 ? 7.3 : 13), 10));
  return Math.ceil(Math.min(110, Math.max(24, ...needs)));
}

const BAND = "position:absolute;pointer-events:none;background:rgba(41,128,185,0.16);outline:1px solid rgba(41,128,185,0.9);display:none";
const BUTTON = "display:block;position:absolute;padding:0 3px;margin:0;border:0;background:none;color:inherit;font:12px/1 monospace;"
  + "white-space:pre;overflow:hidden;text-overflow:ellipsis;cursor:pointer;";
const FRAME = 2; // pixels around the picture, for the line that goes round it

function element(tag, style, text) {
  const made = document.createElement(tag);
  made.style.cssText = style;
  made.textContent = text ?? "";
  return made;
}

/** One stop for Tab in a list of elements; arrows, Home and End move within it. */
function rove(items) {
  items.forEach((item, i) => {
    item.tabIndex = i ? -1 : 0;
    item.dataset.lmSuppressShortcuts = "true"; // JupyterLab takes the arrow keys of what is focused, unless it says so itself
    item.addEventListener("keydown", (event) => {
      const to = led(event.key, i, items.length);
      if (to < 0) return;
      event.preventDefault();
      items[to].focus();
    });
    item.addEventListener("focus", () => items.forEach((other, j) => { other.tabIndex = j === i ? 0 : -1; }));
  });
}

async function read(image, rows, columns) {
  await image.decode();
  const canvas = Object.assign(document.createElement("canvas"), {width: columns, height: rows});
  const context = canvas.getContext("2d");
  context.drawImage(image, 0, 0);
  return weightsOf(context.getImageData(0, 0, columns, rows).data, rows, columns);
}

/** Labels of one axis as buttons; those of columns are turned. left, top: where the picture begins. */
function labels(texts, side, turned, title, {left, top}) {
  const list = element("div", turned
    ? `position:absolute;left:${left}px;top:0;height:${top}px;width:${texts.length * side}px`
    : `position:sticky;left:0;top:0;width:${left}px;height:${top + texts.length * side}px`);
  list.setAttribute("role", "toolbar");
  list.setAttribute("aria-label", title);
  const buttons = texts.map((text, i) => {
    const place = turned
      ? `left:${i * side}px;bottom:0;width:${side}px;height:${top}px;padding:4px 0;`
        + "writing-mode:vertical-rl;transform:rotate(180deg);text-align:left"
      : `top:${top + i * side}px;left:0;width:${left}px;height:${side}px;text-align:right`;
    const button = element("button", BUTTON + place, text);
    return Object.assign(button, {type: "button", title: text});
  });
  list.append(...buttons);
  rove(buttons);
  return {list, buttons};
}

/** The large view of one head: returns the element. */
function large(name, image, weights, queries, keys, levels) {
  const side = cellSide(queries.length, keys.length);
  const [width, height] = [keys.length * side, queries.length * side];
  const [left, top] = [labelSide(queries), labelSide(keys)];
  const view = element("div", "");
  const line = element("p", "min-height:2.6em;margin:4px 0", 
    "Point at, or move the focus to, a token to see what it attends to (rows) and what attends to it (columns).");
  line.setAttribute("aria-live", "polite");
  const scroll = element("div", "overflow:auto;max-height:620px;margin-bottom:10px");
  const field = element("div", `position:relative;width:${left + width + FRAME}px;height:${top + height + FRAME}px`);
  const picture = element("img", `position:absolute;left:${left}px;top:${top}px;width:${width}px;height:${height}px;max-width:none;`
    + "image-rendering:pixelated;outline:1px solid rgba(128,128,128,0.5)");
  Object.assign(picture, {src: image.src, alt: image.alt});
  const row = element("div", `${BAND};left:${left}px;width:${width}px;height:${side}px`);
  const column = element("div", `${BAND};top:${top}px;height:${height}px;width:${side}px`);
  const down = labels(queries, side, false, "queries: rows", {left, top});
  const across = labels(keys, side, true, "keys: columns", {left, top});

  function mark(i, j) {
    row.style.display = i < 0 ? "none" : "block";
    column.style.display = j < 0 ? "none" : "block";
    row.style.top = `${top + i * side}px`;
    column.style.left = `${left + j * side}px`;
    across.buttons.forEach((button, k) => { button.style.background = i < 0 ? "none" : `rgba(230,126,34,${weights[i][k]})`; });
    down.buttons.forEach((button, k) => { button.style.background = j < 0 ? "none" : `rgba(230,126,34,${weights[k][j]})`; });
  }
  const query = (i) => { mark(i, -1); line.textContent = told(queries[i], "attends to", weights[i], keys, levels); };
  const key = (j) => {
    mark(-1, j);
    line.textContent = told(keys[j], "is attended to by", weights.map((values) => values[j]), queries, levels);
  };
  for (const [buttons, tell] of [[down.buttons, query], [across.buttons, key]]) {
    buttons.forEach((button, i) => ["mouseenter", "focus"].forEach((event) => button.addEventListener(event, () => tell(i))));
  }
  picture.addEventListener("mousemove", (event) => {
    const i = Math.min(queries.length - 1, Math.max(0, Math.floor(event.offsetY / side)));
    const j = Math.min(keys.length - 1, Math.max(0, Math.floor(event.offsetX / side)));
    mark(i, j);
    line.textContent = `${queries[i]} → ${keys[j]}: ${number(weights[i][j], levels)}`;
  });
  field.append(picture, row, column, across.list, down.list);
  scroll.append(field);
  view.append(element("h4", "margin:10px 0 0;font-size:1em", name), line, scroll);
  return view;
}

function enhance(root) {
  root.dataset.mia = "live";
  const texts = (kind) => [...(root.querySelector(`.mia-${kind}`)?.children ?? [])].map((span) => span.textContent);
  const keys = texts("keys"), queries = root.querySelector(".mia-queries") ? texts("queries") : keys;
  const grid = root.querySelector(".mia-grid"), figures = [...grid.querySelectorAll("figure")], levels = Number(root.dataset.levels);
  Object.assign(grid.style, {maxHeight: "290px", overflow: "auto", padding: "4px"});
  let view = element("div", ""), asked = 0;
  grid.after(view);
  async function open(i) {
    asked = i;
    const image = figures[i].querySelector("img"), name = figures[i].querySelector("figcaption").textContent;
    const weights = await read(image, queries.length, keys.length);
    if (asked !== i) return; // another was asked for while this one was decoded
    const next = large(name, image, weights, queries, keys, levels);
    view.replaceWith(next);
    view = next;
    figures.forEach((figure, j) => {
      figure.setAttribute("aria-pressed", j === i);
      figure.style.outline = j === i ? "2px solid rgba(230,126,34,0.9)" : "none";
    });
  }
  figures.forEach((figure, i) => {
    figure.setAttribute("role", "button");
    figure.setAttribute("aria-label", figure.querySelector("figcaption").textContent);
    figure.style.cursor = "pointer";
    figure.addEventListener("click", () => open(i));
    figure.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" && event.key !== " ") return;
      event.preventDefault();
      open(i);
    });
  });
  rove(figures);
  if (figures.length) open(0);
}

document.querySelectorAll(".mia-heads:not([data-mia])").forEach(enhance);
