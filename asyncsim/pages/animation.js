// The animation: at any simulated time each worker's phase, and its read's distance from the centre.
// Phases and staleness come from the timelines of the runs; recorded positions from sampled frames.

/** Return the least index whose value is larger than a time. */
function after(values, time, from = 0, to = values.length) {
  while (from < to) {
    const middle = (from + to) >> 1;
    if (values[middle] <= time) from = middle + 1;
    else to = middle;
  }
  return from;
}

/** Prepare a film: its trace's columns, its recorded places, and its distinct edges. */
async function prepareFilm(film, traces) {
  const trace = traces[film.trace], edges = new Map();
  for (let i = 0; trace.messages && i < trace.messages.sender.length; i++) {
    const pair = [trace.messages.sender[i], trace.messages.receiver[i]].sort((a, b) => a - b);
    edges.set(pair.join(), pair);
  }
  const places = film.places === null ? null : await unpack(film.places);
  const leader = (await unpack(film.leader)).index;
  const longest = trace.messages === null ? 0 : trace.messages.mixed.reduce((most, mixed, i) => Math.max(most, mixed - trace.messages.sent[i]), 0);
  return { ...film, ...trace, edges: [...edges.values()], longest, places, leader };
}

/** Return a worker's phase at a time: its number and the share of it that has passed; -1 for none. */
function phaseAt(film, worker, time) {
  for (let k = film.phases.length - 1; k >= 0; k--) {
    const { begin, end, first } = film.phases[k];
    const i = after(begin, time, first[worker], first[worker + 1]) - 1;
    if (i >= first[worker] && end[i] > time) return [k, (time - begin[i]) / (end[i] - begin[i])];
  }
  return [-1, 0];
}

/** Return the staleness of a worker's present read: the versions made since. */
function stalenessAt(film, worker, time, version) {
  const rows = film.ofLane[worker];
  let from = 0, to = rows.length;
  while (from < to) {  // the worker's next commit has the read that it computes from
    const middle = (from + to) >> 1;
    if (film.commits.time[rows[middle]] <= time) from = middle + 1;
    else to = middle;
  }
  const next = rows[Math.min(from, rows.length - 1)];
  return next === undefined || film.commits.readTime[next] > time ? null : Math.max(0, version - film.commits.read[next]);
}

/** Draw a spring between two points. */
function spring(pen, [x, y], [toX, toY]) {
  const turns = 12, length = Math.hypot(toX - x, toY - y) || 1;
  const [acrossX, acrossY] = [(y - toY) / length, (toX - x) / length];
  pen.beginPath();
  pen.moveTo(x, y);
  for (let i = 1; i < turns; i++) {
    const share = i / turns, side = i % 2 ? 3 : -3;
    pen.lineTo(x + share * (toX - x) + side * acrossX, y + share * (toY - y) + side * acrossY);
  }
  pen.lineTo(toX, toY);
  pen.stroke();
}

const SHADES = ["#440154", "#3b528b", "#21918c", "#5ec962", "#fde725"];

async function animate(show, traces, place) {
  const films = await Promise.all(show.films.map((film) => prepareFilm(film, traces)));
  const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const last = show.duration;
  element("p", show.about, place, "faint");
  const controls = element("div", null, place, "controls"), legend = element("div", null, place, "legend");
  const play = element("button", "Play", controls);
  play.id = "play";
  const back = element("button", "previous commit", controls), forth = element("button", "next commit", controls);
  const scrub = element("input", null, controls);
  Object.assign(scrub, { type: "range", min: 0, max: last, step: last / 1000, value: 0, id: "scrub" });
  scrub.setAttribute("aria-label", "simulated time (s)");
  const select = (name, options) => {
    const label = element("label", `${name} `, controls), list = element("select", null, label);
    for (const [text, value, selected] of options) Object.assign(element("option", text, list), { value, selected });
    return list;
  };
  const nice = (value) => {
    const power = 10 ** Math.floor(Math.log10(value));
    return power * [1, 2, 5, 10].find((step) => step * power >= 0.999 * value);
  };
  const speed = select("speed", [0.1, 0.3, 1, 3].map((factor) => nice((factor * last) / 40))
    .map((rate, i) => [`${round(rate)} simulated s/s`, rate, i === 2]));
  const paint = select("colour by", [["phase", "phase", true], ["staleness", "staleness", false]]);
  const clock = element("span", "", controls);
  clock.id = "time";
  const stage = element("div", null, place, "stage");
  films.forEach((film, i) => {
    const figure = element("figure", null, stage), caption = element("figcaption", null, figure);
    element("strong", film.title, caption);
    film.status = element("span", "", caption, "faint");
    film.status.id = `status-${i}`;
    const canvas = (text) => {
      const part = element("canvas", null, figure);
      part.setAttribute("role", "img");
      part.setAttribute("aria-label", `${film.title}: ${text}`);
      return part;
    };
    film.canvas = canvas(film.messages ? "the workers on their graph" : "the workers around the central variable");
    film.curve = canvas("training loss against simulated time");
  });
  const stalest = films.reduce((most, film) => film.commits.staleness.reduce((a, b) => Math.max(a, b), most), 1);

  function explain() {
    legend.replaceChildren();
    const entries = paint.value === "phase" ? films[0].phases.filter(({ begin, color }) => begin.length && color !== null).map(({ name, color }) => [name, color])
      : SHADES.map((color, i) => [`staleness ${round((i / (SHADES.length - 1)) * stalest)}`, color]);
    for (const [name, color] of entries) {
      const entry = element("span", null, legend);
      element("i", null, entry).style.background = color;
      entry.appendChild(document.createTextNode(name));
    }
  }

  function size(canvas, height) {
    const scale = window.devicePixelRatio || 1, width = canvas.clientWidth;
    Object.assign(canvas, { width: Math.round(width * scale), height: Math.round(height * scale) });
    canvas.style.height = `${height}px`;
    const pen = canvas.getContext("2d");
    pen.setTransform(scale, 0, 0, scale, 0, 0);
    return [pen, width, height];
  }

  /** Return where a worker is drawn, in units of the radius; null where its read is unknown. */
  function spot(film, worker, time) {
    const angle = (2 * Math.PI * worker) / film.ofLane.length - Math.PI / 2;
    if (film.messages) return [0.95 * Math.cos(angle), 0.95 * Math.sin(angle)];
    // Between two frames a read moves on a straight line, unless a new one took its place.
    const index = film.workers.indexOf(worker), frames = film.places.x.length / film.workers.length;
    if (index < 0) return null;
    const frame = Math.min(frames - 1, (time / last) * (frames - 1)), before = Math.floor(frame);
    const at = (k, axis) => film.places[axis][k * film.workers.length + index];
    if (at(before, "x") === show.nowhere) return null;
    const next = Math.min(frames - 1, before + 1), share = at(next, "x") === show.nowhere ? 0 : frame - before;
    return ["x", "y"].map((axis, k) => ((k ? -1 : 1) * (at(before, axis) + share * (at(next, axis) - at(before, axis)))) / show.unit);
  }

  function shade(staleness) {
    return SHADES[Math.round(Math.min(1, (staleness ?? 0) / stalest) * (SHADES.length - 1))];
  }

  function draw(film, time) {
    const { pen, width, height } = film, gossips = film.messages !== null, ink = css("--ink"), faint = css("--faint"), pale = css("--line");
    const radius = 0.44 * Math.min(width, height), drawn = film.places === null ? [...film.ofLane.keys()] : film.workers;
    const done = after(film.commits.time, time), version = done ? film.commits.version[done - 1] : 0;
    const ended = film.ended !== null && time > film.ended;
    pen.clearRect(0, 0, width, height);
    pen.save();
    pen.translate(width / 2, height / 2);
    pen.font = "11px system-ui, sans-serif";
    for (const [distance, at] of gossips ? [] : show.rings) {
      pen.beginPath();
      pen.arc(0, 0, at * radius, 0, 2 * Math.PI);
      pen.strokeStyle = pale;
      pen.stroke();
      pen.fillStyle = faint;
      pen.fillText(round(distance), 0.7 * at * radius + 3, -0.7 * at * radius - 3);
    }
    if (gossips) {
      const spots = film.ofLane.map((_, worker) => spot(film, worker, time).map((value) => value * radius));
      pen.strokeStyle = pale;
      for (const [a, b] of film.edges) line(pen, spots[a], spots[b]);
      pen.fillStyle = css("--accent");
      const { sender, receiver, sent, mixed } = film.messages;
      for (let i = after(sent, time) - 1; i >= 0 && sent[i] >= time - film.longest; i--) {
        if (mixed[i] <= Math.max(time, sent[i])) continue;  // arrived, or an exchange that takes no time
        const share = (time - sent[i]) / (mixed[i] - sent[i]), [from, to] = [spots[sender[i]], spots[receiver[i]]];
        disc(pen, from[0] + share * (to[0] - from[0]), from[1] + share * (to[1] - from[1]), 2.5);
      }
    }
    // Many workers are small and translucent dots: their density shows.
    const dot = Math.max(1.5, Math.min(7, (1.6 * radius) / Math.sqrt(drawn.length) / 6));
    const dense = drawn.length > 200;
    const leader = film.leader[Math.round((time / last) * (film.leader.length - 1))];
    const leading = leader < 0 ? -1 : film.workers[leader], spots = [];
    for (const worker of ended && !gossips ? [] : drawn) {
      const [phase, share] = phaseAt(film, worker, time), name = phase < 0 ? "" : film.phases[phase].name;
      const staleness = stalenessAt(film, worker, time, version);
      const at = spot(film, worker, time)?.map((value) => value * radius);
      if (!at) continue;
      const color = paint.value === "phase" ? film.phases[phase]?.color ?? faint : shade(staleness);
      const along = gossips ? null : name === "sending" ? 1 - share : name === "reply on its way" ? share : null;
      pen.strokeStyle = pen.fillStyle = color;
      if (!gossips && !dense) {
        pen.globalAlpha = name === "being served" ? 0.7 : film.force === "spring" ? 0.4 : 0.15;
        (film.force === "spring" ? spring : line)(pen, [0, 0], at);
      }
      pen.globalAlpha = dense ? 0.55 : 1;
      if (along !== null) disc(pen, at[0] * along, at[1] * along, 0.55 * dot);
      disc(pen, ...at, dot);
      pen.globalAlpha = 1;
      spots[worker] = at;
    }
    if (leading >= 0 && spots[leading] && !dense) {  // the others are pulled to the leader
      pen.strokeStyle = css("--accent");
      pen.globalAlpha = 0.5;
      for (const at of spots) if (at) line(pen, spots[leading], at);
      pen.globalAlpha = 1;
      pen.beginPath();
      pen.arc(...spots[leading], 1.8 * dot, 0, 2 * Math.PI);
      pen.stroke();
    }
    pen.fillStyle = ink;
    if (!gossips) pen.fillRect(-4, -4, 8, 8);
    pen.restore();
    if (ended) {
      pen.fillStyle = ink;
      pen.font = "bold 15px system-ui, sans-serif";
      pen.fillText(`diverged at ${round(film.ended)} s`, 10, 22);
    }
    const loss = lossAt(film, time);
    film.status.textContent = `: ${done.toLocaleString("en")} commits, training loss ${round(loss)}`;
    film.status.dataset.loss = loss === null ? "" : String(loss);
  }

  function curve(film, time) {
    const { pen2: pen, width2: width, height2: height } = film, left = 56, right = 8, top = 8, bottom = 30;
    pen.clearRect(0, 0, width, height);
    const [low, high] = show.limits.map(Math.log10);
    const x = (at) => left + (at / last) * (width - left - right);
    const share = (loss) => (Math.log10(Math.max(loss, 1e-300)) - low) / (high - low || 1);
    const y = (loss) => top + (1 - Math.min(1, Math.max(0, share(loss)))) * (height - top - bottom);
    pen.font = "11px system-ui, sans-serif";
    pen.fillStyle = css("--faint");
    pen.fillText(round(show.limits[1]), 4, top + 8);
    pen.fillText(round(show.limits[0]), 4, height - bottom);
    pen.fillText("training loss against simulated time (s)", left, height - 6);
    pen.textAlign = "right";
    pen.fillText(round(last), width - right, height - 18);
    pen.textAlign = "left";
    for (const { loss } of [...films.filter((each) => each !== film), film]) {
      pen.strokeStyle = pen.fillStyle = loss === film.loss ? css("--accent") : css("--line");
      pen.lineWidth = loss === film.loss ? 1.8 : 1.2;
      pen.beginPath();
      loss.forEach(([at, value], k) => (k ? pen.lineTo(x(at), y(value)) : pen.moveTo(x(at), y(value))));
      pen.stroke();
      for (const [at, value] of loss) {  // a loss beyond the axis is a triangle at its edge
        const beyond = share(value) > 1 ? 1 : share(value) < 0 ? -1 : 0;
        if (!beyond) continue;
        const tip = y(value) - 3 * beyond;
        pen.beginPath();
        pen.moveTo(x(at), tip);
        pen.lineTo(x(at) - 4, tip + 6 * beyond);
        pen.lineTo(x(at) + 4, tip + 6 * beyond);
        pen.fill();
      }
    }
    pen.strokeStyle = css("--ink");
    pen.lineWidth = 1;
    line(pen, [x(time), top], [x(time), height - bottom]);
  }

  let now = 0, playing = false, before = 0;
  function render() {
    scrub.value = now;
    clock.textContent = `${now.toFixed(2)} s`;
    for (const film of films) {
      draw(film, now);
      curve(film, now);
    }
  }
  function go(time) {
    now = Math.min(last, Math.max(0, time));
    render();
  }
  function resize() {
    const tall = Math.max(220, 0.6 * window.innerHeight);  // the stage fits a laptop's window
    for (const film of films) {
      [film.pen, film.width, film.height] = size(film.canvas, Math.min(0.75 * tall, 0.85 * film.canvas.clientWidth));
      [film.pen2, film.width2, film.height2] = size(film.curve, 0.25 * tall);
    }
    render();
  }
  function tick(moment) {
    if (!playing) return;
    // The first frame's time may be a little before the click's.
    now += (Math.max(0, moment - before) / 1000) * Number(speed.value);
    before = moment;
    if (now >= last) toggle();
    go(now);
    requestAnimationFrame(tick);
  }
  function toggle() {
    playing = !playing;
    play.textContent = playing ? "Pause" : "Play";
    if (!playing) return;
    if (now >= last) now = 0;
    before = performance.now();
    requestAnimationFrame(tick);
  }
  function step(by) {
    const times = films.map(({ commits }) => {
      const i = by > 0 ? after(commits.time, now) : lowest(commits.time, now) - 1;
      return commits.time[i];
    }).filter((time) => time !== undefined);
    if (times.length) go(by > 0 ? Math.min(...times) : Math.max(...times));
  }
  play.onclick = toggle;
  back.onclick = () => step(-1);
  forth.onclick = () => step(1);
  scrub.oninput = () => go(Number(scrub.value));
  paint.onchange = () => { explain(); render(); };
  document.addEventListener("keydown", (event) => {
    if (event.key !== " " || event.target !== document.body) return;
    event.preventDefault();
    toggle();
  });
  const follow = () => {
    const time = Number(new URLSearchParams(location.hash.slice(1)).get("t") ?? NaN);
    if (Number.isFinite(time)) go(time);
  };
  window.addEventListener("hashchange", follow);
  window.addEventListener("resize", resize);
  onColors(render);
  explain();
  now = show.start;
  resize();
  follow();
  // For measurements: draws frames one after the other and returns how many it draws a second.
  window.drawAll = (frames = 200) => {
    const begun = performance.now();
    for (let i = 0; i < frames; i++) go((last * i) / frames);
    go(show.start);
    return (1000 * frames) / (performance.now() - begun);
  };
}
