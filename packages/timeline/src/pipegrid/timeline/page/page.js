"use strict";
// What the reader does: pointer, keys, search; and what the page says beside the picture.

(async () => {
  const { NONE, WORK, BESIDE } = Data;
  const byId = (id) => document.getElementById(id);
  const canvas = byId("picture"), tip = byId("tip"), root = document.documentElement;
  const page = await Data.read(JSON.parse(byId("data").textContent));
  const { panels, words } = page;
  const state = {
    page, view: { from: 0, to: 1 }, top: 0, pitch: null, followed: NONE, drawn: 0, boxes: new Model.Boxes(), milliseconds: 0,
    paired: panels.length > 1 && new Set(panels.map((panel) => panel.unit)).size === 1, arrows: page.arrows,
    say: (text) => { byId("found").textContent = text; },
  };
  const SLOW = 24; // milliseconds of a frame
  let colours = {}, place = null, waiting = false, coarse = View.LEAST, resting = null;

  function readColours() {
    const style = getComputedStyle(root);
    for (const name of ["card", "ink", "soft", "bubble", "line", "memory"]) colours[name] = style.getPropertyValue(`--${name}`);
  }

  function draw(least) {
    const began = performance.now();
    state.least = least;
    place = View.draw(canvas, state, colours);
    state.milliseconds = performance.now() - began;
  }

  /** Draw at the next frame. While frames take long, boxes are coarser, and 200 ms after the last one they are fine again. */
  function redraw() {
    if (waiting) return;
    waiting = true;
    requestAnimationFrame(() => {
      waiting = false;
      draw(coarse);
      if (state.milliseconds > SLOW) coarse = Math.min(4 * View.LEAST, 2 * coarse);
      else if (state.milliseconds < SLOW / 4) coarse = Math.max(View.LEAST, coarse / 2);
      clearTimeout(resting);
      if (state.least > View.LEAST) resting = setTimeout(() => draw(View.LEAST), 200);
    });
  }

  /** The row, panel and span under a point of the canvas; span is -1 between spans. */
  function under(x, y) {
    if (!place || y < place.top || x < place.left || x > place.left + place.wide) return null;
    const one = place.rows.find((row) => y + state.top >= row.y && y + state.top < row.y + row.pitch);
    if (!one) return null;
    const { time, scale } = View.scales(place, state.view, one.panel);
    const track = one.strip && y + state.top >= one.y + one.height ? BESIDE : WORK;
    return { ...one, time: time(x), span: Model.hit(one.panel, one.panel.tracks[one.row][track], time(x), 3 / scale) };
  }

  function lines({ panel, row, time, span }) {
    const { unit, zero } = panel, text = (value, like) => Model.timeText(value, unit, like);
    const counters = panel.counters.filter((counter) => counter.row === row);
    if (span < 0) {
      return [panel.rows[row], panel.notes[row] ?? "", `at ${text(time - zero)}`,
        ...counters.map((counter) => `${counter.name}: ${Model.amount(Model.valueAt(counter, time))}`)];
    }
    const start = panel.start[span], end = panel.end[span], kind = panel.kinds[panel.kind[span]];
    const found = [Model.name(panel, span), [words.meaning[kind] ?? kind, panel.rows[row]].join(" · ")];
    found.push(`${text(start - zero)} to ${text(end - zero)}, ${text(end - start)}`);
    for (const counter of counters) {
      const [before, during] = [Model.valueAt(counter, start - 1e-12), Model.valueAt(counter, start)];
      const after = Model.valueAt(counter, end);
      found.push(`${counter.name}: ${[before, during, after].filter((one, at, all) => one !== all[at - 1]).map(Model.amount)
        .join(" → ")}`);
    }
    if (!Number.isNaN(panel.memory[span])) found.push(`left allocated: ${Model.bytesText(panel.memory[span])}`);
    for (const [flows, ends, word] of [[panel.flowsTo, panel.source, "from"], [panel.flowsFrom, panel.destination, "to"]]) {
      for (const flow of flows.at(span)) {
        const bytes = panel.bytes[flow], size = Number.isNaN(bytes) ? "" : `, ${Model.bytesText(bytes)}`;
        found.push(`${word} ${Model.name(panel, ends[flow])} of ${panel.rows[panel.row[ends[flow]]]}${size}`);
      }
    }
    for (const other of panels) {
      const twin = other === panel ? -1 : Model.counterpart(panel, span, other);
      if (twin < 0) continue;
      const length = other.end[twin] - other.start[twin], at = other.start[twin] - other.zero;
      found.push(`${other.title || "the other"}: from ${Model.timeText(at, other.unit)}, ${Model.timeText(length, other.unit)}`);
    }
    return found;
  }

  function showTip(x, y) {
    const found = under(x, y);
    tip.hidden = !found;
    if (!found) return;
    const [head, ...rest] = lines(found).filter(Boolean);
    const bold = document.createElement("b");
    bold.textContent = head;
    tip.replaceChildren(bold, ...rest.map((text) => {
      const line = document.createElement("div");
      line.textContent = text;
      return line;
    }));
    const { offsetWidth: width, offsetHeight: height } = tip, { clientWidth, clientHeight } = canvas;
    tip.style.left = `${x + 16 + width > clientWidth ? Math.max(0, x - width - 12) : x + 16}px`;
    tip.style.top = `${Math.max(0, Math.min(y + 14, clientHeight - height))}px`;
  }

  /** Follow a unit (a microbatch, where replicas act apart that of one replica) through all rows; NONE ends it. */
  function follow(unit) {
    state.followed = unit;
    state.say(unit === NONE ? "" : Model.unitText(panels, unit));
    redraw();
  }

  function find(text) {
    const found = Model.search(panels, text);
    if (!found) {
      follow(NONE);
      state.say(text.trim() ? "nothing of that name" : "");
      return;
    }
    follow(found.unit);
    if (found.span === undefined) return;
    const { panel, span } = found, length = Math.max(panel.end[span] - panel.start[span], panel.whole * 1e-6);
    const middle = ((panel.start[span] + panel.end[span]) / 2 - panel.zero) / panel.whole;
    const width = Math.min(1, Math.max(state.view.to - state.view.from, 0), (40 * length) / panel.whole);
    state.view = Model.within(middle - width / 2, middle + width / 2);
    state.say(Model.name(panel, span));
  }

  const units = Model.units(panels);
  const step = (by) => {
    const next = state.followed === NONE ? 0 : units.indexOf(state.followed) + by;
    follow(units[Math.min(units.length - 1, Math.max(0, next))] ?? NONE);
  };
  const share = (x) => state.view.from + ((x - place.left) / place.wide) * (state.view.to - state.view.from);
  const zoom = (factor, at = (state.view.from + state.view.to) / 2) => { state.view = Model.zoomed(state.view, at, factor); redraw(); };
  const move = (by) => { state.view = Model.moved(state.view, by * (state.view.to - state.view.from)); redraw(); };
  const taller = (factor) => { state.pitch = Math.min(80, Math.max(6, (state.pitch ?? place.pitch) * factor)); redraw(); };
  const fit = () => { state.view = { from: 0, to: 1 }; state.pitch = null; state.top = 0; redraw(); };

  canvas.addEventListener("wheel", (event) => {
    event.preventDefault();
    const steps = event.deltaMode === 1 ? 16 : 1, deltaY = event.deltaY * steps, deltaX = event.deltaX * steps;
    if (event.ctrlKey) taller(Math.exp(-deltaY / 400));
    else if (event.shiftKey || Math.abs(deltaX) > Math.abs(deltaY)) move((deltaX || deltaY) / place.wide);
    else zoom(Math.exp(deltaY / 350), share(event.offsetX));
    showTip(event.offsetX, event.offsetY);
  }, { passive: false });

  let held = null;
  canvas.addEventListener("pointerdown", (event) => {
    held = { x: event.offsetX, y: event.offsetY, view: state.view, top: state.top, dragged: false };
    canvas.setPointerCapture(event.pointerId);
  });
  canvas.addEventListener("pointermove", (event) => {
    if (!held) { showTip(event.offsetX, event.offsetY); return; }
    const [byX, byY] = [event.offsetX - held.x, event.offsetY - held.y];
    held.dragged ||= Math.abs(byX) + Math.abs(byY) > 4;
    if (!held.dragged) return;
    tip.hidden = true;
    state.view = Model.moved(held.view, (-byX / place.wide) * (held.view.to - held.view.from));
    state.top = held.top - byY;
    redraw();
  });
  canvas.addEventListener("pointerup", (event) => {
    if (held && !held.dragged) {
      const found = under(event.offsetX, event.offsetY);
      follow(found && found.span >= 0 ? found.panel.unitOf(found.span) : NONE);
      showTip(event.offsetX, event.offsetY);
    }
    held = null;
  });
  canvas.addEventListener("pointerleave", () => { tip.hidden = true; });

  const keys = {
    w: () => zoom(0.7), s: () => zoom(1 / 0.7), a: () => move(-0.15), d: () => move(0.15), ArrowLeft: () => move(-0.15),
    ArrowRight: () => move(0.15), ArrowUp: () => { state.top -= place.pitch; redraw(); },
    ArrowDown: () => { state.top += place.pitch; redraw(); }, "+": () => zoom(0.7), "-": () => zoom(1 / 0.7), 0: fit,
    "[": () => taller(1 / 1.2), "]": () => taller(1.2), ",": () => step(-1), ".": () => step(1), Escape: () => follow(NONE),
  };
  document.addEventListener("keydown", (event) => {
    if (event.target instanceof HTMLInputElement || event.ctrlKey || event.metaKey || !keys[event.key]) return;
    event.preventDefault();
    keys[event.key]();
  });

  byId("search").addEventListener("submit", (event) => { event.preventDefault(); find(byId("wanted").value); });
  for (const [id, act] of Object.entries({ before: () => step(-1), after: () => step(1), closer: () => zoom(0.7),
    wider: () => zoom(1 / 0.7), fit })) byId(id).addEventListener("click", act);
  for (const name of ["arrows", "paired"]) {
    byId(name).checked = state[name];
    byId(name).addEventListener("change", (event) => { state[name] = event.target.checked; state.say(""); redraw(); });
  }
  byId("pairing").hidden = panels.length < 2;

  const dark = matchMedia("(prefers-color-scheme: dark)");
  function theme(name) {
    root.dataset.theme = name;
    readColours();
    redraw();
  }
  dark.addEventListener("change", () => theme(dark.matches ? "dark" : "light"));
  byId("theme").addEventListener("click", () => theme(root.dataset.theme === "dark" ? "light" : "dark"));

  for (const [number, panel] of panels.entries()) {
    const line = document.createElement("li");
    line.textContent = [panels.length > 1 ? `${number + 1}  ${panel.title}` : "", panel.summary].filter(Boolean).join(": ");
    byId("figures").append(line);
  }
  const seen = new Set(panels.flatMap((panel) => panel.kinds)), entries = new Map();
  for (const kind of seen) entries.set(words.meaning[kind] ?? kind, words.colours[kind] ?? words.other);
  entries.set("bubble", "var(--bubble)");
  for (const name of new Set(panels.flatMap((panel) => panel.counters.slice(0, 1).map((counter) => counter.name)))) {
    entries.set(`${name}, at most ${Model.amount(Math.max(...panels.map((panel) => panel.peaks[name] ?? 0)))}`, "var(--memory)");
  }
  for (const [text, colour] of entries) {
    const line = document.createElement("li");
    line.textContent = text;
    line.style.setProperty("--colour", colour);
    byId("legend").append(line);
  }

  new ResizeObserver(redraw).observe(canvas);
  theme(dark.matches ? "dark" : "light");
  if (location.hash.length > 1) find(decodeURIComponent(location.hash.slice(1)));
  window.timeline = { state, find, follow, zoom, move, fit, theme, redraw, lines, under };
})();
