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
  const node = document.createElement(tag);
  if (text !== undefined && text !== null) node.textContent = text;
  if (classes) node.className = classes;
  if (parent) parent.appendChild(node);
  return node;
}

/** Return the number at the begin of a text, such as "0.3 ± 0.1"; NaN without one. */
function number(text) {
  return parseFloat(text.replaceAll(",", "").replace(/^(inf|not reached)/, "Infinity"));
}

function rounded(text) {
  const value = Number(text);
  return Number.isFinite(value) && !Number.isInteger(value) ? String(Number(value.toPrecision(4))) : text;
}

function round(value) {
  return value === null ? "-" : String(Number(value.toPrecision(4)));
}

function lossAt(film, time) {
  let last = null;
  for (const [at, loss] of film.loss) if (at <= time) last = loss;
  return last;
}

/** Draw a table whose columns sort, with the number of columns that are out of view; on paper its letters fit the width. */
function table(parent, { name, columns, words, rows }, shown = (cell) => cell) {
  const hint = element("p", null, parent, "faint more-columns"), scroll = element("div", null, parent, "scroll");
  scroll.tabIndex = 0;
  scroll.setAttribute("role", "region");
  scroll.setAttribute("aria-label", name);
  // On paper a heading may be broken between its words.
  const longest = columns.map((_, i) => Math.max(...words[i].split(" ").map((word) => word.length), ...rows.map((row) => shown(row[i]).length)));
  const node = element("table", null, scroll);
  node.style.setProperty("--characters", longest.reduce((sum, length) => sum + length + 2, 0));
  const head = element("tr", null, element("thead", null, node)), body = element("tbody", null, node);
  const numeric = columns.map((_, i) => rows.every((row) => ["", "-", "nan"].includes(row[i]) || !Number.isNaN(number(row[i]))));
  let by = -1, up = true;
  function fill() {
    body.replaceChildren();
    for (const row of rows) {
      const line = element("tr", null, body);
      row.forEach((cell, i) => {
        const entry = element(i ? "td" : "th", shown(cell), line, numeric[i] ? "" : "text");
        entry.title = cell;
      });
      line.firstChild.scope = "row";
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
    [...head.children].forEach((cell, j) => cell.setAttribute("aria-sort", j !== i ? "none" : up ? "ascending" : "descending"));
    $("sorted").textContent = `${name}: sorted by ${words[i]}, ${up ? "ascending" : "descending"}`;
    fill();
  }
  columns.forEach((column, i) => {
    const cell = element("th", null, head, numeric[i] ? "" : "text");
    cell.setAttribute("aria-sort", "none");
    cell.scope = "col";
    const button = element("button", words[i], cell);
    button.title = column;
    button.onclick = () => sort(i);
  });
  fill();
  function measure() {
    const edge = scroll.getBoundingClientRect().left + scroll.clientWidth + 1;
    const beyond = [...head.children].filter((cell) => cell.getBoundingClientRect().right > edge).length;
    scroll.classList.toggle("more", beyond > 0);
    hint.textContent = beyond ? `scroll for ${beyond} more ${beyond === 1 ? "column" : "columns"}` : "";
  }
  new ResizeObserver(measure).observe(scroll);
  scroll.onscroll = measure;
}

/** Draw a table of a file: a link to it, its constant columns in a sentence, and the meaning of the others. */
function file(parent, { name, link, columns, words, rows, count, constant }) {
  const paragraph = element("p", null, parent, "faint");
  element("a", name, paragraph).href = link;
  if (rows.length < count) paragraph.append(`: the first ${rows.length} of ${count} rows`);
  if (constant) paragraph.append(`; ${constant} columns have one value in all rows and are only in the file`);
  table(parent, { name, columns, words, rows }, rounded);
  const differ = columns.map((column, i) => [column, words[i]]).filter(([column, word]) => column.replaceAll("_", " ") !== word);
  if (!differ.length) return;
  const list = element("dl", null, element("details", null, parent));
  list.before(element("summary", "columns in the file"));
  for (const [column, word] of differ) {
    element("dt", column, list);
    element("dd", word, list);
  }
}

document.title = data.title;
$("origin").textContent = data.origin;
// The answer is the first line; a page without one has its title there.
// An option stays on one line.
$("title").append(...(data.verdict ?? data.title).split(/(--\S+)/).map((part) => (part.startsWith("--") ? element("span", part, null, "option") : part)));
const [question, ...rest] = data.question;
$("question").textContent = [data.verdict ? data.title : null, question].filter(Boolean).join(". ");
if (rest.length) {
  const about = element("details");
  $("question").after(about);
  element("summary", "about this study", about);
  for (const text of rest) element(text.includes("\n") ? "pre" : "p", text, about);
}
data.answer.forEach(({ text, columns, rows }, i) => {
  if (columns) table($("answer"), { name: `results, part ${i + 1}`, columns, words: columns, rows });
  else element("pre", text, $("answer"), "sentences");
});
if (!data.answer.length) $("results").remove();
if (data.command) $("command").textContent = data.command;
else $("made").remove();
for (const [name, source, caption] of data.figures) {
  const figure = element("figure", null, $("figures")), scroll = element("div", null, figure);
  const image = element("img", null, scroll, "figure");
  image.src = source;
  image.alt = caption || name;
  // Made for paper, at seven inches; a screen has room for more, and a phone scrolls.
  image.onload = () => {
    image.width = 1.4 * image.naturalWidth;
    image.style.minWidth = `${0.8 * image.naturalWidth}px`;
    if (scroll.scrollWidth > scroll.clientWidth) Object.assign(scroll, { tabIndex: 0, role: "group", ariaLabel: name });
  };
  if (caption) element("figcaption", caption, figure);
}
if (!data.figures.length) $("figures").remove();
for (const each of data.tables) {
  const part = element("details", null, $("tables"));
  element("summary", `${each.name}: ${each.count} ${each.count === 1 ? "row" : "rows"}`, part);
  file(part, each);
}
if (!data.tables.length) $("tables").remove();
if (data.config) $("config").textContent = JSON.stringify(data.config, null, 1);
else $("configuration").remove();

/** Draw the timeline and the animation; their compressed data is unpacked in the background. */
async function unfold() {
  const traces = await Promise.all(data.timelines.map((show) => prepare(show)));
  if (data.config && traces.length) window.asyncsimTimeline = timeline(data.timelines[0], traces[0], $("timeline"));
  if (data.animation) await animate(data.animation, traces, $("animation"));
}
if (!data.config || !data.timelines.length) $("timeline").remove();
if (!data.animation) $("animation").remove();
const headings = [...document.querySelectorAll("main h2")];
for (const heading of headings.length > 2 ? headings : []) {
  element("a", heading.textContent, $("contents")).href = `#${heading.parentElement.id}`;
}
if (headings.length <= 2) $("contents").remove();
window.asyncsimReady = unfold();
