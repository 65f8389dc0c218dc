"use strict";
// Draws the curves of a page; chart.js has the pieces.
function show(place) {
  const data = JSON.parse(place.querySelector("script").textContent);
  const names = [...new Set(data.charts.flatMap(chart => chart.lines.map(line => line.name)))];
  const hidden = new Set(), controls = html("div", { class: "controls" }), charts = html("div", { class: "charts" });
  const select = (label, options) => {
    const box = html("label", {}, label + " "), list = html("select");
    options.forEach((text, value) => list.append(html("option", { value }, text)));
    list.addEventListener("input", draw);
    box.append(list);
    controls.append(box);
    return list;
  };
  const axis = select("over", ["steps", "minutes"]), view = select("show", ["mean ± std", "each seed"]);
  const smooth = html("input", { type: "range", min: 0, max: 0.98, step: 0.02, value: 0.4, "aria-label": "smoothing" });
  const label = html("label", {}, "smooth "), legend = html("div", { class: "legend" });
  smooth.addEventListener("input", draw);
  label.append(smooth);
  controls.append(label);
  place.append(...(data.controls ? [controls] : []), legend, charts);

  function lines(chart) {
    return chart.lines.filter(line => line.runs.length && !hidden.has(line.name)).flatMap(line => {
      const color = data.colors[names.indexOf(line.name)], weight = +smooth.value;
      if (view.value === "0") return [band(line.name, color, line.runs, +axis.value, weight)];
      return line.runs.map((run, i) => band(`${line.name}, run ${i + 1}`, color, [run], +axis.value, weight));
    });
  }
  function key(chart) {
    const box = html("div", { class: "key" });
    for (const line of chart.lines.filter(line => line.runs.length && !hidden.has(line.name))) {
      const item = html("span");
      item.append(html("i", { style: `background:${data.colors[names.indexOf(line.name)]}` }), line.name);
      box.append(item);
    }
    return box;
  }
  function draw() {
    const unit = axis.selectedOptions[0].text, room = place.clientWidth;
    const again = name => () => { flip(hidden, name); draw(); };
    if (names.length > 1) legend.replaceChildren(...names.map((name, i) => toggle(name, data.colors[i], !hidden.has(name), again(name))));
    charts.replaceChildren(...data.charts.map(chart => {
      const box = drawChart(chart.env, "episodic return", unit, lines(chart), room, chart.marks);
      if (names.length > 12) box.append(key(chart));  // too many names to find those of this chart in the legend
      return box;
    }));
  }
  draw();
}
for (const place of document.querySelectorAll(".curves")) show(place);
