"use strict";
// The arithmetic of the picture: what is seen, hit and found. No document: it runs in node as well.

const Model = (() => {
  const { NONE } = Data;

  /** The first place of a sorted array with a value above (or, `equal`, at) `limit`. */
  function firstAbove(sorted, limit, equal = false, of = null) {
    let low = 0, high = sorted.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      const value = of ? of[sorted[middle]] : sorted[middle];
      if (value > limit || (equal && value === limit)) high = middle; else low = middle + 1;
    }
    return low;
  }

  /** A list of boxes that grows: span, times, colour, part of the row's height from `low` to `high`, how many spans it is. */
  class Boxes {
    constructor() {
      this.length = 0;
      this.resize(4096);
    }

    resize(size) {
      const grown = { span: Uint32Array, count: Uint32Array, colour: Uint16Array, from: Float64Array, to: Float64Array,
        low: Float32Array, high: Float32Array };
      for (const [name, Type] of Object.entries(grown)) {
        const before = this[name];
        this[name] = new Type(size);
        if (before) this[name].set(before);
      }
    }

    push(span, count, from, to, colour, low, high) {
      if (this.length === this.from.length) this.resize(2 * this.length);
      const at = this.length++;
      this.span[at] = span; this.count[at] = count; this.from[at] = from; this.to[at] = to;
      this.colour[at] = colour; this.low[at] = low; this.high[at] = high;
    }
  }

  /**
   * Append to `boxes` what is to be drawn of a track between two times. Spans of `least` time and more are boxes of
   * their own. Shorter ones that follow each other closely are a block, which ends once it has twice that width: in it
   * each colour has the height of its share of the time, the rest of the height is bubble.
   */
  function cull(panel, { spans, reach }, from, to, least, boxes) {
    const { start, end } = panel, colour = panel.palette.of;
    const tally = new Float64Array(panel.palette.colours.length);
    let touched = [], first = 0, count = 0, opens = 0, closes = 0;
    const flush = () => {
      if (!count) return;
      const whole = Math.max(closes - opens, touched.reduce((sum, one) => sum + tally[one], 0));
      let low = 0;
      for (const one of touched.sort((a, b) => a - b)) {
        const high = whole > 0 ? low + tally[one] / whole : 1;
        boxes.push(first, count, opens, closes, one, low, high);
        tally[one] = 0;
        low = high;
      }
      touched = []; count = 0;
    };
    for (let place = firstAbove(reach, from, true); place < spans.length; place++) {
      const span = spans[place], begins = start[span], ends = end[span], length = ends - begins;
      if (begins > to) break;
      if (ends < from) continue;
      if (length >= least) {
        flush();
        boxes.push(span, 1, begins, ends, colour[span], panel.low[span], panel.high[span]);
        continue;
      }
      if (count && (begins - closes >= least || closes - opens >= 2 * least)) flush();
      if (!count) { first = span; opens = begins; closes = ends; }
      if (!touched.includes(colour[span])) touched.push(colour[span]);
      tally[colour[span]] += length;
      closes = Math.max(closes, ends);
      count++;
    }
    flush();
    return boxes;
  }

  /** The order of boxes by colour, so that a brush is changed once for each. */
  function byColour(boxes, colours) {
    const next = new Uint32Array(colours + 1);
    for (let at = 0; at < boxes.length; at++) next[boxes.colour[at] + 1]++;
    for (let one = 0; one < colours; one++) next[one + 1] += next[one];
    const order = new Uint32Array(boxes.length);
    for (let at = 0; at < boxes.length; at++) order[next[boxes.colour[at]]++] = at;
    return order;
  }

  /** The span of a track at a time, or the nearest at most `slack` away; -1 for none. */
  function hit(panel, { spans, reach }, time, slack) {
    const { start, end } = panel;
    let best = -1, nearest = slack;
    for (let place = firstAbove(spans, time + slack, false, start) - 1; place >= 0; place--) {
      if (reach[place] < time - slack) break;
      const span = spans[place];
      const away = Math.max(start[span] - time, time - end[span], 0);
      if (away < nearest || (away === nearest && best < 0)) { best = span; nearest = away; }
      if (away === 0 && end[span] > start[span]) break;
    }
    return best;
  }

  /** Points of a counter between two times, at most two for each `least` of time: `[time, value, ...]`, peaks kept. */
  function curve(counter, from, to, least) {
    const { time, value } = counter, points = [];
    const first = Math.max(0, firstAbove(time, from) - 1);
    for (let at = first; at < time.length && time[at] <= to;) {
      let most = value[at], next = at + 1;
      while (next < time.length && time[next] <= to && time[next] < time[at] + least) most = Math.max(most, value[next++]);
      points.push(time[at], most);
      if (value[next - 1] !== most) points.push(time[next - 1], value[next - 1]);
      at = next;
    }
    return points;
  }

  /** The value of a counter at a time; 0 before its first point. */
  function valueAt(counter, time) {
    const after = firstAbove(counter.time, time);
    return after ? counter.value[after - 1] : 0;
  }

  function number(panel, span) {
    if (panel.microbatch[span] === NONE) return panel.slice[span] === NONE ? "" : `.${panel.slice[span]}`;
    const part = panel.slice[span] === NONE ? "" : `.${panel.slice[span]}`;
    return `${panel.microbatch[span]}${part}${panel.home[span] === NONE ? "" : `@${panel.home[span]}`}`;
  }

  /** What is written into the box of a span. */
  const inside = (panel, span) => panel.labels[panel.label[span]] || number(panel, span);

  /** The label of a span, or its action as plans write it. */
  function name(panel, span) {
    const stage = panel.stage[span] === NONE ? "" : panel.stage[span];
    return panel.labels[panel.label[span]] || `${stage}${panel.kinds[panel.kind[span]]}${number(panel, span)}`;
  }

  /** All units of the panels, replica after replica. */
  function units(panels) {
    const [{ homes }] = panels, found = new Set();
    for (const panel of panels) for (let span = 0; span < panel.start.length; span++) found.add(panel.unitOf(span));
    found.delete(NONE);
    return [...found].sort((a, b) => a % homes - b % homes || a - b);
  }

  /** A unit in words: `microbatch 3`, where replicas act apart `microbatch 3 of replica 1`. */
  function unitText([{ homes }], unit) {
    return `microbatch ${Math.floor(unit / homes)}${homes > 1 ? ` of replica ${unit % homes}` : ""}`;
  }

  /**
   * What a search finds: `{ unit }` for a number, `3` or `3@1` (of replica 1; without it, of the first that has one), else
   * `{ panel, span, unit }` by a name, where replicas act apart also with its home (`2F3@1`); null for nothing.
   */
  function search(panels, text) {
    const wanted = text.trim().toLowerCase(), [{ homes }] = panels;
    if (!wanted) return null;
    const digits = wanted.match(/^(?:m|mb|microbatch)?\s*(\d+)(?:@(\d+))?$/);
    if (digits) {
      const [microbatch, home] = digits.slice(1).map(Number);
      const wish = digits[2] === undefined ? Array.from({ length: homes }, (_, one) => one) : home < homes ? [home] : [];
      const unit = wish.map((one) => microbatch * homes + one).find((one) => panels.some((panel) => panel.spansOf.at(one).length));
      return unit === undefined ? null : { unit };
    }
    for (const whole of [true, false]) {
      for (const panel of panels) {
        for (let span = 0; span < panel.start.length; span++) {
          const called = name(panel, span).toLowerCase(), unit = panel.unitOf(span);
          const matches = whole ? called === wanted : called.includes(wanted);
          if (matches || (homes > 1 && `${called}@${unit % homes}` === wanted)) return { panel, span, unit };
        }
      }
    }
    return null;
  }

  /** The same action in another panel, or -1: the first with its stage, kind, unit and slice, on a row of that stage. */
  function counterpart(panel, span, other) {
    const kind = other.kinds.indexOf(panel.kinds[panel.kind[span]]);
    if (kind < 0 || panel.microbatch[span] === NONE) return -1;
    for (const one of other.spansOf.at(panel.unitOf(span))) {
      if (other.kind[one] === kind && other.stage[one] === panel.stage[span] && other.slice[one] === panel.slice[span]) {
        return one;
      }
    }
    return -1;
  }

  /** The rows of all panels from top to bottom; with `paired`, rows that hold the same stages lie side by side. */
  function arrange(panels, paired) {
    const all = panels.flatMap((panel, number) => panel.rows.map((text, row) => ({ panel, number, row, text })));
    if (!paired || panels.length < 2) return all.map((one) => ({ ...one, heads: one.row === 0 }));
    const groups = new Map();
    for (const one of all) {
      const held = one.text.replace(/ \([^()]*\)$/, "");
      if (!groups.has(held)) groups.set(held, []);
      groups.get(held).push(one);
    }
    return [...groups.values()].flatMap((rows) => rows.map((one, place) => ({ ...one, heads: place === 0 })));
  }

  /** A view: the part of the whole width that is seen, as shares `from` and `to`; always inside of it, and not empty. */
  function within(from, to) {
    const width = Math.min(Math.max(to - from, 1e-7), 1.04);
    const begins = Math.min(Math.max(from, -0.02), 1.02 - width);
    return { from: begins, to: begins + width };
  }

  /** `view` wider by `factor`, with the share `at` where it was. */
  const zoomed = (view, at, factor) => within(at - (at - view.from) * factor, at + (view.to - at) * factor);

  const moved = (view, share) => within(view.from + share, view.to + share);

  /** Round numbers between two, 1, 2 or 5 times a power of ten apart, at most `most` of them. */
  function ticks(from, to, most) {
    const length = to - from;
    if (!(length > 1e-12 * Math.max(Math.abs(from), Math.abs(to)))) return [from]; // closer than numbers are told apart
    const power = 10 ** Math.floor(Math.log10(length / most));
    const step = [1, 2, 5, 10].map((factor) => factor * power).find((one) => length / one <= most);
    const found = [];
    for (let index = Math.ceil(from / step - 1e-9); index * step <= to + step * 1e-9; index++) found.push(index * step);
    return found;
  }

  /** A number with up to four significant digits; of nine digits and more as `34.63e9`. */
  function amount(value) {
    const size = Math.abs(value);
    if (size >= 1e8 && size < Infinity) {
      const power = 3 * Math.floor(Math.log10(size) / 3 + 1e-12);
      return `${Number((value / 10 ** power).toPrecision(4))}e${power}`;
    }
    return size >= 1e4 ? value.toFixed(0) : String(Number(value.toPrecision(4)));
  }

  /** A time with its unit; seconds in the multiple that suits `like`. */
  function timeText(value, unit, like = value) {
    if (value === 0) return "0";
    if (unit !== "s") return `${amount(value)} ${unit}`.trimEnd();
    const [factor, called] = [[1, "s"], [1e-3, "ms"]].find(([least]) => Math.abs(like) >= least) ?? [1e-6, "µs"];
    return `${amount(value / factor)} ${called}`;
  }

  /** A number of bytes in the decimal multiple that suits it. */
  function bytesText(value) {
    const [factor, called] = [[1e12, "TB"], [1e9, "GB"], [1e6, "MB"], [1e3, "kB"]].find(([least]) =>
      Math.abs(value) >= least) ?? [1, "B"];
    return `${amount(value / factor)} ${called}`;
  }

  return { Boxes, amount, arrange, byColour, bytesText, counterpart, cull, curve, hit, inside, moved, name, search, ticks,
    timeText, unitText, units, valueAt, within, zoomed };
})();
