"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const dialog = document.getElementById("cell");
const matrix = document.getElementById("matrix");
const cells = [...matrix.querySelectorAll("td button")];

// Everything from the data is set through textContent, so that no markup in it is interpreted.
function element(name, text, parent) {
  const created = document.createElement(name);
  if (text !== undefined) created.textContent = text;
  if (parent) parent.append(created);
  return created;
}

function list(pairs, parent) {
  const rows = element("dl", undefined, parent);
  for (const [name, text] of pairs) {
    if (text === undefined || text === "") continue;
    element("dt", name, rows);
    element("dd", text, rows);
  }
}

async function copy(text, button) {
  try {
    await navigator.clipboard.writeText(text);
    button.textContent = "copied";
  } catch {
    const range = document.createRange();
    range.selectNodeContents(button.nextElementSibling);
    getSelection().removeAllRanges();
    getSelection().addRange(range);
    button.textContent = "selected: press Ctrl+C";
  }
}

function show(button) {
  const clause = data.clauses[button.closest("tr").dataset.c];
  const name = data.names[button.parentElement.cellIndex - 1];
  const evidence = document.getElementById("evidence");
  evidence.replaceChildren();
  document.getElementById("cell-title").textContent = `${name}: ${clause.id} (${clause.level}, ${clause.kind}) ${clause.title}`;
  element("p", clause.statement, evidence);
  for (const verdict of data.verdicts[clause.id][name]) {
    const part = element("section", undefined, evidence);
    element("h3", `${verdict.sign} ${verdict.status}: ${verdict.dtype} on ${verdict.device}`, part);
    if (verdict.message) element("p", verdict.message, part);
    if (verdict.case) element("pre", verdict.case, part);
    list([
      ["diagnosis", verdict.diagnosis],
      ["cases tried", verdict.examples],
      ["largest error/bound", verdict.margin],
      ["known-bad answers rejected", verdict.rejected],
      ["property that failed", verdict.violated],
      ["blocked by", verdict.blocked_by],
      ["seconds", verdict.seconds],
    ], part);
    if (!verdict.script) continue;
    const copier = element("button", "copy script", part);
    element("pre", verdict.script, part);
    copier.addEventListener("click", () => copy(verdict.script, copier));
  }
  const more = element("section", undefined, evidence);
  list([["why it matters", clause.why], ["usual fix", clause.fix], ["how libraries differ", clause.differs], ["source", clause.source]], more);
  dialog.showModal();
  dialog.scrollTop = 0;
}

const STEPS = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] };

function move(event) {
  const step = STEPS[event.key];
  const button = event.target.closest("td button");
  if (!step || !button) return;
  event.preventDefault();
  let row = button.closest("tr").rowIndex;
  let column = button.parentElement.cellIndex;
  for (;;) {
    row += step[0];
    column += step[1];
    const cell = matrix.rows[row]?.cells[column];
    if (!matrix.rows[row] || column < 1 || (step[1] && !cell)) return;
    const target = cell?.querySelector("button");
    if (target && target.offsetParent) return focus(target);
  }
}

function focus(button) {
  for (const other of matrix.querySelectorAll("button[tabindex='0']")) other.tabIndex = -1;
  button.tabIndex = 0;
  button.focus();
}

cells.forEach((button, place) => { button.tabIndex = place ? -1 : 0; });
matrix.addEventListener("click", (event) => {
  const button = event.target.closest("td button");
  if (button) { focus(button); show(button); }
});
matrix.addEventListener("keydown", move);
dialog.addEventListener("click", (event) => { if (event.target === dialog) dialog.close(); });
document.getElementById("filter").addEventListener("change", (event) => {
  matrix.classList.toggle("filtered", event.target.checked);
});
