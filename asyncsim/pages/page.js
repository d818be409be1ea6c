"use strict";
// The page of a finished study: everything is drawn from the JSON data in the page itself.
const data = JSON.parse(document.getElementById("data").textContent);
const $ = (id) => document.getElementById(id);

function disc(pen, x, y, radius) {
  pen.beginPath();
  pen.arc(x, y, radius, 0, 2 * Math.PI);
  pen.fill();
}

function line(pen, from, to) {
  pen.beginPath();
  pen.moveTo(...from);
  pen.lineTo(...to);
  pen.stroke();
}

function element(tag, text, parent, classes) {
  const made = document.createElement(tag);
  if (text !== undefined && text !== null) made.textContent = text;
  if (classes) made.className = classes;
  if (parent) parent.appendChild(made);
  return made;
}

function number(text) {
  return text === "" ? NaN : Number(text.replace("inf", "Infinity"));
}

function shown(text) {
  const value = number(text);
  if (!Number.isFinite(value) || Number.isInteger(value)) return text;
  return String(Number(value.toPrecision(4)));
}

function table(parent, columns, words, rows) {
  const made = element("table", null, element("div", null, parent, "scroll"));
  const head = element("tr", null, element("thead", null, made)), body = element("tbody", null, made);
  const numeric = columns.map((_, i) => rows.every((row) => row[i] === "" || row[i] === "nan" || !Number.isNaN(number(row[i]))));
  let by = -1, up = true;
  function fill() {
    body.replaceChildren();
    for (const row of rows) {
      const line = element("tr", null, body);
      row.forEach((cell, i) => element("td", shown(cell), line, numeric[i] ? "" : "text").title = cell);
    }
  }
  function sort(i) {
    up = by === i ? !up : true;
    by = i;
    const sign = up ? 1 : -1;
    rows.sort((a, b) => {
      if (!numeric[i]) return sign * a[i].localeCompare(b[i]);
      const [x, y] = [number(a[i]), number(b[i])];
      return Number.isNaN(x) ? 1 : Number.isNaN(y) ? -1 : sign * (x - y);
    });
    [...head.children].forEach((cell, j) => {
      cell.setAttribute("aria-sort", j !== i ? "none" : up ? "ascending" : "descending");
      cell.textContent = columns[j] + (j !== i ? "" : up ? " \u2191" : " \u2193");
    });
    fill();
  }
  columns.forEach((name, i) => {
    const cell = element("th", name, head, numeric[i] ? "" : "text");
    cell.title = words[i];
    cell.tabIndex = 0;
    cell.setAttribute("aria-sort", "none");
    cell.onclick = () => sort(i);
    cell.onkeydown = (event) => { if (event.key === "Enter" || event.key === " ") { event.preventDefault(); sort(i); } };
  });
  fill();
}

function lossAt(film, time) {
  let found = null;
  for (const [at, loss] of film.loss) if (at <= time) found = loss;
  return found;
}

function round(value) {
  return value === null ? "-" : String(Number(value.toPrecision(4)));
}

document.title = data.title;
$("title").textContent = data.title;
$("question").textContent = data.question;
// Rows of tables stay as they are; sentences are wrapped.
let block = null;
for (const line of data.answer.split("\n")) {
  const tabular = /\S {2,}\S/.test(line);
  if (block === null || block.tabular !== tabular) {
    block = element("pre", "", $("answer"), tabular ? "" : "sentences");
    block.tabular = tabular;
  }
  block.textContent += `${line}\n`;
}
if (data.command) $("command").textContent = data.command;
else $("made").remove();
for (const [name, source] of data.figures) {
  const image = element("img", null, $("figures"), "figure");
  image.src = source;
  image.alt = name;
  // Made for paper, at seven inches; a screen has room for more.
  image.onload = () => { image.width = 1.4 * image.naturalWidth; };
}
if (!data.figures.length) $("figures").remove();
for (const one of data.tables) {
  const part = element("details", null, $("tables"));
  part.open = one.rows.length <= 30;
  element("summary", `${one.name}: ${one.rows.length} of ${one.count} rows`, part);
  table(part, one.columns, one.words, one.rows);
}
if (!data.tables.length) $("tables").remove();
if (data.config) $("config").textContent = JSON.stringify(data.config, null, 1);
else $("configuration").remove();
// Compressed data is unpacked in the background.
async function unfold() {
  const traces = await Promise.all(data.timelines.map((show) => prepare(show)));
  const best = data.timelines.length - 1;
  if (data.config && best >= 0) window.asyncsimTimeline = timeline(data.timelines[best], traces[best], $("timeline"));
  else $("timeline").remove();
  if (data.animation) await animate(data.animation, traces, $("animation"));
  else $("animation").remove();
}
window.asyncsimReady = unfold();
