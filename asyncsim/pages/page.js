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

function bytes(text, Type) {
  const raw = Uint8Array.from(atob(text), (one) => one.charCodeAt(0));
  return new Type(raw.buffer);
}

function lossAt(film, time) {
  let found = null;
  for (const [at, loss] of film.loss) if (at <= time) found = loss;
  return found;
}

function round(value) {
  return value === null ? "-" : String(Number(value.toPrecision(4)));
}

function spring(pen, [x, y], [toX, toY]) {
  const turns = 12, length = Math.hypot(toX - x, toY - y) || 1;
  const [acrossX, acrossY] = [(y - toY) / length, (toX - x) / length];
  pen.beginPath();
  pen.moveTo(x, y);
  for (let i = 1; i < turns; i++) {
    const part = i / turns, side = i % 2 ? 3 : -3;
    pen.lineTo(x + part * (toX - x) + side * acrossX, y + part * (toY - y) + side * acrossY);
  }
  pen.lineTo(toX, toY);
  pen.stroke();
}

function animate(show) {
  const place = $("animation");
  const films = show.films.map((film) => ({
    ...film,
    phase: bytes(film.phase, Uint8Array),
    progress: bytes(film.progress, Uint8Array),
    place: bytes(film.place, Int16Array),
    commits: bytes(film.commits, Int32Array),
    messages: film.messages === null ? null : bytes(film.messages, Float32Array),
    leader: bytes(film.leader, Int32Array),
  }));
  for (const film of films) {
    const pairs = new Map();
    for (let i = 0; film.messages !== null && i < film.messages.length; i += 4) {
      const pair = [film.messages[i], film.messages[i + 1]].sort((a, b) => a - b);
      pairs.set(pair.join(), pair);
    }
    film.edges = [...pairs.values()];
  }
  const frames = show.frames, last = show.duration, time = (frame) => (last * frame) / (frames - 1);
  const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  element("p", show.about, place, "faint");
  const legend = element("div", null, place, "legend");
  for (const [name, color] of show.phases) {
    const entry = element("span", null, legend);
    element("i", null, entry).style.background = color;
    entry.appendChild(document.createTextNode(name));
  }
  const controls = element("div", null, place, "controls");
  const play = element("button", "Play", controls);
  play.id = "play";
  const scrub = element("input", null, controls);
  Object.assign(scrub, { type: "range", min: 0, max: frames - 1, step: 1, value: 0, id: "scrub" });
  scrub.setAttribute("aria-label", "simulated time");
  const speed = element("select", null, controls);
  speed.setAttribute("aria-label", "speed");
  for (const [text, factor] of [["slowest", 0.1], ["slow", 0.3], ["normal", 1], ["fast", 3]]) {
    const option = element("option", text, speed);
    option.value = factor;
    option.selected = factor === 1;
  }
  const clock = element("span", "", controls);
  clock.id = "time";
  const stage = element("div", null, place, "stage");
  films.forEach((film, i) => {
    const figure = element("figure", null, stage);
    const caption = element("figcaption", null, figure);
    element("strong", film.title, caption);
    film.status = element("span", "", caption, "faint");
    film.status.id = `status-${i}`;
    film.canvas = element("canvas", null, figure);
    film.canvas.setAttribute("aria-label", `${film.title}: the workers around the central variable`);
    film.curve = element("canvas", null, figure);
    film.curve.setAttribute("aria-label", `${film.title}: training loss against simulated time`);
  });

  function size(canvas, ratio) {
    const scale = window.devicePixelRatio || 1, width = canvas.clientWidth;
    canvas.width = Math.round(width * scale);
    canvas.height = Math.round(width * ratio * scale);
    canvas.style.height = `${width * ratio}px`;
    const context = canvas.getContext("2d");
    context.setTransform(scale, 0, 0, scale, 0, 0);
    return [context, width, width * ratio];
  }

  function spot(film, frame, worker, radius) {
    if (film.messages !== null) {
      const angle = (2 * Math.PI * worker) / film.workers.length - Math.PI / 2;
      return [0.95 * radius * Math.cos(angle), 0.95 * radius * Math.sin(angle)];
    }
    const at = 2 * (frame * film.workers.length + worker);
    if (film.place[at] === -32768) return null;
    return [(film.place[at] / 28000) * radius, (-film.place[at + 1] / 28000) * radius];
  }

  function draw(film, frame) {
    const { context: pen, width, height } = film, now = time(frame);
    const ink = css("--ink"), faint = css("--faint"), pale = css("--line");
    pen.clearRect(0, 0, width, height);
    pen.save();
    pen.translate(width / 2, height / 2);
    const radius = 0.44 * Math.min(width, height), count = film.workers.length;
    pen.font = "11px system-ui, sans-serif";
    if (film.messages === null) {
      for (const [distance, at] of show.rings) {
        pen.beginPath();
        pen.arc(0, 0, at * radius, 0, 2 * Math.PI);
        pen.strokeStyle = pale;
        pen.stroke();
        pen.fillStyle = faint;
        pen.fillText(round(distance), 0.7 * at * radius + 3, -0.7 * at * radius - 3);
      }
    }
    const dot = Math.max(2.5, Math.min(7, (0.5 * Math.PI * radius) / Math.sqrt(count) / 6));
    const at = [...Array(count).keys()].map((worker) => spot(film, frame, worker, radius));
    const ended = film.ended !== null && now > film.ended;
    for (let worker = 0; worker < count && film.messages === null; worker++) {
      const where = at[worker], index = frame * count + worker;
      if (where === null) continue;
      const done = film.progress[index] / 255, phase = show.phases[film.phase[index]];
      const name = phase ? phase[2] : "";
      // A message moves to the centre, its reply back; a commit that takes no time is a line for a moment.
      const along = name === "sending" ? 1 - done : name === "returning" ? done : null;
      const fresh = along === null && (name === "served" || (name === "computing" && done < 0.04));
      pen.strokeStyle = phase ? phase[1] : pale;
      pen.globalAlpha = fresh ? 0.7 : film.force === "spring" ? 0.4 : 0.12;
      pen.lineWidth = fresh ? 1.4 : 0.7;
      (film.force === "spring" ? spring : line)(pen, [0, 0], where);
      pen.globalAlpha = 1;
      if (along !== null) {
        pen.fillStyle = phase[1];
        disc(pen, where[0] * along, where[1] * along, 0.55 * dot);
      }
    }
    const leader = film.leader[frame] < 0 ? null : at[film.leader[frame]];
    if (leader !== null) {
      pen.strokeStyle = css("--accent");
      pen.lineWidth = 1;
      pen.globalAlpha = 0.5;
      for (const where of at) if (where !== null) line(pen, leader, where);
      pen.globalAlpha = 1;
      pen.beginPath();
      pen.arc(leader[0], leader[1], 1.8 * dot, 0, 2 * Math.PI);
      pen.stroke();
    }
    if (film.messages !== null) {
      pen.strokeStyle = pale;
      pen.lineWidth = 1;
      for (const [a, b] of film.edges) line(pen, at[a], at[b]);
      pen.fillStyle = css("--accent");
      const sent = film.messages;
      for (let i = 0; i < sent.length; i += 4) {
        if (sent[i + 2] > now || sent[i + 3] < now) continue;
        const part = (now - sent[i + 2]) / Math.max(1e-9, sent[i + 3] - sent[i + 2]);
        const [from, to] = [at[sent[i]], at[sent[i + 1]]];
        disc(pen, from[0] + part * (to[0] - from[0]), from[1] + part * (to[1] - from[1]), 0.5 * dot);
      }
    }
    for (let worker = 0; worker < count; worker++) {
      if (at[worker] === null) continue;
      const phase = show.phases[film.phase[frame * count + worker]];
      pen.fillStyle = phase ? phase[1] : faint;
      disc(pen, at[worker][0], at[worker][1], dot);
    }
    if (film.messages === null) {
      pen.fillStyle = ink;
      pen.fillRect(-4, -4, 8, 8);
    }
    pen.restore();
    if (ended) {
      pen.fillStyle = ink;
      pen.font = "bold 15px system-ui, sans-serif";
      pen.fillText(`diverged at ${round(film.ended)} s`, 10, 22);
    }
    const loss = lossAt(film, now);
    film.status.textContent = `: ${film.commits[frame].toLocaleString("en")} commits, training loss ${round(loss)}`;
    film.status.dataset.loss = loss === null ? "" : String(loss);
  }

  function curve(film, frame) {
    const { pen2: pen, width2: width, height2: height } = film, points = show.losses;
    pen.clearRect(0, 0, width, height);
    const left = 56, right = 8, top = 8, bottom = 30;
    const [low, high] = show.limits.map(Math.log10);
    const x = (at) => left + (at / last) * (width - left - right);
    const y = (loss) => {
      const part = (Math.log10(Math.max(loss, 1e-300)) - low) / (high - low || 1);
      return top + (1 - Math.min(1, Math.max(0, part))) * (height - top - bottom);
    };
    pen.font = "11px system-ui, sans-serif";
    pen.fillStyle = css("--faint");
    pen.fillText(round(show.limits[1]), 4, top + 8);
    pen.fillText(round(show.limits[0]), 4, height - bottom);
    pen.fillText("training loss against simulated time (s)", left, height - 6);
    pen.textAlign = "right";
    pen.fillText(round(last), width - right, height - 18);
    pen.textAlign = "left";
    points.forEach((one, i) => {
      pen.strokeStyle = one === film.loss ? css("--accent") : css("--line");
      pen.lineWidth = one === film.loss ? 1.8 : 1.2;
      pen.beginPath();
      one.forEach(([at, loss], k) => (k ? pen.lineTo(x(at), y(loss)) : pen.moveTo(x(at), y(loss))));
      pen.stroke();
    });
    pen.strokeStyle = css("--ink");
    pen.lineWidth = 1;
    line(pen, [x(time(frame)), top], [x(time(frame)), height - bottom]);
  }

  let frame = 0, playing = false, position = 0, before = 0;
  show.losses = films.map((film) => film.loss);
  function render() {
    scrub.value = frame;
    clock.textContent = `${time(frame).toFixed(2)} s`;
    for (const film of films) {
      draw(film, frame);
      curve(film, frame);
    }
  }
  function resize() {
    for (const film of films) {
      [film.context, film.width, film.height] = size(film.canvas, 0.85);
      [film.pen2, film.width2, film.height2] = size(film.curve, 0.3);
    }
    render();
  }
  function tick(now) {
    if (!playing) return;
    // All frames last 40 seconds at normal speed. The first frame's time may be a little before the click's.
    position += (Math.max(0, now - before) / 40000) * frames * Number(speed.value);
    before = now;
    if (position >= frames - 1) {
      position = frames - 1;
      playing = false;
      play.textContent = "Play";
    }
    const next = Math.floor(position);
    if (next !== frame) {
      frame = next;
      render();
    }
    requestAnimationFrame(tick);
  }
  play.onclick = () => {
    playing = !playing;
    play.textContent = playing ? "Pause" : "Play";
    if (!playing) return;
    if (position >= frames - 1) position = 0;
    before = performance.now();
    requestAnimationFrame(tick);
  };
  scrub.oninput = () => {
    frame = position = Number(scrub.value);
    render();
  };
  window.addEventListener("resize", resize);
  window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", render);
  resize();
  // Draws all frames one after the other and returns how many it draws a second: a measurement.
  window.drawAll = () => {
    const begun = performance.now();
    for (frame = 0; frame < frames; frame++) render();
    frame = 0;
    render();
    return (1000 * frames) / (performance.now() - begun);
  };
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
if (data.animation) animate(data.animation);
else $("animation").remove();
