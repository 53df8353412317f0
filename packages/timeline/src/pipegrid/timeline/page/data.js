"use strict";
// The data of a page: unpacked columns, and what is looked up in them. No document: it runs in node as well.

const Data = (() => {
  const NONE = -2147483648; // of a stage, a microbatch, a slice or a home
  const TYPES = { f64: Float64Array, i32: Int32Array, u32: Uint32Array };
  const WORK = 0, BESIDE = 1; // the two tracks of a row: computes, and transfers under them

  /** A column of numbers from its packed form: little-endian, zlib, base64. */
  async function column({ type, data }) {
    const bytes = Uint8Array.from(atob(data), (letter) => letter.charCodeAt(0));
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
    return new TYPES[type](await new Response(stream).arrayBuffer());
  }

  async function columns(packed) {
    const found = await Promise.all(Object.entries(packed).map(async ([name, one]) => [name, await column(one)]));
    return Object.fromEntries(found);
  }

  /** The document of a page, with everything that drawing looks up. */
  async function read(data) {
    const unpacked = [];
    for (const panel of data.panels) {
      const counters = [];
      for (const counter of panel.counters) counters.push({ ...counter, ...(await columns(counter.columns)) });
      unpacked.push({ ...panel, ...(await columns(panel.columns)), counters });
    }
    const homes = 1 + unpacked.filter((panel) => panel.replicas.length).reduce((most, { home, replicas }) =>
      Math.max(home.reduce((a, b) => Math.max(a, b), most), ...replicas), 0);
    const panels = unpacked.map((panel) => indexed({ ...panel, homes }, data.words));
    const lengths = {};
    for (const panel of panels) lengths[panel.unit] = Math.max(lengths[panel.unit] ?? 0, panel.length);
    for (const panel of panels) panel.whole = lengths[panel.unit] || 1; // what the width of the picture is at first
    return { ...data, panels };
  }

  function indexed(panel, words) {
    const { start, end } = panel;
    panel.zero = start.reduce((least, time) => Math.min(least, time), Infinity);
    if (!start.length) panel.zero = 0;
    panel.length = end.reduce((most, time) => Math.max(most, time), panel.zero) - panel.zero;
    panel.tracks = tracks(panel, words);
    Object.assign(panel, shares(panel));
    panel.palette = palette(panel, words);
    panel.unitOf = (span) => unit(panel, span);
    // Where the rows of a panel have no replicas, a unit of any replica is the microbatch of its number.
    const place = panel.replicas.length ? undefined : (one) => one - (one % panel.homes);
    panel.spansOf = grouped(start.length, panel.unitOf, place);
    panel.flowsOf = grouped(panel.source.length, (flow) => panel.unitOf(panel.source[flow]), place);
    panel.flowsFrom = grouped(panel.source.length, (flow) => panel.source[flow]);
    panel.flowsTo = grouped(panel.source.length, (flow) => panel.destination[flow]);
    panel.peaks = {};
    for (const counter of panel.counters) {
      const peak = counter.value.reduce((most, value) => Math.max(most, value), 0);
      panel.peaks[counter.name] = Math.max(panel.peaks[counter.name] ?? 0, peak);
    }
    return panel;
  }

  /** The number of a span's unit, a microbatch of one home replica: microbatch x homes + home; without a microbatch NONE. */
  function unit(panel, span) {
    if (panel.microbatch[span] === NONE) return NONE;
    const own = panel.replicas[panel.row[span]] ?? 0, home = panel.replicas.length ? panel.home[span] : NONE;
    return panel.microbatch[span] * panel.homes + (home === NONE ? own : home);
  }

  /** Items 0 to count - 1 by a key: `at(key)` are those with `place(key)`, in order. Keys below 0 have none. */
  function grouped(count, key, place = (one) => one) {
    const keys = Int32Array.from({ length: count }, (_, item) => key(item));
    const most = keys.reduce((largest, one) => Math.max(largest, one), -1);
    const first = new Uint32Array(most + 2);
    for (const one of keys) if (one >= 0) first[one + 1]++;
    for (let one = 0; one <= most; one++) first[one + 1] += first[one];
    const items = new Uint32Array(first[most + 1]);
    const next = first.slice();
    keys.forEach((one, item) => { if (one >= 0) items[next[one]++] = item; });
    const at = (one) => (one >= 0 && one <= most ? items.subarray(first[one], first[one + 1]) : items.subarray(0, 0));
    return { at: (one) => at(place(one)) };
  }

  /** Per row, two tracks of spans by their start; `reach` is the latest end of a track up to a span. */
  function tracks(panel, words) {
    const beside = panel.kinds.map((kind) => words.transfers.includes(kind));
    const lists = panel.rows.map(() => [[], []]);
    const { start, end } = panel;
    for (let span = 0; span < start.length; span++) {
      lists[panel.row[span]][beside[panel.kind[span]] ? BESIDE : WORK].push(span);
    }
    return lists.map((pair) => pair.map((list) => {
      const spans = Uint32Array.from(list).sort((a, b) => start[a] - start[b] || end[a] - end[b] || a - b);
      const reach = new Float64Array(spans.length);
      let latest = -Infinity;
      spans.forEach((span, place) => { reach[place] = latest = Math.max(latest, end[span]); });
      return { spans, reach };
    }));
  }

  /** The part of its row's height that each span takes: `low` to `high`, less than all where spans of work overlap, the first on top. */
  function shares({ start, end, tracks, length }) {
    const least = 1e-9 * length; // an end and the start after it may differ by rounding
    const low = new Float32Array(start.length), high = new Float32Array(start.length).fill(1);
    for (const row of tracks) {
      let group = [], ends = [];
      const close = () => {
        group.forEach(([span, lane]) => { low[span] = 1 - (lane + 1) / ends.length; high[span] = 1 - lane / ends.length; });
        group = []; ends = [];
      };
      for (const span of row[WORK].spans) {
        if (end[span] <= start[span]) continue;
        if (ends.every((one) => one <= start[span] + least)) close();
        const free = ends.findIndex((one) => one <= start[span] + least), lane = free < 0 ? ends.length : free;
        ends[lane] = end[span];
        group.push([span, lane]);
      }
      close();
    }
    return { low, high };
  }

  /** A colour for each kind and, from the second stage of a row on, with more white in it. */
  function palette(panel, words) {
    const stages = panel.rows.map(() => new Set());
    const { row, kind, stage, kinds } = panel;
    const isWork = kinds.map((one) => words.computes.includes(one));
    for (let span = 0; span < row.length; span++) {
      if (isWork[kind[span]] && stage[span] !== NONE) stages[row[span]].add(stage[span]);
    }
    const sorted = stages.map((held) => [...held].sort((a, b) => a - b));
    const most = sorted.reduce((count, held) => Math.max(count, held.length), 1);
    const colours = [];
    for (const one of kinds) {
      for (let shade = 0; shade < most; shade++) {
        const plain = words.hatched.includes(one) || most < 2;
        colours.push(tint(words.colours[one] ?? words.other, plain ? 0 : (0.6 * shade) / (most - 1)));
      }
    }
    const places = sorted.map((held) => new Map(held.map((one, place) => [one, place])));
    const of = new Uint16Array(row.length);
    for (let span = 0; span < row.length; span++) {
      of[span] = kind[span] * most + (places[row[span]].get(stage[span]) ?? 0);
    }
    return { colours, inks: colours.map(inkOn), of, most };
  }

  function channels(colour) {
    return [1, 3, 5].map((at) => parseInt(colour.slice(at, at + 2), 16));
  }

  function tint(colour, share) {
    const hex = (part) => Math.round(part + (255 - part) * share).toString(16).padStart(2, "0");
    return "#" + channels(colour).map(hex).join("");
  }

  /** Black or white, whichever has the greater contrast (WCAG). */
  function inkOn(colour) {
    const linear = channels(colour).map((part) => part / 255).map((part) =>
      part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4);
    const luminance = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2];
    return 1.05 / (luminance + 0.05) > (luminance + 0.05) / 0.05 ? "#ffffff" : "#111111";
  }

  return { NONE, WORK, BESIDE, inkOn, read, tint };
})();
