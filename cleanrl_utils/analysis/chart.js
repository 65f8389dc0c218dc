"use strict";
// Learning curves as SVG, for the report of rlops and for the documentation. No dependencies.
const NS = "http://www.w3.org/2000/svg", POINTS = 200;

function node(name, attributes = {}, text = "", space = NS) {
  const element = space ? document.createElementNS(space, name) : document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  element.textContent = text;
  return element;
}
const html = (name, attributes, text) => node(name, attributes, text, null);

function format(value) {
  const size = Math.abs(value);
  if (size >= 1e6) return +(value / 1e6).toPrecision(4) + "M";
  if (size >= 1e4) return +(value / 1e3).toPrecision(4) + "k";
  return String(+value.toPrecision(4));
}

// An exponential moving average without the bias towards its first value.
function smoothed(values, weight) {
  let sum = 0, norm = 0;
  return values.map(value => {
    sum = sum * weight + value;
    norm = norm * weight + 1;
    return sum / norm;
  });
}

function interpolate(xs, ys, grid) {
  let i = 0;
  return grid.map(x => {
    while (i < xs.length - 2 && xs[i + 1] < x) i++;
    if (xs.length === 1 || x <= xs[0]) return ys[0];
    if (x >= xs[xs.length - 1]) return ys[ys.length - 1];
    const span = xs[i + 1] - xs[i] || 1;
    return ys[i] + (ys[i + 1] - ys[i]) * (x - xs[i]) / span;
  });
}

// One line of a chart: mean and sample standard deviation of curves [steps, minutes, values].
function band(name, color, curves, axis, weight) {
  const from = Math.max(...curves.map(c => c[axis][0]));
  const to = Math.max(from, Math.min(...curves.map(c => c[axis][c[axis].length - 1])));
  const x = Array.from({ length: POINTS }, (_, i) => from + (to - from) * i / (POINTS - 1));
  const rows = curves.map(c => interpolate(c[axis], smoothed(c[2], weight), x));
  const mean = x.map((_, i) => rows.reduce((sum, row) => sum + row[i], 0) / rows.length);
  const std = x.map((_, i) => Math.sqrt(rows.reduce((sum, row) => sum + (row[i] - mean[i]) ** 2, 0) / Math.max(1, rows.length - 1)));
  return { name, color, x, mean, std, runs: curves.length };
}

function ticks(low, high) {
  const raw = (high - low) / 5, power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 2.5, 5, 10].find(m => m * power >= raw) * power, out = [];
  for (let t = Math.ceil(low / step); t * step <= high + 1e-9 * step; t++) out.push(t * step);
  return out;
}

// A box with a title and the lines that `band` made; `marks` are levels to compare with.
function drawChart(title, label, unit, shown, room, marks = []) {
  const box = html("div", { class: "chart" });
  box.append(html("h2", {}, title));
  const W = Math.max(260, Math.min(460, room - 22)), H = 260, L = 52, R = 10, T = 8, B = 34;
  const svg = node("svg", { viewBox: `0 0 ${W} ${H}`, role: "img", "aria-label": `${label} on ${title}` });
  box.append(svg);
  if (!shown.length) {
    svg.append(node("text", { x: W / 2, y: H / 2, "text-anchor": "middle" }, "nothing to show"));
    return box;
  }
  const all = f => shown.flatMap(line => line.mean.map((m, i) => f(m, line.std[i])));
  const levels = marks.map(mark => mark.value);
  let low = Math.min(...levels, ...all((m, s) => m - s)), high = Math.max(...levels, ...all((m, s) => m + s));
  if (high - low < 1e-12) { low -= Math.abs(low) * .1 + 1e-6; high += Math.abs(high) * .1 + 1e-6; }
  const left = Math.min(...shown.map(line => line.x[0])), right = Math.max(...shown.map(line => line.x[POINTS - 1]), left + 1e-9);
  const px = x => L + (x - left) / (right - left) * (W - L - R), py = y => H - B - (y - low) / (high - low) * (H - T - B);
  for (const t of ticks(low, high)) {
    svg.append(node("line", { x1: L, x2: W - R, y1: py(t), y2: py(t), class: "grid" }));
    svg.append(node("text", { x: L - 6, y: py(t) + 4, "text-anchor": "end" }, format(t)));
  }
  for (const t of ticks(left, right)) svg.append(node("text", { x: px(t), y: H - B + 16, "text-anchor": px(t) > W - R - 16 ? "end" : "middle" }, format(t)));
  svg.append(node("text", { x: W - R, y: H - 2, "text-anchor": "end" }, unit));
  for (const mark of marks) {
    const line = node("line", { x1: L, x2: W - R, y1: py(mark.value), y2: py(mark.value), class: "mark" });
    line.append(node("title", {}, `${mark.label}: ${format(mark.value)}`));
    svg.append(line);
  }
  for (const line of shown) {
    const at = (i, y) => `${px(line.x[i]).toFixed(1)},${py(y).toFixed(1)}`;
    const up = line.x.map((_, i) => at(i, line.mean[i] + line.std[i])), down = line.x.map((_, i) => at(i, line.mean[i] - line.std[i]));
    if (line.runs > 1) svg.append(node("path", { d: `M${up.join("L")}L${down.reverse().join("L")}Z`, fill: line.color, opacity: .15 }));
    svg.append(node("path", { d: "M" + line.x.map((_, i) => at(i, line.mean[i])).join("L"), fill: "none", stroke: line.color, "stroke-width": 1.8, class: "curve", "data-group": line.name }));
  }
  hover(box, svg, shown, unit, marks, x => left + (x * W - L) / (W - L - R) * (right - left), px, H - B);
  return box;
}

// The values of all curves at the place that the pointer or finger is at.
function hover(box, svg, shown, unit, marks, toX, px, bottom) {
  const tip = html("div", { class: "tip", hidden: "" }), cursor = node("line", { y1: 8, y2: bottom, class: "cursor", visibility: "hidden" });
  box.append(tip);
  svg.append(cursor);
  const away = () => { tip.hidden = true; cursor.setAttribute("visibility", "hidden"); };
  svg.addEventListener("pointerleave", away);
  svg.addEventListener("pointermove", event => {
    const frame = svg.getBoundingClientRect(), part = (event.clientX - frame.left) / frame.width, x = toX(part);
    const near = shown.filter(line => x >= line.x[0] && x <= line.x[POINTS - 1]);
    if (!near.length) return away();
    tip.replaceChildren(html("div", {}, `${format(x)} ${unit}`));
    for (const line of near) {
      const i = Math.round((x - line.x[0]) / (line.x[POINTS - 1] - line.x[0] || 1) * (POINTS - 1));
      const spread = line.runs > 1 ? ` ± ${format(line.std[i])}` : "";
      tip.append(html("div", { style: `color:${line.color}` }, `${line.name}: ${format(line.mean[i])}${spread}`));
    }
    for (const mark of marks) tip.append(html("div", {}, `${mark.label}: ${format(mark.value)}`));
    tip.hidden = false;
    tip.style.left = part < .5 ? `${part * 100 + 4}%` : "auto";
    tip.style.right = part < .5 ? "auto" : `${(1 - part) * 100 + 4}%`;
    for (const end of ["x1", "x2"]) cursor.setAttribute(end, px(x));
    cursor.setAttribute("visibility", "visible");
  });
}

// A button that can be on or off, in a legend's colour.
function toggle(label, tint, on, change) {
  const button = html("button", { type: "button", "aria-pressed": on });
  button.append(html("i", { style: `background:${tint}` }), label);
  button.addEventListener("click", change);
  return button;
}
const flip = (set, value) => set.delete(value) || set.add(value);
