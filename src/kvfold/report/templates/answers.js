"use strict";
// Shows single answers, and replays two of them. Text of models is only ever set as text.
(() => {
  const data = JSON.parse(document.getElementById("kvfold-data").textContent);
  const byId = (id) => document.getElementById(id);
  const cellName = (s) => `${s.task}, ${s.length.toLocaleString("en")} tokens, ${s.asked}`;

  const element = (name, text, attributes = {}) => {
    const made = document.createElement(name);
    if (text !== undefined) made.textContent = text;
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    return made;
  };
  const fill = (select, options) => select.replaceChildren(
    ...options.map(([value, text]) => element("option", text, { value })),
  );
  const seconds = (value) => {
    if (value === null) return "–";
    return value < 1 ? `${(1000 * value).toFixed(1)} ms` : `${value.toFixed(2)} s`;
  };

  // Two choices, of a cell and of a sample in it; `then` hears of every change.
  const chooser = (prefix, samples, then) => {
    const cell = byId(`${prefix}-cell`);
    const pick = byId(`${prefix}-pick`);
    const cells = [...new Set(samples.map(cellName))];
    const chosen = () => samples[Number(pick.value)];
    const refill = () => {
      const own = samples.map((s, i) => [i, s]).filter(([, s]) => cellName(s) === cells[Number(cell.value)]);
      fill(pick, own.map(([i, s]) => [String(i), s.depth === null ? `${s.index}` : `${s.index}, depth ${s.depth}`]));
      then(chosen());
    };
    fill(cell, cells.map((name, i) => [String(i), name]));
    cell.addEventListener("change", refill);
    pick.addEventListener("change", () => then(chosen()));
    refill();
    return chosen;
  };

  const show = (sample) => {
    const depth = sample.depth === null ? "" : `, answer at depth ${sample.depth}`;
    const facts = element("p", `Sample ${sample.uid}: ${sample.tokens.toLocaleString("en")} prompt tokens${depth}.`);
    const expected = element("p", "Expected: ");
    sample.answers.forEach((answer, i) => expected.append(i ? ", " : "", element("code", answer)));
    const timed = sample.results.some(([, , , , ttft]) => ttft !== null);
    const heads = ["Policy", "Score", "Output", "Bytes held", ...(timed ? ["First token", "Per token"] : [])];
    const table = element("table", undefined, { class: "plain" });
    table.append(element("caption", `Answers, ${sample.asked}`));
    const head = element("tr");
    head.append(...heads.map((name) => element("th", name, { scope: "col" })));
    const top = element("thead");
    top.append(head);
    const body = element("tbody");
    for (const [policy, text, score, bytes, ttft, tpot] of sample.results) {
      const row = element("tr");
      const name = element("th", undefined, { scope: "row", class: "policy" });
      data.policies[policy].split(/(?<=[(,])/).forEach((part) => name.append(part, element("wbr")));
      const output = element("td");
      output.append(element("pre", data.texts[text] || "(nothing)"));
      row.append(
        name,
        element("td", score, { class: "nowrap" }),
        output,
        element("td", bytes, { class: "nowrap" }),
        ...(timed ? [seconds(ttft), seconds(tpot)].map((t) => element("td", t, { class: "nowrap" })) : []),
      );
      body.append(row);
    }
    table.append(top, body);
    const box = element("div", undefined, {
      class: "scroll", role: "region", tabindex: "0", "aria-label": "Answers of every policy to this sample",
    });
    box.append(table);
    byId("sample-shown").replaceChildren(facts, expected, box);
  };
  chooser("sample", data.samples, show);

  const play = byId("replay-play");
  if (!play) return;
  const slider = byId("replay-at");
  const sides = ["left", "right"].map((side) => ({
    choice: byId(`replay-${side}`),
    name: byId(`replay-${side}-name`),
    times: byId(`replay-${side}-times`),
    text: byId(`replay-${side}-text`),
  }));
  const still = matchMedia("(prefers-reduced-motion: reduce)");
  let now = 0;
  let end = 1;
  let running = 0;
  let last = 0;

  // Each token's moment in seconds, and the characters that stand then; packed as steps from the token before, in
  // tenths of milliseconds. The last token completes the text.
  const unpack = (packed) => {
    let [moment, characters] = [0, 0];
    const steps = [];
    for (let i = 0; i < packed.length; i += 2) {
      moment += packed[i];
      characters += packed[i + 1];
      steps.push([moment / 1e4, characters]);
    }
    return steps;
  };
  const standing = (side) => {
    let [low, high] = [0, side.steps.length];
    while (low < high) {
      const middle = (low + high) >> 1;
      if (side.steps[middle][0] <= now + 1e-9) low = middle + 1;
      else high = middle;
    }
    if (low === side.steps.length) return side.letters.length;
    return low ? side.steps[low - 1][1] : 0;
  };
  const paint = () => {
    for (const side of sides) {
      const count = standing(side);
      if (count !== side.shown) side.text.textContent = side.letters.slice(0, count).join("");
      side.shown = count;
    }
    slider.value = String(Math.round((1000 * now) / end));
    slider.setAttribute("aria-valuetext", `${now.toFixed(2)} seconds of ${end.toFixed(2)}`);
    byId("replay-clock").textContent = `${now.toFixed(2)} s`;
  };
  const say = (text) => { byId("replay-status").textContent = text; };
  const stop = () => {
    cancelAnimationFrame(running);
    running = 0;
    play.textContent = "Play";
  };
  const step = (time) => {
    now = Math.min(end, now + ((time - last) / 1000) * Number(byId("replay-speed").value));
    last = time;
    paint();
    if (now >= end) {
      stop();
      say(sides.map((side) => `${side.name.textContent} is done after ${seconds(side.done)}`).join("; ") + ".");
    } else {
      running = requestAnimationFrame(step);
    }
  };
  const load = (sample) => {
    stop();
    now = 0;
    for (const side of sides) {
      const result = sample.results.find(([policy]) => data.policies[policy] === side.choice.value);
      const known = result !== undefined && result[6] !== null;
      side.letters = known ? Array.from(data.texts[result[1]]) : [];
      side.steps = known ? unpack(result[6]) : [];
      side.done = known ? side.steps[side.steps.length - 1][0] : 0;
      side.shown = -1;
      side.name.textContent = side.choice.value;
      side.times.textContent = known
        ? `First token after ${seconds(result[4])}, then ${seconds(result[5])} per token; score ${result[2]}, ${sample.asked}, ${result[3]} of the bytes.`
        : "This policy was not timed on this sample.";
    }
    end = Math.max(...sides.map((side) => side.done), 0.001);
    say(still.matches ? "Motion is reduced: Play shows the end; the slider shows any moment." : "");
    paint();
  };

  const timed = data.samples.filter((s) => s.results.some((result) => result[6] !== null));
  const quickest = timed[0].results.filter(([, , , , , tpot, steps]) => tpot !== null && steps !== null)
    .sort((a, b) => a[5] - b[5])[0];
  if (sides[1].choice.options.length > 1) sides[1].choice.selectedIndex = 1;
  if (quickest && data.policies[quickest[0]] !== sides[0].choice.value) sides[1].choice.value = data.policies[quickest[0]];
  const chosen = chooser("replay", timed, load);
  for (const side of sides) side.choice.addEventListener("change", () => load(chosen()));
  play.addEventListener("click", () => {
    if (running) return stop();
    if (now >= end) now = 0;
    if (still.matches) {
      now = end;
      return paint();
    }
    play.textContent = "Pause";
    say("");
    last = performance.now();
    running = requestAnimationFrame(step);
  });
  slider.addEventListener("input", () => {
    stop();
    now = (end * Number(slider.value)) / 1000;
    paint();
  });
})();
