"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const dialog = document.getElementById("cell");
const matrix = document.getElementById("matrix");
const cells = [...matrix.querySelectorAll("td button")];
const clauseOf = (button) => button.closest("tr").dataset.c;
const nameOf = (button) => data.names[button.parentElement.cellIndex - 1];

// Everything from the data is set through textContent, so that no markup in it is interpreted.
function element(name, text, parent) {
  const created = document.createElement(name);
  if (text !== undefined) created.textContent = text;
  if (parent) parent.append(created);
  return created;
}

// Prose whose code, clauses and issues are marked.
const MARKUP = /`([^`]+)`|\b([A-Z]{3}-\d+)\b|(?:([\w.-]+\/[\w.-]+)|(?<!\w))#(\d+)\b/g;
function prose(name, text, parent) {
  const created = element(name, undefined, parent);
  let end = 0, repository = "";
  for (const found of text.matchAll(MARKUP)) {
    const [whole, code, clause, owner, number] = found;
    repository = owner ?? repository;
    const address = clause ? addressOf(clause) : repository && number && `https://github.com/${repository}/issues/${number}`;
    if (!code && !address) continue;
    created.append(text.slice(end, found.index));
    const part = element(code ? "code" : "a", code ?? whole, created);
    if (address) part.href = address;
    end = found.index + whole.length;
  }
  created.append(text.slice(end));
  return created;
}

// The page of a clause; without a site there is none.
function addressOf(clause) {
  return data.pages && data.pages + clause.toLowerCase() + ".html";
}

function list(pairs, parent) {
  const rows = element("dl", undefined, parent);
  for (const [name, text] of pairs) {
    if (text === undefined || text === "") continue;
    element("dt", name, rows);
    prose("dd", String(text), rows);
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
  const clause = data.clauses[clauseOf(button)];
  const name = nameOf(button);
  const evidence = document.getElementById("evidence");
  evidence.replaceChildren();
  document.getElementById("cell-title").textContent = `${name}: ${clause.id} (${clause.level}, ${clause.kind}) ${clause.title}`;
  for (const verdict of data.verdicts[clause.id][name]) {
    const part = element("section", undefined, evidence);
    const status = element("h3", `${verdict.sign} ${verdict.status}: ${verdict.dtype} on ${verdict.device}`, part);
    status.className = `badge ${button.className}`;
    if (verdict.message) prose("p", verdict.message, part);
    list([
      ["diagnosis", verdict.diagnosis],
      ["fix of this defect", verdict.usual_fix],
      ["case", verdict.case],
      ["seen in", verdict.seen_in],
      ["steps", verdict.steps],
      ["last call", verdict.arguments],
      ["cases tried", verdict.examples],
      ["seeds", verdict.seeds],
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
  const about = element("section", undefined, evidence);
  element("h3", "The clause", about);
  prose("p", clause.statement, about);
  list([
    ["why it matters", clause.why],
    ["usual fix", clause.fix],
    ["how libraries differ", clause.differs],
    ["source", clause.source],
  ], about);
  if (data.pages) element("a", `All about ${clause.id}`, about).href = addressOf(clause.id);
  if (!dialog.open) dialog.showModal();
  dialog.scrollTop = 0;
  history.replaceState(null, "", `#${encodeURIComponent(`${name}/${clause.id}`)}`);
}

// An address that ends in #sdpa/MSK-8 opens that cell.
function openAddressed() {
  let address;
  try {
    address = decodeURIComponent(location.hash.slice(1));
  } catch {
    return;
  }
  const button = cells.find((each) => `${nameOf(each)}/${clauseOf(each)}` === address);
  if (button) show(button);
}

function failuresOf(clause) {
  const failing = ([name, own]) => own.map((each) => `${name} ${each.message ?? ""} ${each.diagnosis ?? ""}`).join(" ");
  return Object.entries(data.verdicts[clause]).map(failing).join(" ");
}

function search(event) {
  const words = event.target.value.toLowerCase().split(/\s+/).filter(Boolean);
  const found = (text) => words.every((word) => text.toLowerCase().includes(word));
  for (const row of matrix.querySelectorAll("tr[data-c]")) row.hidden = !found(row.cells[0].textContent + failuresOf(row.dataset.c));
  for (const family of matrix.tBodies) family.hidden = !family.querySelector("tr[data-c]:not([hidden])");
  for (const section of document.querySelectorAll("section.causes")) {
    for (const each of section.querySelectorAll("article")) each.hidden = !found(each.textContent);
    section.hidden = !section.querySelector("article:not([hidden])");
  }
}

// Sorts a table by a column: first the largest numbers or the first words on top, then the other way round.
function sort(header) {
  const body = header.closest("table").tBodies[0];
  const value = (row) => row.cells[header.cellIndex].textContent;
  const numeric = [...body.rows].every((row) => !value(row) || !isNaN(parseFloat(value(row))));
  const orders = numeric ? ["descending", "ascending"] : ["ascending", "descending"];
  const order = orders[Number(header.ariaSort === orders[0])];
  for (const each of header.parentElement.cells) each.ariaSort = null;
  header.ariaSort = order;
  const number = (row) => parseFloat(value(row) || 0);
  const compare = (one, other) => numeric ? number(one) - number(other) : value(one).localeCompare(value(other));
  const rows = [...body.rows].sort(compare);
  body.append(...(order === "ascending" ? rows : rows.reverse()));
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

cells.forEach((button, place) => {
  button.tabIndex = place ? -1 : 0;
  button.setAttribute("aria-label", `${nameOf(button)}, ${clauseOf(button)}: ${button.className}`);
});
matrix.addEventListener("click", (event) => {
  const button = event.target.closest("td button");
  if (button) { focus(button); show(button); }
});
matrix.addEventListener("keydown", move);
dialog.addEventListener("click", (event) => { if (event.target === dialog) dialog.close(); });
dialog.addEventListener("close", () => history.replaceState(null, "", location.pathname + location.search));
document.getElementById("search").addEventListener("input", search);
for (const button of document.querySelectorAll("th > button")) {
  button.addEventListener("click", () => sort(button.parentElement));
}
const report = JSON.stringify(JSON.parse(document.getElementById("report").textContent), null, 2);
const json = new Blob([report], { type: "application/json" });
document.getElementById("download").href = URL.createObjectURL(json);
addEventListener("hashchange", openAddressed);
document.getElementById("filter").addEventListener("change", (event) => {
  matrix.classList.toggle("filtered", event.target.checked);
});
openAddressed();
