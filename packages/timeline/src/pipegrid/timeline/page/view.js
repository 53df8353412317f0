"use strict";
// The page: draws the rows on the canvas, and does what pointer, keys and search say.

const View = (() => {
  const { WORK, BESIDE, NONE } = Data;
  const AXIS = 22, HEAD = 20, GAP = 3, PAD = 10, LEAST = 3; // pixels; LEAST: the narrowest box of its own
  const MOST_ARROWS = 4000;
  const FONT = 'system-ui, "Segoe UI", Roboto, "DejaVu Sans", sans-serif';

  /** Where everything is, for the canvas' size and the state: columns of names and notes, and the rows. */
  function layout(pen, state, width, height) {
    pen.font = `12px ${FONT}`;
    const wide = (texts) => texts.reduce((most, text) => Math.max(most, pen.measureText(text).width), 0);
    const { panels } = state.page, rows = Model.arrange(panels, state.paired);
    const stacked = !state.paired || panels.length < 2;
    const short = (name) => (width < 600 ? name.replace(/ \([^()]*\)$/, "") : name); // on a phone without its position
    const text = (one) => (stacked ? short(one.text) : `${one.number + 1}  ${short(one.text)}`);
    const left = Math.min(wide(rows.map(text)) + 2 * PAD, width * 0.34);
    const notes = wide(panels.flatMap((panel) => panel.notes));
    const right = notes && width > 900 ? notes + 2 * PAD : PAD;
    const units = [...new Set(panels.map((panel) => panel.unit))];
    const top = AXIS * units.length;
    const heads = rows.filter((one) => one.heads).length;
    const head = stacked && panels.length > 1 ? HEAD : stacked ? 0 : 2 * GAP;
    const room = (height - top - heads * head - PAD) / Math.max(1, rows.length);
    const pitch = state.pitch ?? Math.min(Math.max(room, 10), 46);
    let y = top;
    for (const one of rows) {
      if (one.heads) y += head;
      const tall = pitch >= 20;
      one.name = text(one);
      one.strip = tall && one.panel.tracks[one.row][BESIDE].spans.length ? Math.min(7, pitch / 5) : 0;
      one.memory = tall && one.panel.counters.length ? Math.min(14, pitch / 3) : 0;
      one.y = y;
      one.height = pitch - one.strip - one.memory - (pitch > 14 ? GAP : 1);
      one.pitch = pitch;
      y += pitch;
    }
    return { rows, left, right, top, head, stacked, units, pitch, width, height, bottom: y + PAD, wide: width - left - right };
  }

  /** The x of a time of a panel, and back. */
  const scales = (place, view, panel) => {
    const scale = place.wide / (view.to - view.from) / panel.whole;
    return {
      scale,
      x: (time) => place.left + (time - panel.zero - view.from * panel.whole) * scale,
      time: (x) => panel.zero + view.from * panel.whole + (x - place.left) / scale,
    };
  };

  function drawRow(pen, one, state, place, colours, boxes) {
    const { panel } = one, { x, time, scale } = scales(place, state.view, panel), top = one.y - state.top;
    const begins = Math.max(x(panel.zero), place.left), ends = Math.min(x(panel.zero + panel.length), place.left + place.wide);
    pen.fillStyle = colours.bubble;
    if (ends > begins) pen.fillRect(begins, top, ends - begins, one.height);
    for (const track of one.strip ? [WORK, BESIDE] : [WORK]) {
      boxes.length = 0;
      const from = time(place.left), to = time(place.left + place.wide);
      Model.cull(panel, panel.tracks[one.row][track], from, to, state.least / scale, boxes);
      state.drawn += boxes.length;
      const y = track === WORK ? top : top + one.height + 1, height = track === WORK ? one.height : one.strip - 1;
      drawBoxes(pen, panel, boxes, { x, scale, y, height, dim: state.followed !== NONE, texts: track === WORK });
    }
    if (one.memory) drawCurves(pen, one, state, place, colours);
  }

  function drawBoxes(pen, panel, boxes, { x, scale, y, height, dim, texts }) {
    const { colours, inks } = panel.palette, size = Math.min(12, height - 2);
    let brush = -1;
    pen.font = `600 ${size}px ${FONT}`;
    pen.globalAlpha = dim ? 0.22 : 1;
    for (const at of Model.byColour(boxes, colours.length)) {
      const one = boxes.colour[at], begins = x(boxes.from[at]), width = (boxes.to[at] - boxes.from[at]) * scale;
      if (one !== brush) { pen.fillStyle = colours[one]; brush = one; }
      const low = boxes.low[at] * height, tall = (boxes.high[at] - boxes.low[at]) * height;
      const alone = boxes.low[at] === 0 && boxes.high[at] === 1;
      pen.fillRect(begins, y + height - low - tall, Math.max(width - (alone && width > 5 ? 1 : 0), 0.5), tall);
      if (texts && !dim && width > 15 && Math.min(size, tall) >= 8 && boxes.count[at] === 1) {
        const middle = y + height - low - tall / 2;
        writeInside(pen, panel, boxes.span[at], { begins, width, middle, size: Math.min(size, tall), ink: inks[one] });
        brush = -1;
      }
    }
    pen.globalAlpha = 1;
  }

  function writeInside(pen, panel, span, { begins, width, middle, size, ink }) {
    const text = Model.inside(panel, span);
    if (!text || text.length * size * 0.6 > width - 3) return;
    pen.fillStyle = ink;
    pen.textAlign = "center";
    pen.textBaseline = "middle";
    pen.fillText(text, begins + width / 2, middle + 0.5);
  }

  /** The first counter of the panel as a step curve under its row, all rows to one scale. */
  function drawCurves(pen, one, state, place, colours) {
    const { panel } = one, { x, time, scale } = scales(place, state.view, panel);
    const called = panel.counters[0].name, base = one.y - state.top + one.pitch - GAP + 1;
    const from = time(place.left), to = time(place.left + place.wide);
    pen.fillStyle = colours.memory;
    for (const counter of panel.counters) {
      if (counter.row !== one.row || counter.name !== called || !panel.peaks[called]) continue;
      const points = Model.curve(counter, from, to, 1 / scale), tall = (one.memory - 2) / panel.peaks[called];
      const last = Math.min(x(panel.zero + panel.length), place.left + place.wide);
      pen.beginPath();
      pen.moveTo(Math.max(x(points[0] ?? from), place.left), base);
      for (let at = 0; at < points.length; at += 2) {
        const next = at + 2 < points.length ? x(points[at + 2]) : last, y = base - points[at + 1] * tall;
        pen.lineTo(Math.max(x(points[at]), place.left), y);
        pen.lineTo(Math.max(next, place.left), y);
      }
      pen.lineTo(Math.max(last, place.left), base);
      pen.fill();
    }
  }

  /** The middle of an end of a flow: where a span gives (`out`) or takes. */
  function anchor(panel, span, out, at, x, state) {
    const one = at.get(panel)[panel.row[span]];
    const beside = state.page.words.transfers.includes(panel.kinds[panel.kind[span]]);
    const y = one.y - state.top + (beside && one.strip ? one.height + one.strip / 2 : one.height / 2);
    return [x(beside === out ? panel.start[span] : panel.end[span]), y];
  }

  function drawArrows(pen, panel, flows, state, place, colour) {
    const at = state.rowsOf, { x } = scales(place, state.view, panel);
    pen.strokeStyle = pen.fillStyle = colour;
    pen.lineWidth = 1.2;
    pen.beginPath();
    const heads = [];
    for (const flow of flows) {
      const [fromX, fromY] = anchor(panel, panel.source[flow], true, at, x, state);
      const [toX, toY] = anchor(panel, panel.destination[flow], false, at, x, state);
      if (Math.max(fromX, toX) < place.left || Math.min(fromX, toX) > place.left + place.wide) continue;
      pen.moveTo(fromX, fromY);
      pen.lineTo(toX, toY);
      heads.push([toX, toY, Math.atan2(toY - fromY, toX - fromX)]);
    }
    pen.stroke();
    pen.beginPath();
    for (const [x0, y0, angle] of heads) {
      pen.moveTo(x0, y0);
      for (const turn of [2.7, -2.7]) pen.lineTo(x0 + 7 * Math.cos(angle + turn), y0 + 7 * Math.sin(angle + turn));
    }
    pen.fill();
  }

  /** The followed microbatch on every row, in full colour, and its tensors from row to row. */
  function drawFollowed(pen, state, place, colours) {
    for (const panel of state.page.panels) {
      const { x, scale } = scales(place, state.view, panel), { words } = state.page;
      for (const span of panel.spansOf.at(state.followed)) {
        const one = state.rowsOf.get(panel)[panel.row[span]];
        const beside = words.transfers.includes(panel.kinds[panel.kind[span]]);
        if (beside && !one.strip) continue;
        const colour = panel.palette.of[span], begins = x(panel.start[span]);
        const width = Math.max((panel.end[span] - panel.start[span]) * scale, 2);
        if (begins > place.left + place.wide || begins + width < place.left) continue;
        const y = one.y - state.top + (beside ? one.height + 1 : 0), height = beside ? one.strip - 1 : one.height;
        pen.fillStyle = panel.palette.colours[colour];
        pen.fillRect(begins, y, width, height);
        const size = Math.min(12, height - 2), ink = panel.palette.inks[colour];
        pen.font = `600 ${size}px ${FONT}`;
        if (!beside && size >= 8) writeInside(pen, panel, span, { begins, width, middle: y + height / 2, size, ink });
      }
      drawArrows(pen, panel, panel.flowsOf.at(state.followed), state, place, colours.ink);
    }
  }

  function drawAllArrows(pen, state, place, colours) {
    for (const panel of state.page.panels) {
      const { time } = scales(place, state.view, panel), from = time(place.left), to = time(place.left + place.wide);
      const seen = [];
      for (let flow = 0; flow < panel.source.length && seen.length <= MOST_ARROWS; flow++) {
        if (panel.end[panel.source[flow]] <= to && panel.start[panel.destination[flow]] >= from) seen.push(flow);
      }
      if (seen.length > MOST_ARROWS) state.say("too many arrows: zoom in");
      else drawArrows(pen, panel, seen, state, place, colours.soft);
    }
  }

  function drawAxes(pen, state, place, colours) {
    pen.fillStyle = colours.card;
    pen.fillRect(0, 0, place.width, place.top);
    pen.font = `12px ${FONT}`;
    pen.textBaseline = "middle";
    place.units.forEach((unit, line) => {
      const panel = state.page.panels.find((one) => one.unit === unit), { x } = scales(place, state.view, panel);
      const from = state.view.from * panel.whole, to = state.view.to * panel.whole;
      for (const tick of Model.ticks(from, to, Math.max(2, place.wide / 90))) {
        const at = x(tick + panel.zero);
        pen.fillStyle = colours.line;
        if (line === 0) pen.fillRect(at, place.top - 4, 1, place.height);
        pen.fillStyle = colours.soft;
        pen.textAlign = "center";
        pen.fillText(Model.timeText(tick, unit, to - from), at, AXIS * line + AXIS / 2);
      }
    });
  }

  function drawNames(pen, state, place, colours) {
    const named = Math.max(1, Math.ceil(11 / place.pitch)); // of rows that are lower than a letter, every second or third
    pen.fillStyle = colours.card;
    pen.fillRect(0, place.top, place.left - 2, place.height);
    pen.fillRect(place.left + place.wide + 1, place.top, place.right, place.height);
    pen.font = `${Math.min(12, Math.max(9, place.pitch))}px ${FONT}`;
    pen.textBaseline = "middle";
    place.rows.forEach((one, number) => {
      const y = one.y - state.top + one.height / 2;
      if (number % named || y < place.top || y > place.height) return;
      pen.fillStyle = colours.ink;
      pen.textAlign = "right";
      pen.fillText(one.name, place.left - PAD, y, place.left - PAD);
      pen.textAlign = "left";
      pen.fillStyle = colours.soft;
      if (place.right > PAD) pen.fillText(one.panel.notes[one.row] ?? "", place.left + place.wide + PAD, y);
    });
    if (!place.stacked || !place.head) return;
    pen.font = `600 12px ${FONT}`;
    pen.textAlign = "left";
    pen.fillStyle = colours.ink;
    for (const one of place.rows.filter((row) => row.heads && row.y - state.top > place.top)) {
      pen.fillText(one.panel.title, PAD, one.y - state.top - HEAD / 2);
    }
  }

  /** Draw everything; returns where it is, for the pointer. */
  function draw(canvas, state, colours) {
    const ratio = window.devicePixelRatio || 1, width = canvas.clientWidth, height = canvas.clientHeight;
    if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(height * ratio)) {
      canvas.width = Math.round(width * ratio);
      canvas.height = Math.round(height * ratio);
    }
    const pen = canvas.getContext("2d");
    pen.setTransform(ratio, 0, 0, ratio, 0, 0);
    const place = layout(pen, state, width, height);
    state.top = Math.min(Math.max(0, state.top), Math.max(0, place.bottom - height));
    state.drawn = 0;
    state.rowsOf = new Map(state.page.panels.map((panel) => [panel, []]));
    for (const one of place.rows) state.rowsOf.get(one.panel)[one.row] = one;
    pen.fillStyle = colours.card;
    pen.fillRect(0, 0, width, height);
    for (const one of place.rows) {
      const y = one.y - state.top;
      if (y + one.pitch >= place.top && y <= height) drawRow(pen, one, state, place, colours, state.boxes);
    }
    pen.save();
    pen.beginPath();
    pen.rect(place.left, place.top, place.wide, height);
    pen.clip();
    if (state.followed !== NONE) drawFollowed(pen, state, place, colours);
    else if (state.arrows) drawAllArrows(pen, state, place, colours);
    pen.restore();
    drawAxes(pen, state, place, colours);
    drawNames(pen, state, place, colours);
    return place;
  }

  return { LEAST, draw, scales };
})();
