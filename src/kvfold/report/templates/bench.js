"use strict";
// Draws the figures of a benchmark. All numbers come from the data; colours are looked up in the page's style, so that
// they follow the reader's colour scheme.
(() => {
  const data = JSON.parse(document.getElementById("kvfold-data").textContent);
  const byId = (id) => document.getElementById(id);
  const series = byId("series");
  if (!series) return;
  const boxes = [...document.querySelectorAll("#legend input")];

  const themed = (value, style) => {
    if (Array.isArray(value)) return value.map((part) => themed(part, style));
    if (value && typeof value === "object") {
      return Object.fromEntries(Object.entries(value).map(([key, part]) => [key, themed(part, style)]));
    }
    const named = typeof value === "string" && /^var\((--[\w-]+)\)$/.exec(value);
    return named ? style.getPropertyValue(named[1]).trim() : value;
  };

  const draw = () => {
    const style = getComputedStyle(document.documentElement);
    const hidden = new Set(boxes.filter((box) => !box.checked).map((box) => box.value));
    for (const panel of data.panels) {
      const plot = byId(`plot-${panel.key}`), figure = panel.figures[series.value];
      if (!figure) {
        Plotly.purge(plot);
        plot.setAttribute("aria-label", `${panel.axis}: nothing was measured for ${series.value}.`);
        continue;
      }
      const traces = themed(figure.data, style);
      for (const trace of traces) trace.visible = !hidden.has(trace.name);
      const layout = { ...themed(figure.layout, style), template: themed(data.template, style) };
      Plotly.react(plot, traces, layout, { displayModeBar: false, responsive: true });
      const names = traces.filter((trace) => trace.visible).map((trace) => trace.name).join(", ");
      plot.setAttribute("aria-label", `${panel.axis} over tokens of context, ${series.value}: ${names}`);
    }
  };

  for (const field of [series, ...boxes]) field.addEventListener("change", draw);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
  draw();
})();
