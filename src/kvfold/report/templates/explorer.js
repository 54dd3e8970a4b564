"use strict";
// Draws the clusters of one query and the keys of one cluster. All numbers come from the data; the boundary at another
// tau is the line at tau = 1, scaled, so that no formula stands here.
(() => {
  const data = JSON.parse(document.getElementById("kvfold-data").textContent);
  const byId = (id) => document.getElementById(id);
  const form = byId("form"), tau = byId("tau"), cluster = byId("cluster");
  const options = { displayModeBar: false, responsive: true };

  const themed = (value, style) => {
    if (Array.isArray(value)) return value.map((part) => themed(part, style));
    if (value && typeof value === "object") {
      return Object.fromEntries(Object.entries(value).map(([key, part]) => [key, themed(part, style)]));
    }
    const named = typeof value === "string" && /^var\((--[\w-]+)\)$/.exec(value);
    return named ? style.getPropertyValue(named[1]).trim() : value;
  };

  const short = (value) => (value !== 0 && Math.abs(value) < 0.001 ? value.toExponential(1) : value.toPrecision(3));
  const number = (value) => (Math.abs(value) < 0.005 ? "0.00" : value.toFixed(2).replace("-", "\u2212"));
  const percent = (share) => `${(100 * share).toFixed(1)}\u00a0%`;
  const keysOf = (at) => {
    const first = data.clusters[at].first;
    return `keys ${first.toLocaleString("en")} to ${(first + data.size - 1).toLocaleString("en")}`;
  };
  const threshold = () => data.taus[Number(tau.value)];
  const reads = (at) => data.forms[form.value].risk[at] > threshold();

  const react = (id, traces, layout) => {
    const style = getComputedStyle(document.documentElement);
    Plotly.react(byId(id), themed(traces, style), { ...themed(layout, style), template: themed(data.template, style) }, options);
  };

  const hover = (at) => {
    const view = data.forms[form.value];
    return `<b>Cluster ${at}</b><br>${keysOf(at)}<br>importance ${short(data.clusters[at].importance)}<br>` +
      `distortion ${short(view.distortion[at])}<br>R ${short(view.risk[at])}: ${reads(at) ? "read" : "represented"}`;
  };

  const marks = (name, places, marker) => ({
    type: "scatter",
    mode: "markers",
    name,
    x: places.map((at) => data.clusters[at].importance),
    y: places.map((at) => data.forms[form.value].distortion[at]),
    customdata: places,
    text: places.map(hover),
    hovertemplate: "%{text}<extra></extra>",
    marker,
  });

  const drawClusters = () => {
    const view = data.forms[form.value], limit = threshold(), at = Number(cluster.value);
    const all = data.clusters.map((_, place) => place);
    const ring = marks("shown below", [at], {
      symbol: "circle-open", size: 18, color: "var(--ink)", line: { width: 2 },
    });
    react("plot-clusters", [
      { type: "scatter", mode: "lines", name: "R = tau", hoverinfo: "skip", x: view.line.x.map((x) => x * limit),
        y: view.line.y, line: { color: "var(--dense)", width: 2, dash: "dash" } },
      marks("represented", all.filter((place) => !reads(place)), {
        symbol: "circle-open", size: 8, color: "var(--series-0)", line: { width: 2 },
      }),
      marks("read", all.filter(reads), { symbol: "diamond", size: 9, color: "var(--series-1)" }),
      { ...ring, hoverinfo: "skip", hovertemplate: undefined },
    ], {
      xaxis: { type: "log", range: data.range, title: { text: "Importance" }, exponentformat: "power", dtick: tickStep() },
      yaxis: { type: "log", range: view.range, title: { text: "Distortion" }, exponentformat: "power", ...(view.range[1] - view.range[0] < 1.5 ? { nticks: 5 } : { dtick: 1 }) },
    });
    const step = view.steps[Number(tau.value)];
    const many = `${step.expanded} of ${all.length} clusters are read`;
    byId("said").textContent = `${many}: ${percent(step.rows)} of the keys, which hold ${percent(step.mass)} of the ` +
      `attention. The output of this head is off by ${percent(step.error)} of its length.`;
    byId("tau-shown").textContent = limit.toPrecision(2);
    tau.setAttribute("aria-valuetext", `tau ${limit.toPrecision(2)}, ${many}`);
    byId("plot-clusters-name").textContent = `R = tau is the dashed line; tau is ${limit.toPrecision(2)} times the longest ` +
      `value, which is ${short(data.longest)} long.`;
    byId("plot-clusters").setAttribute("aria-label", `Distortion against importance of ${all.length} clusters, both ` +
      `logarithmic, distortion by ${view.name}. At tau ${limit.toPrecision(2)} ${many}. The numbers stand in the table.`);
  };

  // Whole decades, fewer of them where there is little room.
  const tickStep = () => {
    const decades = data.range[1] - data.range[0];
    return Math.max(1, Math.ceil(decades / Math.max(2, byId("plot-clusters").clientWidth / 70)));
  };

  const row = (cells) => {
    const line = document.createElement("tr");
    cells.forEach(([kind, text, code]) => {
      const cell = document.createElement(kind);
      if (kind === "th") cell.scope = "row";
      if (code) cell.append(Object.assign(document.createElement("code"), { textContent: text }));
      else cell.textContent = text;
      line.append(cell);
    });
    return line;
  };

  const drawKeys = () => {
    const at = Number(cluster.value), one = data.clusters[at], bound = data.forms[form.value].distortion[at];
    const places = one.logits.map((_, key) => one.first + key);
    const mean = one.representative, top = Math.max(...one.logits);
    const weights = one.logits.map((logit) => Math.exp(logit - top));
    const total = weights.reduce((sum, weight) => sum + weight, 0);
    const line = (low, high, extra) => ({ type: "rect", xref: "paper", x0: 0, x1: 1, y0: low, y1: high, layer: "below", ...extra });
    react("plot-keys", [
      { type: "scatter", mode: "lines", name: "mean key", x: [places[0] - 0.5, places[places.length - 1] + 0.5], y: [mean, mean],
        hoverinfo: "skip", line: { color: "var(--series-0)", width: 2, dash: "dash" } },
      { type: "scatter", mode: "markers", name: "keys", x: places, y: one.logits,
        text: one.logits.map((logit, key) => `key ${places[key]}<br>logit ${number(logit)}<br>${percent(one.share * weights[key] / total)} of the attention`),
        hovertemplate: "%{text}<extra></extra>", marker: { symbol: "diamond", size: 10, color: "var(--series-1)" } },
    ], {
      xaxis: { title: { text: "Position of the key" }, tickformat: "d", nticks: 8 },
      yaxis: { title: { text: "Logit" } },
      shapes: [line(mean - bound, mean + bound, { fillcolor: "var(--band)", line: { width: 0 } })],
    });
    const spread = Math.max(...one.logits.map((logit) => Math.abs(logit - mean)));
    const said = `Cluster ${at}, ${keysOf(at)}: ${reads(at) ? "read key by key" : "represented by its mean"} at this tau. ` +
      `Keys lie up to ${spread.toFixed(2)} from the mean's logit, the bound says ${bound.toFixed(2)}. It holds ` +
      `${percent(one.share)} of the attention; its mean alone would get ${percent(one.importance)}.`;
    byId("plot-keys-name").textContent = said;
    byId("plot-keys").setAttribute("aria-label", `Logits of the keys of a cluster. ${said}`);
    byId("keys-caption").textContent = `Keys of cluster ${at}; its mean key has the logit ${number(mean)}`;
    byId("keys-rows").replaceChildren(...one.logits.map((logit, key) => row([
      ["th", String(places[key])], ["td", data.pieces[places[key]].replace(/\n/g, "\u21b5"), true], ["td", number(logit)],
      ["td", (logit - mean >= 0.005 ? "+" : "") + number(logit - mean)], ["td", percent(one.share * weights[key] / total)],
    ])));
    byId("before").disabled = at === 0;
    byId("after").disabled = at === data.clusters.length - 1;
  };

  const draw = () => { drawClusters(); drawKeys(); };
  const show = (at) => { cluster.value = String(at); draw(); };

  tau.value = String(data.start);
  cluster.value = String(data.first);
  form.addEventListener("change", draw);
  tau.addEventListener("input", draw);
  cluster.addEventListener("change", draw);
  byId("before").addEventListener("click", () => show(Number(cluster.value) - 1));
  byId("after").addEventListener("click", () => show(Number(cluster.value) + 1));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
  draw();
  byId("plot-clusters").on("plotly_click", (event) => {
    const point = event.points.find((one) => one.customdata !== undefined);
    if (point) show(point.customdata);
  });
})();
