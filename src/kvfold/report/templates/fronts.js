"use strict";
// Draws the fronts. All numbers come from the data; colours are looked up in the page's style, so that they follow the
// reader's colour scheme.
(() => {
  const data = JSON.parse(document.getElementById("kvfold-data").textContent);
  const byId = (id) => document.getElementById(id);
  const choices = ["view-task", "view-length", "view-asked"].map(byId);
  const hidden = new Set();

  const themed = (value, style) => {
    if (Array.isArray(value)) return value.map((part) => themed(part, style));
    if (value && typeof value === "object") {
      return Object.fromEntries(Object.entries(value).map(([key, part]) => [key, themed(part, style)]));
    }
    const named = typeof value === "string" && /^var\((--[\w-]+)\)$/.exec(value);
    return named ? style.getPropertyValue(named[1]).trim() : value;
  };

  const view = () => data.views[choices.map((choice) => choice.value).join("|")];

  const draw = (cost) => {
    const plot = byId(`plot-${cost}`);
    if (!plot) return;
    const shown = view();
    const figure = shown && shown[cost];
    const link = byId(`plot-${cost}-table`);
    link.hidden = !shown;
    if (!figure) {
      Plotly.purge(plot);
      plot.hidden = true;
      byId(`plot-${cost}-name`).textContent = shown
        ? `${shown.name}: nothing to draw here.`
        : "Nothing was asked in this combination; choose another task, length or question.";
      if (shown) link.href = `#${shown.table}`;
      return;
    }
    plot.hidden = false;
    const style = getComputedStyle(document.documentElement);
    const traces = themed(figure.data, style);
    for (const trace of traces) trace.visible = !hidden.has(trace.name);
    const layout = { ...themed(figure.layout, style), template: themed(data.template, style) };
    Plotly.react(plot, traces, layout, { displayModeBar: false, responsive: true });
    const against = { bytes: "bytes held", read: "bytes read per token", time: "time per token" }[cost];
    const told = shown[`words_${cost}`] || shown.words;
    plot.setAttribute("aria-label", `${figure.layout.yaxis.title.text} against ${against}. ${shown.name}. ${told}`);
    byId(`plot-${cost}-name`).textContent = `${shown.name}.`;
    link.textContent = "The numbers as a table";
    link.href = `#${shown.table}`;
  };

  const drawAll = () => ["bytes", "read", "time"].forEach(draw);

  const shapes = {
    circle: "M9 7a5 5 0 1 0 10 0a5 5 0 1 0-10 0z",
    square: "M9.5 2.5h9v9h-9z",
    diamond: "M14 1l6 6-6 6-6-6z",
    "triangle-up": "M14 1.5l6 10.5H8z",
    cross: "M12 1.5h4v3.5h3.5v4H16v3.5h-4V9H8.5V5H12z",
    x: "M9.6 4.6l2-2L14 5l2.4-2.4 2 2L16 7l2.4 2.4-2 2L14 9l-2.4 2.4-2-2L12 7z",
    "triangle-down": "M14 12.5L8 2h12z",
    star: "M14 .5l1.8 4.4 4.7.3-3.6 3 1.2 4.6-4.1-2.6-4.1 2.6 1.2-4.6-3.6-3 4.7-.3z",
    hexagon: "M11 1.8h6L20 7l-3 5.200h-6L8 7z",
  };
  const dashes = { solid: "none", dash: "5 3", dot: "2 2", dashdot: "5 2 2 2", longdash: "9 3" };

  const swatch = (line) => {
    const space = "http://www.w3.org/2000/svg";
    const svg = document.createElementNS(space, "svg");
    for (const [key, value] of Object.entries({ width: 28, height: 14, "aria-hidden": "true" })) svg.setAttribute(key, value);
    const stroke = document.createElementNS(space, "path");
    stroke.setAttribute("d", "M0 7h28");
    stroke.style.cssText = `stroke:${line.colour};stroke-width:2;stroke-dasharray:${dashes[line.dash]};fill:none`;
    const mark = document.createElementNS(space, "path");
    mark.setAttribute("d", shapes[line.symbol]);
    mark.style.fill = line.colour;
    svg.append(stroke, mark);
    return svg;
  };

  for (const line of data.lines) {
    const label = document.createElement("label");
    const box = document.createElement("input");
    box.type = "checkbox";
    box.checked = true;
    box.addEventListener("change", () => {
      hidden[box.checked ? "delete" : "add"](line.name);
      drawAll();
    });
    label.append(box, swatch(line), line.name);
    byId("legend").append(label);
  }

  // A link to a row inside a fold opens the fold.
  const unfold = () => {
    const target = location.hash && byId(decodeURIComponent(location.hash.slice(1)));
    const fold = target && target.closest("details");
    if (fold && !fold.open) {
      fold.open = true;
      target.scrollIntoView();
    }
  };

  for (const choice of choices) choice.addEventListener("change", drawAll);
  window.addEventListener("hashchange", unfold);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAll);
  drawAll();
  unfold();

  const group = byId("depth-group");
  if (group) {
    const show = () => document.querySelectorAll("[data-group]").forEach((part) => {
      part.hidden = part.dataset.group !== group.value;
    });
    group.addEventListener("change", show);
    show();
  }
})();
