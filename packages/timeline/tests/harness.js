// Runs the arithmetic of a page in node: reads a line of JSON, `{document, calls}`, and writes the results as one.
"use strict";
const [scripts] = process.argv.slice(2);
const { Data, Model } = new Function(`${require("fs").readFileSync(scripts, "utf8")}; return { Data, Model };`)();

const CALLS = {
  columns: (page) => page.panels.map((panel) => ({
    start: [...panel.start], end: [...panel.end], row: [...panel.row], stage: [...panel.stage], slice: [...panel.slice],
    home: [...panel.home], microbatch: [...panel.microbatch], kind: [...panel.kind].map((one) => panel.kinds[one]),
    label: [...panel.label].map((one) => panel.labels[one]), source: [...panel.source], destination: [...panel.destination],
  })),
  cull: (page, row, track, from, to, least) => {
    const boxes = Model.cull(page.panels[0], page.panels[0].tracks[row][track], from, to, least, new Model.Boxes());
    return Array.from({ length: boxes.length }, (_, at) =>
      [boxes.span[at], boxes.count[at], boxes.from[at], boxes.to[at], boxes.high[at] - boxes.low[at], boxes.colour[at]]);
  },
  order: (page, row, track, from, to, least) => {
    const panel = page.panels[0], boxes = Model.cull(panel, panel.tracks[row][track], from, to, least, new Model.Boxes());
    return [...Model.byColour(boxes, panel.palette.colours.length)].map((at) => boxes.colour[at]);
  },
  hit: (page, row, track, time, slack) => Model.hit(page.panels[0], page.panels[0].tracks[row][track], time, slack),
  curve: (page, counter, from, to, least) => Model.curve(page.panels[0].counters[counter], from, to, least),
  value: (page, counter, time) => Model.valueAt(page.panels[0].counters[counter], time),
  follow: (page, unit, panel = 0) =>
    [[...page.panels[panel].spansOf.at(unit)], [...page.panels[panel].flowsOf.at(unit)]],
  units: (page) => Model.units(page.panels).map((unit) => [unit, Model.unitText(page.panels, unit)]),
  flows: (page, span) => [[...page.panels[0].flowsTo.at(span)], [...page.panels[0].flowsFrom.at(span)]],
  search: (page, text) => {
    const found = Model.search(page.panels, text);
    return found && [found.panel ? page.panels.indexOf(found.panel) : null, found.span ?? null, found.unit];
  },
  names: (page) => page.panels[0].start.length ? [...page.panels[0].start.keys()].map((one) => Model.name(page.panels[0], one)) : [],
  colours: (page) => [...page.panels[0].palette.of].map((one) => page.panels[0].palette.colours[one]),
  twins: (page) => [...page.panels[0].start.keys()].map((one) => Model.counterpart(page.panels[0], one, page.panels[1])),
  arrange: (page, paired) => Model.arrange(page.panels, paired).map((one) => [one.number, one.row, one.heads]),
  zoomed: (page, view, at, factor) => Model.zoomed(view, at, factor),
  moved: (page, view, share) => Model.moved(view, share),
  ticks: (page, from, to, most) => Model.ticks(from, to, most),
  texts: (page, values, unit) => values.map((value) => [Model.amount(value), Model.timeText(value, unit)]),
  frames: (page, width) => [1, 0.3, 0.1, 0.01, 0.001].map((share) => { // the most boxes of a frame, per zoom
    const panel = page.panels[0], boxes = new Model.Boxes();
    let most = 0;
    for (let turn = 0; turn < 20; turn++) {
      const from = panel.zero + (panel.length * (1 - share) * turn) / 20, to = from + share * panel.length;
      boxes.length = 0;
      for (const row of panel.tracks) for (const track of row) Model.cull(panel, track, from, to, (3 * (to - from)) / width, boxes);
      most = Math.max(most, boxes.length);
    }
    return most;
  }),
};

require("readline").createInterface({ input: process.stdin }).on("line", async (line) => {
  const { document, calls } = JSON.parse(line);
  const page = await Data.read(document);
  console.log(JSON.stringify(calls.map(([name, ...given]) => CALLS[name](page, ...given))));
});
