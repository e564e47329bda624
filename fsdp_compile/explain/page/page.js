"use strict";
// Everything below is drawn from the JSON document in the element "data"; nothing is fetched.
const doc = JSON.parse(document.getElementById("data").textContent);
const all = doc.predictions;
const SVG = document.querySelector("svg").namespaceURI;
const PARTS = ["parameters", "gradients", "optimizer", "activations", "logits", "gathered", "packed", "other"];
const LANES = { compute: "compute", node: "within nodes", network: "between nodes" };
let chosen = 0; // index of the prediction that is shown
let view = [0, 1]; // seconds: what of the step the timeline shows
let current = -1; // index of the span whose details are shown

// --- text ------------------------------------------------------------------------------------------------------------

const number = (value, digits) => value.toLocaleString("en-US", { maximumFractionDigits: digits, minimumFractionDigits: digits });
const whole = (value) => number(value, 0);
const digitsFor = (value) => (value >= 100 || value === 0 ? 0 : value >= 10 ? 1 : value >= 1 ? 2 : 3);
const ms = (seconds) => number(1e3 * seconds, digitsFor(1e3 * Math.abs(seconds))) + " ms";
const time = (seconds) => (seconds >= 10 ? number(seconds, 2) + " s" : ms(seconds));
const percent = (share) => number(100 * share, 1) + " %";
function bytes(size) {
  for (const [unit, scale] of [["TiB", 2 ** 40], ["GiB", 2 ** 30], ["MiB", 2 ** 20], ["KiB", 2 ** 10]])
    if (Math.abs(size) >= scale) return number(size / scale, digitsFor(size / scale)) + " " + unit;
  return whole(size) + " bytes";
}
function count(value) {
  for (const [unit, scale] of [["T", 1e12], ["B", 1e9], ["M", 1e6], ["K", 1e3]])
    if (value >= scale) return number(value / scale, 2) + " " + unit;
  return whole(value);
}
const fits = (p) => p.fits !== false;
const extent = (p) => Math.max(...p.timeline.map((span) => span.end), ...p.memory_over_time.map(([at]) => at), 1e-9);
const label = (setting) => `${whole(setting.world_size)} GPUs, batch ${setting.batch}`;
const words = (setting) => [label(setting), setting.strategy, "checkpointing " + setting.checkpointing, setting.precision, setting.optimizer,
  `${whole(setting.sequence)} tokens a sequence`, `accumulation ${setting.accumulation}`].join(" · ");

// --- elements --------------------------------------------------------------------------------------------------------

function el(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}
function svg(tag, attributes = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}
function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) if (value != null) node.setAttribute(name, value);
  node.append(...children.filter((child) => child != null));
  return node;
}
const put = (id, ...children) => document.getElementById(id).replaceChildren(...children.filter((child) => child != null));
const show = (id, on) => (document.getElementById(id).hidden = !on);
const swatch = (color) => el("span", { class: "swatch", style: `background:var(--${color})` });

function table(heads, rows, numeric) {
  const line = (tag, cells) => cells.map((cell, at) => el(tag, { class: numeric.includes(at) ? "num" : null }, cell));
  const body = rows.map((row) => (row instanceof Node ? row : el("tr", {}, ...line("td", row))));
  return el("div", { class: "scroll" }, el("table", {}, el("thead", {}, el("tr", {}, ...line("th", heads))), el("tbody", {}, ...body)));
}

const tip = document.getElementById("tip");
function showTip(text, x, y) {
  tip.textContent = text;
  tip.style.display = "block";
  tip.style.left = Math.max(4, Math.min(x + 14, innerWidth - tip.offsetWidth - 8)) + "px";
  tip.style.top = (y + 18 + tip.offsetHeight > innerHeight ? y - tip.offsetHeight - 10 : y + 18) + "px";
}
const hideTip = () => (tip.style.display = "none");
function explained(node, text) {
  node.classList.add("focus");
  fill(node, { tabindex: 0, "aria-label": text }, []);
  node.addEventListener("pointermove", (event) => showTip(text, event.clientX, event.clientY));
  node.addEventListener("pointerleave", hideTip);
  node.addEventListener("focus", () => {
    const box = node.getBoundingClientRect();
    showTip(text, box.left + box.width / 2, box.bottom - 12);
  });
  node.addEventListener("blur", hideTip);
  return node;
}
function onPick(node, act) {
  node.addEventListener("click", act);
  node.addEventListener("keydown", (event) => {
    if (event.key === "Enter" || event.key === " ") { event.preventDefault(); act(); }
  });
  return node;
}

// --- axes ------------------------------------------------------------------------------------------------------------

function ticks(low, high, wanted) {
  const raw = (high - low) / wanted || 1, power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map((each) => each * power).find((each) => each >= raw * 0.999);
  const found = [];
  for (let at = Math.ceil(low / step - 1e-9); at * step <= high + step * 1e-9; at++) found.push(at * step);
  return found;
}
const plain = (value) => Number(value.toPrecision(6)).toLocaleString("en-US", { maximumFractionDigits: 9 });

function frame(box, yTicks, y, yText) {
  return yTicks.map((value) => svg("g", {},
    svg("line", { class: value ? "grid" : "axis", x1: box.left, x2: box.right, y1: y(value), y2: y(value) }),
    svg("text", { x: box.left - 8, y: y(value) + 4, "text-anchor": "end" }, yText(value))));
}

// --- what was asked for ----------------------------------------------------------------------------------------------

function drawHead() {
  const p = all[chosen];
  put("title", p.model);
  put("about", `${count(p.parameters)} parameters. Predicted for ${p.setting.hardware}, not measured.`);
  put("setting", words(p.setting));
}

function drawSettings() {
  show("settings-section", all.length > 1);
  const fastest = Math.max(...all.filter(fits).map((p) => p.tokens_per_second));
  const rows = all.map((p, at) => {
    const best = all.length > 1 && fits(p) && p.tokens_per_second === fastest;
    const cells = [label(p.setting), time(p.step), whole(p.tokens_per_second), percent(p.mfu), time(p.exposed), bytes(p.memory.peak)];
    const row = el("tr", { class: "pick" + (at === chosen ? " chosen" : ""), tabindex: 0, "aria-selected": at === chosen },
      el("td", {}, cells[0], best ? el("span", { class: "badge best" }, "most tokens/s per GPU") : null),
      ...cells.slice(1).map((cell) => el("td", { class: "num" }, cell)), el("td", {}, verdict(p)));
    return onPick(row, () => choose(at));
  });
  put("settings", table(["setting", "step", "tokens/s per GPU", "MFU", "exposed", "peak memory", ""], rows, [1, 2, 3, 4, 5]));
}

function verdict(p) {
  if (p.memory.capacity == null) return el("span", {}, "capacity unknown");
  return fits(p) ? el("span", { class: "fits" }, "fits") : el("span", { class: "bursts" }, "does not fit");
}

function tile(name, value, unit, ...more) {
  return el("div", { class: "tile" }, el("div", { class: "name" }, name),
    el("div", { class: "value" }, value, unit ? el("small", {}, unit) : null), el("div", { class: "more" }, ...more));
}

function drawTiles() {
  const p = all[chosen], m = p.memory, split = (text) => [text.slice(0, text.lastIndexOf(" ")), text.slice(text.lastIndexOf(" ") + 1)];
  put("tiles",
    tile("one step", ...split(time(p.step)), `${time(p.exposed)} exposed (${percent(p.exposed / p.step)})`),
    tile("tokens/s per GPU", whole(p.tokens_per_second), "", `${count(p.tokens_per_second * p.setting.world_size)} tokens/s in all`),
    tile("MFU", ...split(percent(p.mfu)), `HFU ${percent(p.hfu)}, which counts recomputation`),
    tile("peak memory per GPU", ...split(bytes(m.peak)), verdict(p), m.capacity == null ? "" : ` in ${bytes(m.capacity)}`));
  show("warnings-section", p.warnings.length > 0);
  put("warnings", ...p.warnings.map((text) => el("li", {}, text)));
  bars("shares", "shares-key", [["forward", p.forward, "m0"], ["backward", p.backward, "m3"], ["optimizer update", p.update, "m2"],
    ["exposed communication", p.exposed, "m1"]], p.step, time);
}

function bars(id, keyId, parts, total, text) {
  const there = parts.filter(([, value]) => value > 0);
  put(id, ...there.map(([name, value, color]) => explained(
    el("div", { style: `width:${100 * value / total}%;background:var(--${color})` }), `${name}\n${text(value)}, ${percent(value / total)}`)));
  put(keyId, ...there.map(([name, value, color]) => el("span", {}, swatch(color), `${name} ${text(value)}`)));
}

// --- timeline and memory over the same seconds -----------------------------------------------------------------------

function waits(p) { // where nothing computes
  const busy = p.timeline.filter((span) => span.lane === "compute").sort((a, b) => a.start - b.start), found = [];
  let end = 0;
  for (const span of busy) {
    if (span.start > end + 1e-9 * extent(p)) found.push([end, span.start]);
    end = Math.max(end, span.end);
  }
  if (extent(p) > end * (1 + 1e-6)) found.push([end, extent(p)]);
  return found;
}

function drawTimeline() {
  const p = all[chosen], host = document.getElementById("timeline");
  const lanes = Object.keys(LANES).filter((lane) => lane === "compute" || p.timeline.some((span) => span.lane === lane));
  const width = Math.max(host.clientWidth, 320), row = 34, gap = 8, top = 4;
  const box = { left: 104, right: width - 12 }, lanesEnd = top + lanes.length * (row + gap), high = 150, base = lanesEnd + 40 + high;
  const x = (seconds) => box.left + (seconds - view[0]) / (view[1] - view[0]) * (box.right - box.left);
  const inside = (from, to) => to >= view[0] && from <= view[1];
  const clip = (seconds) => Math.min(Math.max(x(seconds), box.left), box.right);
  const nodes = [];
  for (const [from, to] of waits(p).filter(([from, to]) => inside(from, to)))
    nodes.push(svg("rect", { class: "band", x: clip(from), y: top - 4, width: Math.max(clip(to) - clip(from), 0.5), height: base - top + 4 }));
  lanes.forEach((lane, at) => {
    const y = top + at * (row + gap);
    nodes.push(svg("text", { class: "lane", x: box.left - 10, y: y + row / 2 + 4, "text-anchor": "end" }, LANES[lane]),
      svg("line", { class: "axis", x1: box.left, x2: box.right, y1: y + row + gap / 2, y2: y + row + gap / 2 }));
  });
  p.timeline.forEach((span, at) => {
    if (!inside(span.start, span.end)) return;
    const y = top + lanes.indexOf(span.lane) * (row + gap), left = clip(span.start), wide = Math.max(clip(span.end) - left, 1);
    nodes.push(svg("rect", { class: `${wide > 3 ? "span " : ""}${span.lane}${at === current ? " current" : ""}`, "data-at": at, x: left, y, width: wide, height: row, rx: wide > 4 ? 2 : 0 }));
    if (span.lane !== "compute" && span.exposed > 0)
      nodes.push(svg("rect", { class: "late", x: left, y: y + row - 5, width: wide * Math.min(1, span.exposed / (span.end - span.start)), height: 5, "pointer-events": "none" }));
    const room = Math.floor((wide - 8) / 6.2);
    if (room >= span.name.length) nodes.push(svg("text", { class: "inside", x: left + 5, y: y + 19 }, span.name));
  });
  nodes.push(...memoryCurve(p, box, x, clip, inside, lanesEnd + 40, base));
  const inSeconds = view[1] - view[0] >= 10, scale = inSeconds ? 1 : 1e3;
  for (const value of ticks(view[0] * scale, view[1] * scale, Math.max(3, width / 130)))
    nodes.push(svg("line", { class: "axis", x1: x(value / scale), x2: x(value / scale), y1: base, y2: base + 5 }),
      svg("text", { x: x(value / scale), y: base + 18, "text-anchor": "middle" }, plain(value)));
  nodes.push(svg("text", { x: box.right, y: base + 36, "text-anchor": "end" }, inSeconds ? "seconds since the step began" : "milliseconds since the step began"));
  const drawing = svg("svg", { height: base + 44, viewBox: `0 0 ${width} ${base + 44}`, "aria-hidden": "true" }, ...nodes);
  host.replaceChildren(drawing);
  drag(drawing, host, box, x);
  put("lanes-key", ...lanes.map((lane) => el("span", {}, swatch(lane), LANES[lane])),
    el("span", {}, swatch("wait"), "exposed: computation waits for this part of a transfer"),
    el("span", {}, el("span", { class: "swatch", style: "background:var(--wait-band)" }), "nothing computes"));
}

function memoryCurve(p, box, x, clip, inside, top, base) {
  const points = p.memory_over_time, capacity = p.memory.capacity, peak = p.memory.peak;
  if (!points.length) return [];
  const most = Math.max(peak, ...points.map(([, size]) => size)), showLimit = capacity != null && capacity < 4 * most;
  const unit = most >= 2 ** 30 ? 2 ** 30 : 2 ** 20, limit = (showLimit ? Math.max(most, capacity) : most) * 1.06;
  const y = (size) => base - size / limit * (base - top);
  const nodes = frame(box, ticks(0, limit / unit, 5), (value) => y(value * unit), plain);
  nodes.push(svg("text", { class: "lane", x: box.left - 10, y: top - 12, "text-anchor": "end" }, unit === 2 ** 30 ? "memory, GiB" : "memory, MiB"));
  let before = points[0][1], path = "";
  for (const [at, size] of points) {
    if (at > view[1]) break;
    if (at >= view[0]) path += path ? `H${clip(at)}V${y(size)}` : `M${box.left},${y(before)}H${clip(at)}V${y(size)}`;
    before = size;
  }
  path = (path || `M${box.left},${y(before)}`) + `H${clip(extent(p))}`;
  nodes.push(svg("path", { class: "area", d: `${path}V${base}H${box.left}Z` }), svg("path", { class: "curve", d: path }));
  if (showLimit) nodes.push(svg("line", { class: "limit", x1: box.left, x2: box.right, y1: y(capacity), y2: y(capacity) }),
    svg("text", { x: box.right, y: y(capacity) - 5, "text-anchor": "end" }, `capacity ${bytes(capacity)}`));
  const [at, size] = points.reduce((a, b) => (b[1] > a[1] ? b : a));
  if (inside(at, at)) {
    const late = x(at) > (box.left + box.right) / 2;
    nodes.push(svg("circle", { class: "late", cx: x(at), cy: y(size), r: 4 }),
      svg("text", { class: "mark", x: x(at) + (late ? -9 : 9), y: Math.max(y(size) - 7, top + 4), "text-anchor": late ? "end" : "start" }, `peak ${bytes(peak)} at ${time(at)}`));
  }
  return nodes;
}

function drag(drawing, host, box, x) {
  const seconds = (event) => view[0] + (event.clientX - drawing.getBoundingClientRect().left - box.left) / (box.right - box.left) * (view[1] - view[0]);
  let from = null, brush = null;
  drawing.addEventListener("pointerdown", (event) => { from = seconds(event); });
  drawing.addEventListener("pointermove", (event) => {
    const to = seconds(event);
    if (from != null && Math.abs(x(to) - x(from)) > 4) {
      brush ??= drawing.appendChild(svg("rect", { class: "brush", y: 0, height: drawing.clientHeight - 44 }));
      fill(brush, { x: Math.min(x(from), x(to)), width: Math.abs(x(to) - x(from)) }, []);
      return hideTip();
    }
    const at = event.target.dataset?.at;
    if (at != null) return showTip(detail(all[chosen].timeline[at]), event.clientX, event.clientY);
    if (to < 0 || to > extent(all[chosen])) return hideTip();
    const last = all[chosen].memory_over_time.filter(([when]) => when <= to).at(-1);
    showTip(`${time(to)}${last ? `\n${bytes(last[1])} in use` : ""}`, event.clientX, event.clientY);
  });
  drawing.addEventListener("pointerup", (event) => {
    const to = seconds(event), was = from;
    from = null;
    if (brush) zoomTo(Math.min(was, to), Math.max(was, to));
  });
  drawing.addEventListener("pointerleave", () => { from = null; brush?.remove(); brush = null; hideTip(); });
  drawing.addEventListener("dblclick", () => zoomTo(0, extent(all[chosen])));
}

function detail(span) {
  const lines = [span.name, `${LANES[span.lane]}: ${time(span.end - span.start)}, from ${time(span.start)} to ${time(span.end)}`];
  if (span.lane !== "compute") lines.push(span.exposed > 0 ? `${time(span.exposed)} exposed` : "hidden behind computation");
  return lines.join("\n");
}

function zoomTo(from, to) {
  const step = extent(all[chosen]), least = step / 5000;
  if (to - from < least) [from, to] = [(from + to - least) / 2, (from + to + least) / 2];
  view = [Math.max(0, from), Math.min(step, to)];
  drawTimeline();
}
function zoom(factor) {
  const span = all[chosen].timeline[current];
  const center = span && span.end >= view[0] && span.start <= view[1] ? (span.start + span.end) / 2 : (view[0] + view[1]) / 2;
  const half = (view[1] - view[0]) / factor / 2;
  zoomTo(center - half, center + half);
}

function moveTo(next) {
  const spans = all[chosen].timeline;
  if (next < 0) return;
  current = next;
  const span = spans[next];
  if (span.start < view[0] || span.end > view[1]) {
    const half = Math.max(view[1] - view[0], 1.2 * (span.end - span.start)) / 2, center = (span.start + span.end) / 2;
    view = [Math.max(0, center - half), Math.min(extent(all[chosen]), center + half)];
  }
  drawTimeline();
  const box = document.querySelector("#timeline .current").getBoundingClientRect();
  showTip(detail(span), box.left + box.width / 2, box.bottom - 12);
  put("spoken", detail(span));
}

function onKey(event) {
  const spans = all[chosen].timeline, span = spans[current];
  const order = (lane) => spans.map((each, at) => [each, at]).filter(([each]) => each.lane === lane).sort((a, b) => a[0].start - b[0].start).map(([, at]) => at);
  const keys = {
    ArrowRight: () => { const row = order(span ? span.lane : "compute"); moveTo(row[Math.min(row.indexOf(current) + 1, row.length - 1)] ?? -1); },
    ArrowLeft: () => { const row = order(span ? span.lane : "compute"); moveTo(row[Math.max(row.indexOf(current) - 1, 0)] ?? -1); },
    ArrowDown: () => changeLane(1), ArrowUp: () => changeLane(-1),
    "+": () => zoom(2), "=": () => zoom(2), "-": () => zoom(0.5), 0: () => zoomTo(0, extent(all[chosen])), Escape: hideTip,
  };
  const changeLane = (by) => {
    const lanes = Object.keys(LANES).filter((lane) => order(lane).length);
    const lane = lanes[Math.min(Math.max(lanes.indexOf(span ? span.lane : "compute") + by, 0), lanes.length - 1)];
    const middle = span ? (span.start + span.end) / 2 : 0;
    const near = (at) => Math.abs((spans[at].start + spans[at].end) / 2 - middle);
    moveTo(order(lane).reduce((best, at) => (best < 0 || near(at) < near(best) ? at : best), -1));
  };
  if (keys[event.key]) { event.preventDefault(); keys[event.key](); }
}

// --- memory by part, scaling, tables ---------------------------------------------------------------------------------

function drawMemory() {
  const m = all[chosen].memory, sum = PARTS.reduce((total, part) => total + m[part], 0);
  bars("parts", "parts-key", PARTS.map((part, at) => [part, m[part], "m" + at]), sum, bytes);
  put("peak-at", `At the moment of the peak: ${m.peak_at}.`);
}

const GROUP = ["batch", "sequence", "checkpointing", "strategy", "accumulation", "precision", "optimizer", "ranks_per_node", "hardware"];
function drawScaling() {
  const sizes = [...new Set(all.map((p) => p.setting.world_size))].sort((a, b) => a - b);
  show("scaling-section", sizes.length > 1);
  if (sizes.length < 2) return;
  const key = (p) => JSON.stringify(GROUP.map((name) => p.setting[name]));
  const names = [...new Set(all.map(key))], differing = GROUP.filter((name) => new Set(all.map((p) => JSON.stringify(p.setting[name]))).size > 1);
  const title = (p) => differing.map((name) => `${name.replaceAll("_", " ")} ${p.setting[name]}`).join(", ");
  const series = names.map((name) => all.filter((p) => key(p) === name).sort((a, b) => a.setting.world_size - b.setting.world_size));
  const capacity = all[chosen].memory.capacity;
  put("scaling", chart("tokens/s per GPU", sizes, series, title, (p) => p.tokens_per_second, whole, null),
    chart("step, ms", sizes, series, title, (p) => 1e3 * p.step, plain, null),
    chart("exposed communication, % of the step", sizes, series, title, (p) => 100 * p.exposed / p.step, plain, null),
    chart("peak memory per GPU, GiB", sizes, series, title, (p) => p.memory.peak / 2 ** 30, plain, capacity == null ? null : capacity / 2 ** 30));
  put("scaling-key", ...(series.length > 1 ? series.map((line, at) => el("span", {}, swatch("m" + (at % 8)), title(line[0]))) : []));
}

function chart(name, sizes, series, title, value, text, limit) {
  const width = Math.max(Math.min((document.getElementById("scaling").clientWidth - 22) / 2, 560), 320), height = 220;
  const box = { left: 60, right: width - 14, top: 14, bottom: height - 42 };
  const values = series.flat().map(value), most = Math.max(...values, limit != null && limit < 4 * Math.max(...values) ? limit : 0) * 1.08 || 1;
  const low = Math.log2(sizes[0]), wide = Math.log2(sizes.at(-1)) - low;
  const x = (size) => box.left + 10 + (Math.log2(size) - low) / wide * (box.right - box.left - 20);
  const y = (each) => box.bottom - each / most * (box.bottom - box.top);
  const nodes = frame(box, ticks(0, most, 5), y, plain);
  if (limit != null && limit <= most) nodes.push(svg("line", { class: "limit", x1: box.left, x2: box.right, y1: y(limit), y2: y(limit) }),
    svg("text", { x: box.right, y: y(limit) - 5, "text-anchor": "end" }, `capacity ${number(limit, 0)} GiB`));
  let free = -Infinity;
  for (const size of sizes) {
    nodes.push(svg("line", { class: "axis", x1: x(size), x2: x(size), y1: box.bottom, y2: box.bottom + 4 }));
    if (x(size) - free > 38) {
      nodes.push(svg("text", { x: x(size), y: box.bottom + 18, "text-anchor": "middle" }, whole(size)));
      free = x(size);
    }
  }
  nodes.push(svg("text", { x: box.right, y: box.bottom + 36, "text-anchor": "end" }, "GPUs (logarithmic)"));
  series.forEach((line, at) => {
    const color = `var(--m${at % 8})`;
    nodes.push(svg("polyline", { points: line.map((p) => `${x(p.setting.world_size)},${y(value(p))}`).join(" "), fill: "none", stroke: color, "stroke-width": 2 }));
    for (const p of line) {
      const told = [`${whole(p.setting.world_size)} GPUs${title(p) ? ", " + title(p) : ""}`, `${whole(p.tokens_per_second)} tokens/s per GPU, step ${time(p.step)}`,
        `${time(p.exposed)} exposed (${percent(p.exposed / p.step)})`, `peak ${bytes(p.memory.peak)}: ${verdict(p).textContent}`].join("\n");
      const shown = p === all[chosen], fitting = fits(p);
      const dot = svg("circle", { cx: x(p.setting.world_size), cy: y(value(p)), r: shown ? 6 : 4, fill: fitting ? color : "var(--card)", stroke: color, "stroke-width": 2, style: "cursor:pointer" });
      nodes.push(onPick(explained(dot, told), () => choose(all.indexOf(p))));
    }
  });
  return el("div", {}, el("h3", {}, name), svg("svg", { height, viewBox: `0 0 ${width} ${height}`, style: `width:${width}px;max-width:100%`, role: "group", "aria-label": name }, ...nodes));
}

function drawTables() {
  const p = all[chosen], level = (name) => ({ node: "within nodes", network: "between nodes" })[name] ?? name;
  const total = (rows, field) => rows.reduce((sum, row) => sum + row[field], 0);
  const row = (each) => [each.kind.replaceAll("_", " "), level(each.level), whole(each.count), bytes(each.bytes), time(each.seconds), time(each.exposed)];
  const heads = ["collective", "link", "number", "bytes", "time", "exposed"];
  show("collectives-section", p.collectives.length > 0);
  put("collectives", table(heads, [...p.collectives.map(row),
    ["all", "", whole(total(p.collectives, "count")), bytes(total(p.collectives, "bytes")), time(total(p.collectives, "seconds")), time(total(p.collectives, "exposed"))]], [2, 3, 4, 5]));
  const same = (each) => p.best && JSON.stringify(each) === JSON.stringify(p.best);
  const listed = p.best && !p.alternatives.some(same) ? [...p.alternatives, p.best] : p.alternatives;
  show("alternatives-section", listed.length > 0);
  const price = (each) => (each.step >= p.step ? "+" : "−") + ms(Math.abs(each.step - p.step));
  put("alternatives", table(["change", "step", "difference", "tokens/s per GPU", "peak memory", ""], listed.map((each) =>
    [el("span", {}, each.change, same(each) ? el("span", { class: "badge best" }, "best") : null), time(each.step), price(each), whole(each.tokens_per_second), bytes(each.peak),
      el("span", { class: each.fits ? "fits" : "bursts" }, each.fits ? "fits" : "does not fit")]), [1, 2, 3, 4]));
  const raised = (power) => [...String(power)].map((digit) => (digit === "-" ? "⁻" : "⁰¹²³⁴⁵⁶⁷⁸⁹"[digit])).join("");
  const scientific = (value) => value.toExponential(3).replace(/\.?0*e\+?(-?\d+)/, (_, power) => ` × 10${raised(power)}`);
  const quantity = (value) => (value && (Math.abs(value) >= 1e6 || Math.abs(value) < 1e-3) ? scientific(value) : plain(value));
  put("constants", table(["constant", "value", "unit", "origin", "source"], p.constants.map((each) =>
    [each.name, quantity(each.value), each.unit, el("span", { class: "badge " + each.origin.replace(" ", "-") }, each.origin), each.source]), [1]));
}

// --- all of it -------------------------------------------------------------------------------------------------------

function choose(at) {
  chosen = at;
  current = -1;
  view = [0, extent(all[at])];
  hideTip();
  draw();
}
function draw() {
  drawHead(); drawSettings(); drawTiles(); drawTimeline(); drawMemory(); drawScaling(); drawTables();
}

document.getElementById("timeline").addEventListener("keydown", onKey);
document.getElementById("timeline").addEventListener("blur", hideTip);
document.getElementById("zoom-in").addEventListener("click", () => zoom(2));
document.getElementById("zoom-out").addEventListener("click", () => zoom(0.5));
document.getElementById("zoom-all").addEventListener("click", () => zoomTo(0, extent(all[chosen])));
let shownWidth = innerWidth;
addEventListener("resize", () => { if (innerWidth !== shownWidth) { shownWidth = innerWidth; drawTimeline(); drawScaling(); } });
const fitting = all.filter(fits).reduce((best, p) => (!best || p.tokens_per_second > best.tokens_per_second ? p : best), null);
choose(Math.max(0, all.indexOf(fitting)));
