// The timeline: a lane for each worker, and staleness, queue and losses below, on one time axis.
// uPlot draws the axes and curves, and has the cursor; the lanes are drawn in its hook.

/** Read columns of integers: bytes by planes, deflated, in base64. */
async function unpack(packed) {
  const raw = Uint8Array.from(atob(packed.bytes), (letter) => letter.charCodeAt(0));
  const stream = new Blob([raw]).stream().pipeThrough(new DecompressionStream("deflate"));
  const planes = new Uint8Array(await new Response(stream).arrayBuffer());
  const count = planes.length / 4, values = new Int32Array(count), columns = {};
  for (let i = 0; i < count; i++) {
    values[i] = planes[i] | (planes[count + i] << 8) | (planes[2 * count + i] << 16) | (planes[3 * count + i] << 24);
  }
  let start = 0;
  for (const [name, length] of Object.entries(packed.lengths)) {
    columns[name] = values.subarray(start, start + length);
    start += length;
  }
  return columns;
}

/** Undo differences, in place. */
function sums(column) {
  for (let i = 1; i < column.length; i++) column[i] += column[i - 1];
  return column;
}

/** Return the first index at which an ascending array is at least a value. */
function lowest(values, value, from = 0, to = values.length) {
  while (from < to) {
    const middle = (from + to) >> 1;
    if (values[middle] < value) from = middle + 1;
    else to = middle;
  }
  return from;
}

/** Prepare a timeline's columns: times in seconds, the rows of each lane, and the queue. */
async function prepare(show) {
  const columns = await unpack(show.columns), second = show.end / show.ticks;
  const seconds = (ticks) => Float64Array.from(ticks, (value) => value * second);
  const commits = {
    worker: columns.worker,
    time: seconds(sums(columns.time)),
    version: sums(columns.version),
    staleness: columns.staleness,
  };
  commits.readTime = commits.time.map((time, i) => time - columns.age[i] * second);
  commits.read = commits.version.map((version, i) => version - columns.read[i]);
  if (columns.distance) commits.distance = Float64Array.from(columns.distance, (value) => (value * show.largest_distance) / show.ticks);
  const ofLane = Array.from({ length: show.lanes }, () => []);
  commits.worker.forEach((worker, i) => ofLane[worker].push(i));
  const phases = show.phases.map(([name, color], k) => {
    const lane = sums(columns[`lane${k}`]), begin = seconds(sums(columns[`begin${k}`]));
    const end = begin.map((time, i) => time + columns[`length${k}`][i] * second);
    const first = Array.from({ length: show.lanes + 1 }, (_, worker) => lowest(lane, worker));
    const rgb = [1, 3, 5].map((i) => parseInt((color ?? "#000000").slice(i, i + 2), 16));
    return { name, color, rgb, begin, end, first };
  });
  let messages = null;
  if (show.gossip) {
    const sent = seconds(sums(columns.sent));
    const mixed = sent.map((time, i) => time + columns.journey[i] * second);
    messages = { sender: columns.sender, receiver: columns.receiver, sent, mixed };
  }
  return { commits, ofLane, phases, messages };
}

/** Return the steps of a count that rises at some times and falls at others. */
function counts(rises, falls) {
  const events = [...Array.from(rises, (at) => [at, 1]), ...Array.from(falls, (at) => [at, -1])];
  events.sort((a, b) => a[0] - b[0] || a[1] - b[1]);
  const times = [0], values = [0];
  for (const [at, step] of events) {
    if (at === times.at(-1)) values[values.length - 1] += step;
    else {
      times.push(at);
      values.push(values.at(-1) + step);
    }
  }
  return [times, values];
}

/** Call a function when the page's colours change, and for printing, on white paper. */
function onColors(draw) {
  window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
  for (const event of ["beforeprint", "afterprint"]) {
    window.addEventListener(event, () => {
      document.documentElement.classList.toggle("paper", event === "beforeprint");
      draw();
    });
  }
}

function joined(arrays) {
  return arrays.flatMap((array) => Array.from(array));
}

function timeline(show, trace, place) {
  const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const { commits, ofLane, phases, messages } = trace;
  const seconds = (value) => `${Number(value.toPrecision(5))} s`;
  const number = (value) => value.toLocaleString("en");
  const part = show.commits < show.total ? `the first ${number(show.commits)} of ${number(show.total)}` : number(show.total);
  const item = show.noun === "slot" ? "trained samples" : "commits";
  const plural = `${number(show.workers)} ${show.noun}${show.workers === 1 ? "" : "s"}`;
  const lanesShown = show.lanes < show.workers ? `the first ${number(show.lanes)} of ${plural}` : plural;
  const caption = element("p", `${show.title}: ${lanesShown}, ${part} ${item}. `, place, "faint");
  element("span", matchMedia("(pointer: coarse)").matches
    ? "Tap for the nearest commit; two fingers zoom."
    : "Drag to zoom, shift and drag to move, double-click for the whole; " +
      `click a lane to follow its ${show.noun}; the arrow keys go from commit to commit.`, caption, "hint");
  const legend = element("div", null, place, "legend");
  for (const { name, color, begin } of phases) {
    if (!begin.length || color === null) continue;
    const entry = element("span", null, legend);
    element("i", null, entry).style.background = color;
    entry.appendChild(document.createTextNode(name));
  }
  const outages = show.marks.filter(([worker]) => worker < 0);
  const kinds = new Set(show.marks.filter(([worker]) => worker >= 0).map(([, kind]) => kind));
  const signs = [["cross", [...kinds].join(" or ")], ["band", outages.length && "outage"],
    ["bar", outages.length && "end of an outage, above it the restored version"], ["thin bar", show.rounds && "new version"]];
  for (const [sign, text] of signs) {
    if (!text) continue;
    const entry = element("span", null, legend);
    element("i", sign === "cross" ? "\u00d7" : null, entry, sign);
    entry.appendChild(document.createTextNode(text));
  }
  const controls = element("div", null, place, "controls");
  const choices = [["all", "all, by number"], ["slow", "all, fewest commits first"], ["stale", "all, stalest first"],
    ["slowest", "the ten with the fewest commits"], ["fastest", "the ten with the most commits"], ["followed", `the followed ${show.noun}`]];
  const label = element("label", `${show.noun}s `, controls), filter = element("select", null, label);
  for (const [value, text] of choices) element("option", text, filter).value = value;
  const buttons = { "zoom in": () => zoom(0.5), "zoom out": () => zoom(2), earlier: () => move(-0.4), later: () => move(0.4), whole: () => view(0, show.end) };
  for (const [text, act] of Object.entries(buttons)) element("button", text, controls).onclick = act;
  const strip = element("canvas", null, place, "strip"), panel = element("div", null, place, "timeline");
  strip.setAttribute("role", "img");
  strip.setAttribute("aria-label", "the whole, with the part that is shown");
  panel.tabIndex = 0;
  panel.setAttribute("role", "group");
  panel.setAttribute("aria-label", `timeline of ${plural}`);
  const status = element("p", "Point at a commit for its read and staleness.", place, "status");
  status.setAttribute("role", "status");
  status.id = "timeline-status";

  const mean = (rows) => rows.reduce((sum, i) => sum + commits.staleness[i], 0) / Math.max(1, rows.length);
  let order = [...ofLane.keys()], row = [...ofLane.keys()], chosen = -1, followed = -1, moving = null, overview = null;
  const plots = [];

  function arrange() {
    const by = (key) => [...ofLane.keys()].sort((a, b) => key(a) - key(b) || a - b);
    const slow = by((lane) => ofLane[lane].length);
    order = {
      all: () => [...ofLane.keys()],
      slow: () => slow,
      stale: () => by((lane) => -mean(ofLane[lane])),
      slowest: () => slow.slice(0, 10),
      fastest: () => slow.slice(-10).reverse(),
      followed: () => (followed < 0 ? [...ofLane.keys()] : [followed]),
    }[filter.value]();
    row = Array(ofLane.length).fill(-1);
    order.forEach((lane, i) => { row[lane] = i; });
    overview = null;
    if (plots.length) plots[0].setScale("y", { min: 0, max: order.length });
  }

  function view(from, to) {
    const least = show.end / 1e6, length = Math.min(show.end, Math.max(least, to - from));
    const begin = Math.min(Math.max(0, from), show.end - length);
    for (const plot of plots) plot.setScale("x", { min: begin, max: begin + length });
  }
  function zoom(factor, at = null) {
    const { min, max } = plots[0].scales.x, centre = at ?? (min + max) / 2;
    view(centre - (centre - min) * factor, centre + (max - centre) * factor);
  }
  function move(share) {
    const { min, max } = plots[0].scales.x;
    view(min + share * (max - min), max + share * (max - min));
  }

  /** Draw the phases into pixels, each the mean of its phases' colours; a lane is a row, copied to its height. */
  const lanesCanvas = document.createElement("canvas"), inLanes = phases.filter((phase) => phase.color !== null);
  function lanesImage(canvas, min, max, width, height) {
    if (canvas.width !== width || canvas.height !== height) Object.assign(canvas, { width, height });
    const pen = canvas.getContext("2d"), image = pen.createImageData(width, height), pixels = new Uint32Array(image.data.buffer);
    const step = height / order.length, gap = step > 6 ? Math.round(0.14 * step) : 0, scale = width / (max - min);
    const colors = new Uint32Array(width), shares = new Float32Array(4 * width);
    order.forEach((lane, i) => {
      shares.fill(0);
      for (const { rgb: [red, green, blue], begin, end, first } of inLanes) {
        const add = (x, share) => {
          shares[4 * x] += share * red;
          shares[4 * x + 1] += share * green;
          shares[4 * x + 2] += share * blue;
          shares[4 * x + 3] += share;
        };
        const to = lowest(begin, max, first[lane], first[lane + 1]);
        // Phases of a lane do not overlap, so that their ends ascend, too.
        for (let k = lowest(end, min, first[lane], first[lane + 1]); k < to; k++) {
          const from = Math.max(0, (begin[k] - min) * scale), until = Math.min(width, (end[k] - min) * scale);
          const [left, right] = [Math.floor(from), Math.floor(until)];
          if (left === right) add(left, until - from);
          else add(left, left + 1 - from);
          for (let x = left + 1; x < right; x++) add(x, 1);
          if (left < right) add(right, until - right);
        }
      }
      for (let x = 0; x < width; x++) {  // little-endian: alpha, blue, green, red
        const share = shares[4 * x + 3], alpha = share > 0 ? Math.round(255 * Math.min(1, Math.max(0.3, share))) : 0;
        colors[x] = ((alpha << 24) | (shares[4 * x + 2] / share << 16) | (shares[4 * x + 1] / share << 8) | (shares[4 * x] / share)) >>> 0;
      }
      const until = Math.max(Math.floor(i * step) + 1, Math.floor((i + 1) * step) - gap);
      for (let y = Math.floor(i * step) + gap; y < until && y < height; y++) pixels.set(colors, y * width);
    });
    pen.putImageData(image, 0, 0);
    return canvas;
  }

  /** Draw the whole in the strip, pale but for the part that the panels show. */
  function drawStrip(min, max) {
    const scale = window.devicePixelRatio || 1, width = Math.round(strip.clientWidth * scale), height = Math.round(36 * scale);
    if (!width) return;
    if (overview?.width !== width) overview = lanesImage(document.createElement("canvas"), 0, show.end, width, height);
    Object.assign(strip, { width, height });
    const pen = strip.getContext("2d"), [from, to] = [min, max].map((time) => (time / show.end) * width);
    pen.drawImage(overview, 0, 0);
    pen.fillStyle = css("--paper");
    pen.globalAlpha = 0.6;
    pen.fillRect(0, 0, from, height);
    pen.fillRect(to, 0, width - to, height);
    pen.globalAlpha = 1;
    pen.strokeStyle = css("--mark");
    pen.lineWidth = 2 * scale;
    pen.strokeRect(from, scale, Math.max(2 * scale, to - from), height - 2 * scale);
  }
  strip.onpointerdown = strip.onpointermove = (event) => {
    if (!event.buttons) return;
    const { min, max } = plots[0].scales.x, centre = (event.offsetX / strip.clientWidth) * show.end;
    view(centre - (max - min) / 2, centre + (max - min) / 2);
  };

  function drawLanes(plot) {
    const pen = plot.ctx, { left, top, width, height } = plot.bbox, { min, max } = plot.scales.x;
    const x = (time) => left + ((time - min) / (max - min)) * width;
    const step = height / order.length;
    const middle = (lane) => top + (row[lane] + 0.5) * step;
    drawStrip(min, max);
    pen.drawImage(lanesImage(lanesCanvas, min, max, Math.round(width), Math.round(height)), left, top);
    pen.save();
    pen.beginPath();
    pen.rect(left, top, width, height);
    pen.clip();
    const from = lowest(commits.time, min), to = lowest(commits.time, max);
    const ink = css("--ink"), accent = css("--mark");
    for (const [worker, , begin, end] of show.marks) {
      pen.fillStyle = pen.strokeStyle = ink;
      pen.lineWidth = 1.5;
      if (worker >= 0 && row[worker] >= 0) {
        const [cx, cy] = [x(begin), middle(worker)];
        line(pen, [cx - 4, cy - 4], [cx + 4, cy + 4]);
        line(pen, [cx - 4, cy + 4], [cx + 4, cy - 4]);
      } else if (worker < 0) {
        const until = typeof end === "number" ? end : show.end;
        pen.globalAlpha = 0.25;
        pen.fillRect(x(begin), top, x(until) - x(begin), height);
        pen.globalAlpha = 1;
        line(pen, [x(until), top], [x(until), top + height]);
      }
    }
    if (show.rounds && to - from < 2000) {
      pen.strokeStyle = ink;
      pen.globalAlpha = 0.5;
      pen.lineWidth = 1;
      let versions = 0;
      for (let i = Math.max(1, from); i < to; i++) versions += commits.version[i] > commits.version[i - 1];
      for (let i = Math.max(1, from); i < to && versions < 120; i++) {
        if (commits.version[i] > commits.version[i - 1]) line(pen, [x(commits.time[i]), top], [x(commits.time[i]), top + height]);
      }
      pen.globalAlpha = 1;
    }
    if (messages !== null) {
      const begin = lowest(messages.sent, min - (max - min)), end = lowest(messages.sent, max);
      pen.strokeStyle = ink;
      pen.lineWidth = 0.8;
      for (let i = begin; i < end && end - begin < 1500; i++) {
        const { sender, receiver, sent, mixed } = messages;
        if (mixed[i] < min || row[sender[i]] < 0 || row[receiver[i]] < 0) continue;
        line(pen, [x(sent[i]), middle(sender[i])], [x(mixed[i]), middle(receiver[i])]);
      }
    }
    if (to - from < 2000) {  // a commit is a bar, a read a shorter one below the middle
      const size = Math.max(1.5, Math.min(4, 0.3 * step));
      pen.fillStyle = pen.strokeStyle = ink;
      pen.lineWidth = 1;
      for (let i = from; i < to; i++) {
        if (row[commits.worker[i]] < 0) continue;
        const y = middle(commits.worker[i]), at = x(commits.time[i]);
        pen.fillRect(at - 0.75, y - size, 1.5, 2 * size);
        if (step > 4) line(pen, [x(commits.readTime[i]), y], [x(commits.readTime[i]), y + 1.5 * size]);
      }
    }
    if (followed >= 0 && row[followed] >= 0) {
      pen.strokeStyle = accent;
      pen.lineWidth = 2;
      pen.strokeRect(left + 1, middle(followed) - step / 2, width - 2, step);
    }
    if (chosen >= 0 && row[commits.worker[chosen]] >= 0) {
      const y = middle(commits.worker[chosen]);
      pen.strokeStyle = pen.fillStyle = accent;
      pen.lineWidth = 3;
      line(pen, [x(commits.readTime[chosen]), y], [x(commits.time[chosen]), y]);
      disc(pen, x(commits.time[chosen]), y, 5);
      for (const i of between(chosen)) if (row[commits.worker[i]] >= 0) disc(pen, x(commits.time[i]), middle(commits.worker[i]), 3);
    }
    pen.restore();
    // The restored versions stand above the lanes: in words or as a number, as far as they fit.
    const restored = outages.filter(([, , , end, version]) => version >= 0 && end >= min && end <= max);
    let free = left;
    pen.fillStyle = ink;
    pen.textAlign = "left";
    restored.forEach(([, , , end, version], i) => {
      const limit = i + 1 < restored.length ? x(restored[i + 1][3]) : left + width, at = x(end);
      const text = [`back at version ${version}`, String(version)].find((words) => at + pen.measureText(words).width <= limit);
      if (text === undefined || at < free) return;
      free = at + pen.measureText(`${text} `).width;
      pen.fillText(text, at, top - 8 * window.devicePixelRatio);
    });
  }

  /** Return the commits between a commit and its read. */
  function between(i) {
    const rows = [];
    for (let j = i - 1; j >= 0 && commits.version[j] > commits.read[i]; j--) rows.push(j);
    return rows;
  }

  function describe(i) {
    const name = `${show.noun} ${commits.worker[i]}`, rows = show.noun === "slot" ? [] : between(i), who = new Map();
    for (const j of rows) who.set(commits.worker[j], (who.get(commits.worker[j]) ?? 0) + 1);
    const names = [...who].slice(0, 6).map(([worker, times]) => (times > 1 ? `${worker} (${times} times)` : String(worker)));
    const others = who.size > 6 ? ` and ${who.size - 6} more` : "";
    const by = rows.length ? ` In between ${rows.length === 1 ? "came 1 commit" : `came ${number(rows.length)} commits`}, of workers ${names.join(", ")}${others}.` : "";
    const completes = commits.version[i] > (i ? commits.version[i - 1] : 0);
    const use = show.noun === "slot" ? `was trained on at version ${number(commits.version[i])}`
      : completes ? `made version ${number(commits.version[i])}` : `waits for version ${number(commits.version[i] + 1)}`;
    const distance = commits.distance ? `, distance from the mean ${round(commits.distance[i])}` : "";
    return `${name} at ${seconds(commits.time[i])}: read version ${number(commits.read[i])} at ${seconds(commits.readTime[i])}, ` +
      `${use}; staleness ${number(commits.staleness[i])}${distance}.${by}`;
  }
  function choose(i) {
    if (i === chosen) return;
    chosen = i;
    status.textContent = i < 0 ? "Point at a commit for its read and staleness." : describe(i);
    status.dataset.commit = String(i);
    plots[0].redraw(false);
  }
  function follow(lane) {
    followed = followed === lane ? -1 : lane;
    if (followed < 0 && filter.value === "followed") filter.value = "all";
    arrange();
    if (followed >= 0) status.textContent = `Following ${show.noun} ${followed}: ${number(ofLane[followed].length)} ${item}, mean staleness ${round(mean(ofLane[followed]))}.`;
    plots.forEach((plot, k) => {
      const of = k && curves[k - 1].of;
      if (of) plot.setData(of(followed), false);
    });
    move(0);  // scales and curves of all panels anew
    for (const plot of plots) plot.redraw();
  }
  function laneAt(plot) {
    const at = Math.floor((plot.cursor.top / plot.over.clientHeight) * order.length);
    return order[Math.min(order.length - 1, Math.max(0, at))];
  }
  function point(plot, reach = 25) {
    if (plot.cursor.left < 0 || plot.cursor.left === undefined || moving !== null) return;
    const rows = ofLane[laneAt(plot)], at = plot.posToVal(plot.cursor.left, "x");
    const k = lowest(rows.map((i) => commits.time[i]), at);
    const near = [rows[k - 1], rows[k]].filter((i) => i !== undefined);
    const distance = (i) => Math.abs(plot.valToPos(commits.time[i], "x") - plot.cursor.left);
    near.sort((a, b) => distance(a) - distance(b));
    if (near.length && distance(near[0]) < reach) choose(near[0]);
  }

  const heightOfLanes = Math.min(460, Math.max(150, 9 * show.lanes));
  const axis = (extra) => ({ stroke: () => css("--faint"), grid: { stroke: () => css("--line"), width: 1 }, ticks: { stroke: () => css("--line") }, font: "11px system-ui, sans-serif", ...extra });
  // A browser that takes a picture of the page may report a window of one pixel meanwhile.
  const width = () => Math.max(200, panel.clientWidth);
  const base = (height, label, isLast) => ({
    width: width(),
    height: height + (isLast ? 46 : 6),
    padding: [10, 12, isLast ? 0 : 6, 0],
    legend: { show: false },
    cursor: { y: false, sync: { key: place.id, setSeries: false }, drag: { x: true, y: false, setScale: false }, points: { show: false } },
    select: { show: true },
    scales: { x: { time: false, min: 0, max: show.end } },
    axes: [axis({ show: isLast, label: isLast ? show.time : undefined, labelSize: 16, labelFont: "11px system-ui, sans-serif", size: 30 }),
      axis({ label, size: 58, labelSize: 16, labelFont: "11px system-ui, sans-serif", values: (_, splits) => splits.map((value) => value === null ? "" : round(value)) })],
    hooks: { setSelect: [(plot) => {
      if (plot.select.width > 3) view(plot.posToVal(plot.select.left, "x"), plot.posToVal(plot.select.left + plot.select.width, "x"));
      if (plot.select.width > 0) plot.setSelect({ left: 0, width: 0, top: 0, height: 0 }, false);
    }] },
  });

  const panels = [];
  if (commits.time.length) panels.push({ label: "staleness", data: [commits.time, commits.staleness], marks: true });
  if (commits.distance) panels.push({ label: "distance", data: [commits.time, commits.distance], marks: true });
  const at = (name) => phases.find((phase) => phase.name === name);
  const [waiting, served, queued] = [at("waiting at the server"), at("being served"), at("in the queue")];
  /** Return the counts of some phases of a lane, of all lanes without one. */
  const during = (counted) => (lane) => {
    const ends = (name) => joined(counted.map(({ [name]: times, first }) => (lane < 0 ? times : times.subarray(first[lane], first[lane + 1]))));
    return counts(ends("begin"), ends("end"));
  };
  const underWay = (lane) => {
    const of = (times) => times.filter((_, i) => lane < 0 || messages.sender[i] === lane || messages.receiver[i] === lane);
    return counts(of(messages.sent), of(messages.mixed));
  };
  if (waiting?.begin.length || served?.begin.length) panels.push({ label: "at the server", of: during([waiting, served]) });
  else if (queued) panels.push({ label: "in the queue", of: during([queued]) });
  else if (messages) panels.push({ label: "under way", of: underWay });
  for (const [label, points] of show.curves) {
    const finite = points.filter(([, value]) => typeof value === "number");
    if (finite.length) panels.push({ label, data: [finite.map((point) => point[0]), finite.map((point) => point[1])], log: finite.every((point) => point[1] > 0) });
  }

  for (const panel of panels) panel.data ??= panel.of(-1);
  const curves = panels.filter(({ data: [, values] }) => values.some((value) => value !== values[0]));

  /** Draw commits as squares, at most one for each two pixels; only the followed worker's, if any. */
  function squares(plot, series, from, to) {
    const values = plot.data[series];
    const fill = new Path2D(), { left, top, width, height } = plot.bbox, { x, y } = plot.scales;
    const seen = new Uint8Array((Math.ceil(width / 2) + 1) * (Math.ceil(height / 2) + 1));
    for (let i = from; i <= to; i++) {
      if (followed >= 0 && commits.worker[i] !== followed) continue;
      const across = Math.floor(((commits.time[i] - x.min) / (x.max - x.min)) * (width / 2));
      const down = Math.floor(((y.max - values[i]) / (y.max - y.min)) * (height / 2));
      const cell = down * (Math.ceil(width / 2) + 1) + across;
      if (seen[cell]) continue;
      seen[cell] = 1;
      fill.rect(left + 2 * across - 1, top + 2 * down - 1, 2.5, 2.5);
    }
    return { stroke: null, fill };
  }

  const lanes = base(heightOfLanes, show.noun, curves.length === 0);
  if (outages.length) lanes.padding[0] = 24;
  lanes.scales.y = { range: () => [0, order.length], dir: -1 };
  lanes.axes[1].splits = () => {
    const every = Math.max(1, Math.ceil((order.length * 16) / heightOfLanes));
    return order.map((_, i) => i + 0.5).filter((_, i) => i % every === 0);
  };
  lanes.axes[1].values = (_, splits) => splits.map((split) => order[Math.floor(split)] ?? "");
  lanes.axes[1].grid = { show: false };
  lanes.series = [{}, { paths: () => null, points: { show: false } }];
  lanes.hooks.draw = [drawLanes];
  lanes.hooks.setCursor = [point];
  plots.push(new uPlot(lanes, [[0, show.end], [null, null]], panel));
  curves.forEach(({ label, data, marks, of: steps, log }, k) => {
    const options = base(90, label, k === curves.length - 1);
    options.scales.y = log ? { distr: 3 } : marks || steps ? { range: (_, low, high) => [0, 1.1 * (high || 1)] } : {};
    if (log) options.axes[1].grid = options.axes[1].ticks = { show: false };
    const series = { stroke: () => css("--accent"), width: 1.5, points: { show: false } };
    if (marks) Object.assign(series, { paths: squares, fill: () => css("--accent"), width: 0 });
    if (steps) {
      // With several steps a pixel, their extent: what the path of lines draws.
      const [stepped, linear] = [uPlot.paths.stepped({ align: 1 }), uPlot.paths.linear()];
      series.paths = (plot, number, from, to) => (to - from > plot.bbox.width ? linear : stepped)(plot, number, from, to);
    }
    options.series = [{}, series];
    if (k < curves.length - 1) options.axes[0].show = false;
    plots.push(new uPlot(options, data, panel));
  });
  const fingers = new Map();
  let touched = false;
  plots.forEach((plot, k) => {
    plot.over.addEventListener("pointerdown", (event) => {
      touched = event.pointerType === "touch";
      if (touched) fingers.set(event.pointerId, event.offsetX);
    });
    plot.over.addEventListener("pointermove", (event) => {  // what is below two fingers stays there
      if (!fingers.has(event.pointerId)) return;
      const times = [...fingers.values()].map((at) => plot.posToVal(at, "x"));
      fingers.set(event.pointerId, event.offsetX);
      const at = [...fingers.values()], rate = (times[1] - times[0]) / (at[1] - at[0]);
      if (at.length === 2 && rate > 0) view(times[0] - at[0] * rate, times[0] + (plot.over.clientWidth - at[0]) * rate);
    });
    for (const end of ["pointerup", "pointercancel", "pointerleave"]) plot.over.addEventListener(end, (event) => fingers.delete(event.pointerId));
    const canvas = plot.root.querySelector("canvas");
    canvas.setAttribute("role", "img");
    canvas.setAttribute("aria-label", k ? `${curves[k - 1].label} against ${show.time}` : `phases of ${number(show.lanes)} ${show.noun}s against ${show.time}`);
    plot.over.addEventListener("dblclick", () => view(0, show.end));
    plot.over.addEventListener("wheel", (event) => {
      if (event.ctrlKey || event.metaKey) zoom(event.deltaY > 0 ? 1.25 : 0.8, plot.posToVal(plot.cursor.left, "x"));
      else if (Math.abs(event.deltaX) > Math.abs(event.deltaY)) move(event.deltaX / plot.over.clientWidth);
      else return;
      event.preventDefault();
    }, { passive: false });
    plot.over.addEventListener("mousedown", (event) => {
      if (!event.shiftKey) return;
      event.stopImmediatePropagation();
      moving = event.clientX;
    }, { capture: true });
  });
  window.addEventListener("mousemove", (event) => {
    if (moving === null) return;
    move((moving - event.clientX) / plots[0].over.clientWidth);
    moving = event.clientX;
  });
  window.addEventListener("mouseup", () => { moving = null; });
  let pressed = null;
  plots[0].over.addEventListener("mousedown", (event) => { pressed = event.clientX; });
  plots[0].over.addEventListener("click", (event) => {
    if (touched) point(plots[0], Infinity);
    else if (!event.shiftKey && pressed !== null && Math.abs(event.clientX - pressed) < 3) follow(laneAt(plots[0]));
  });
  panel.addEventListener("keydown", (event) => {
    const rows = followed >= 0 ? ofLane[followed] : null;
    const next = (step) => {
      const at = rows ? rows[Math.min(rows.length - 1, Math.max(0, rows.indexOf(chosen) + step))] : Math.min(show.commits - 1, Math.max(0, chosen + step));
      choose(at);
      const { min, max } = plots[0].scales.x, time = commits.time[at];
      if (time < min || time > max) view(time - (max - min) / 2, time + (max - min) / 2);
    };
    const act = { ArrowRight: () => next(1), ArrowLeft: () => next(-1), "+": () => zoom(0.5), "-": () => zoom(2), Home: () => view(0, show.end) }[event.key];
    if (!act) return;
    act();
    event.preventDefault();
  });
  filter.onchange = arrange;
  // About ten commits of each lane are legible; the strip shows where they are.
  view(0, (10 * show.end * show.lanes) / Math.max(1, show.commits));
  const resize = () => plots.forEach((plot) => plot.setSize({ width: width(), height: plot.height }));
  window.addEventListener("resize", resize);
  onColors(() => plots.forEach((plot) => plot.redraw(false)));
  // For measurements: pans through the whole timeline and returns the number of frames a second.
  window.panTimeline = async (frames = 60, share = 0.2) => {
    const begun = performance.now();
    for (let i = 0; i < frames; i++) {
      view((1 - share) * show.end * (i / frames), (1 - share) * show.end * (i / frames) + share * show.end);
      await new Promise(requestAnimationFrame);
    }
    return (1000 * frames) / (performance.now() - begun);
  };
  return { commits, plots, view, choose, follow };
}
