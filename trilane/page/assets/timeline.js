// One decode step under two policies, one above the other: lanes, and the experts that the GPU holds, as time goes on.

const LANE_ORDER = ["host", "gpu", "cpu", "h2d", "d2h"], LANE_HEIGHT = 26;

function timelineView(query, main) {
  const chosen = (query.policies || "on-demand,mixtral-offloading").split(",");
  const state = { at: 0, end: 0, playing: false, steps: [], zoom: 1 };
  const about = h("div", {}), rows = h("div", {}), status = h("p", { class: "soft" }, "simulating ...");
  const clock = h("strong", { class: "clock" }, "0.00 ms");
  const time = h("input", { type: "range", min: 0, max: 1000, value: 0, "aria-label": "time in the step", oninput: () => move(state.end * Number(time.value) / 1000) });
  const play = h("button", { type: "button", class: "main", onclick: () => { state.playing ? stop() : start(); } }, "Play");
  const controls = h("div", { class: "row", role: "group", "aria-label": "Time" }, play,
    h("button", { type: "button", onclick: () => stepTo(-1) }, "Previous event"), h("button", { type: "button", onclick: () => stepTo(1) }, "Next event"),
    choice("zoom", "width", [["1", "whole step"], ["4", "4 times"], ["12", "12 times"]], "1"), clock);
  controls.querySelector("select").addEventListener("change", (event) => { state.zoom = Number(event.target.value); draw(); });
  put(main, h("h1", { tabindex: "-1" }, "One token, lane by lane"),
    h("p", {}, "The same token with the same routing under two policies. Point at a block, or go to a lane with Tab and along it with the arrow keys: it says what the lane does, and for what the GPU waits."),
    settingForm(query, (asked) => address.go("timeline", { ...without(asked, "first", "second"), policies: `${asked.first},${asked.second}` }), "Scenario",
      [field("first", "policy above", chosen[0], { list: "names-policy" }), field("second", "policy below", chosen[1], { list: "names-policy" })]),
    about, status, controls, time, rows, legend([...WORDS.families.map((family) => [family.colour, family.label]), ["var(--idle)", "GPU idle"]]),
    h("p", {}, h("button", { type: "button", onclick: () => savePerfetto(query, status) }, "Save for ui.perfetto.dev")));

  function move(at) {
    state.at = Math.min(Math.max(at, 0), state.end);
    clock.textContent = `${state.at.toFixed(2)} ms`;
    time.value = Math.round((1000 * state.at) / (state.end || 1));
    time.setAttribute("aria-valuetext", clock.textContent);
    state.steps.forEach((step) => step.show(state.at));
  }
  function stop() { state.playing = false; play.textContent = "Play"; }
  function start() {
    if (state.at >= state.end) move(0);
    state.playing = true;
    play.textContent = "Pause";
    let before = performance.now();
    const frame = (now) => {
      if (!state.playing || !main.isConnected) return;
      move(state.at + ((now - before) * state.end) / 15000);  // the whole step in 15 s
      before = now;
      if (state.at >= state.end) stop(); else requestAnimationFrame(frame);
    };
    requestAnimationFrame(frame);
  }
  function stepTo(direction) {
    stop();
    const events = [...new Set(state.steps.flatMap((step) => step.record.spans.map((span) => span[2])))].sort((one, other) => one - other);
    const next = direction > 0 ? events.find((at) => at > state.at + 1e-9) : events.findLast((at) => at < state.at - 1e-9);
    move(next === undefined ? (direction > 0 ? state.end : 0) : next);
  }
  function draw() {
    put(rows, state.steps.map((step) => step.element(state)));
    move(state.at);
  }

  source.asker()("timeline", query, (record) => {
    if (record.kind === "timeline") {
      put(about, h("p", {}, record.scenario));
      if (!document.getElementById("names-policy")) document.body.append(h("datalist", { id: "names-policy" }, record.known.map((name) => h("option", { value: name }))));
    } else if (record.kind === "step") {
      state.end = Math.max(state.end, record.ms);
      state.steps.push(stepDrawing(record));
      draw();
    } else put(about, record.kind === "cannot" ? refusal({ text: `${record.policy}: ${record.reason}` }) : refusal(record));
  }, () => {
    if (!state.steps.length) { status.textContent = ""; return; }
    status.textContent = `decode step ${state.steps[0].record.step}: ${state.steps.map((step) => `${step.record.marked} ${step.record.time}`).join(", ")}`;
    say(status.textContent);
  });
}

function stepDrawing(record) {
  const grid = memoryGrid(record), now = h("p", { class: "now small" });
  let cursor = null, scale = null;
  return {
    record,
    element(state) {
      const holder = h("div", { class: "scroll lanes", tabindex: "0", role: "region", "aria-label": `${record.marked}, lanes` });
      new ResizeObserver(() => {
        const width = Math.round(holder.clientWidth * state.zoom);
        if (!width || Number(holder.dataset.width) === width) return;
        holder.dataset.width = width;
        scale = scaleOf(0, state.end, 112, width - 8);
        const drawn = lanesDrawing(record, scale, width);
        cursor = drawn.cursor;
        put(holder, drawn.element);
        this.show(state.at);
      }).observe(holder);
      return h("section", { class: "step" }, h("h2", {}, `${record.marked}: ${record.time}`), h("p", { class: "soft small" }, record.said), holder, now,
        h("details", { open: true }, h("summary", {}, `experts on the GPU: ${record.layers} layers, ${record.experts} experts each`), grid.element));
    },
    show(at) {
      if (cursor) { const x = scale(Math.min(at, record.ms)); cursor.setAttribute("x1", x); cursor.setAttribute("x2", x); }
      const at_work = record.spans.filter((span) => span[2] <= at && at < span[3]), wait = record.waits.find((one) => one[0] <= at && at < one[1]);
      now.textContent = [...(wait ? [wait[3]] : []), ...at_work.filter((span) => span[0] !== "host").map((span) => span[5])].join(" | ") || (at >= record.ms ? "the token is done" : " ");
      grid.show(at, at_work);
    },
  };
}

function lanesDrawing(record, scale, width) {
  const height = LANE_ORDER.length * LANE_HEIGHT + 24, left = scale(0);
  const idle = record.waits.map(([start, end, lane, text]) => withTip(svg("rect", {
    x: scale(start), width: Math.max(scale(end) - scale(start), 0.5), y: LANE_HEIGHT + 3, height: LANE_HEIGHT - 6, fill: "var(--idle)", role: "img", "aria-label": text, "data-start": start,
  }), text));
  const blocks = record.spans.map(([lane, kind, start, end, expert, text]) => withTip(svg("rect", {
    x: scale(start), width: Math.max(scale(end) - scale(start), 0.7), y: LANE_ORDER.indexOf(lane) * LANE_HEIGHT + 3, height: LANE_HEIGHT - 6,
    fill: colourOf(kind), role: "img", "aria-label": text, "data-start": start,
  }), text));
  const numbers = record.spans.filter(([lane, kind, start, end, expert]) => expert >= 0 && ["gpu", "cpu", "h2d"].includes(lane) && scale(end) - scale(start) > 18).map(([lane, kind, start, end, expert]) =>
    svg("text", { class: "on-block", x: (scale(start) + scale(end)) / 2, y: LANE_ORDER.indexOf(lane) * LANE_HEIGHT + 17, "text-anchor": "middle", "aria-hidden": "true" }, String(expert)));
  LANE_ORDER.forEach((lane, place) => {
    const own = [...blocks.filter((_, number) => record.spans[number][0] === lane), ...(lane === "gpu" ? idle : [])];
    roving(own.sort((one, other) => one.dataset.start - other.dataset.start));
  });
  const cursor = svg("line", { class: "cursor", x1: left, x2: left, y1: 0, y2: height - 20 });
  return { cursor, element: h("div", { class: "chart" }, svg("svg", { viewBox: `0 0 ${width} ${height}`, width, height, style: { width: `${width}px` }, role: "group", "aria-label": "lanes of the step" },
    LANE_ORDER.map((lane, place) => [
      svg("rect", { class: "lane", x: left, y: place * LANE_HEIGHT + 3, width: scale(record.ms) - left, height: LANE_HEIGHT - 6 }),
      svg("text", { class: "soft", x: left - 6, y: place * LANE_HEIGHT + 17, "text-anchor": "end" }, WORDS.lanes[lane])]),
    ticksOf(0, record.ms, false, Math.max(width / 160, 3)).map((value) => svg("text", { class: "soft", x: scale(value), y: height - 6, "text-anchor": "middle" }, `${axisText(value)} ms`)),
    idle, blocks, numbers, cursor)) };
}

const KIND_COLOURS = Object.fromEntries(WORDS.families.flatMap((family) => family.kinds.map((kind) => [kind, family.colour])));
function colourOf(kind) { return KIND_COLOURS[kind] || "var(--grey)"; }

// A cell an expert: held, being copied, at work; a column an expert, a row a layer.
function memoryGrid(record) {
  const canvas = h("canvas", { role: "img", "aria-label": `experts on the GPU of ${record.marked}; layers are rows` });
  const cellText = { gone: "not on the GPU", held: "on the GPU", loading: "is being copied" };
  const states = new Map(record.held.map(([layer, expert]) => [layer * record.experts + expert, "held"]));
  const first = new Map(states);
  let place = 0, until = 0, cell = 6;
  const colours = () => {
    const style = getComputedStyle(document.documentElement), get = (name) => style.getPropertyValue(`--${name}`);
    return { held: get("sky"), loading: get("vermillion"), gone: get("track"), gpu: get("blue"), cpu: get("orange") };
  };
  canvas.addEventListener("pointermove", (event) => {
    const box = canvas.getBoundingClientRect(), expert = Math.floor((event.clientX - box.left) / cell), layer = Math.floor((event.clientY - box.top) / cell);
    canvas.title = `layer ${layer}, expert ${expert}: ${cellText[states.get(layer * record.experts + expert) || "gone"]}`;
  });
  return {
    element: h("div", {}, canvas, legend([["var(--sky)", "on the GPU"], ["var(--vermillion)", "is being copied"], ["var(--blue)", "computed by the GPU"], ["var(--orange)", "computed by the CPU"], ["var(--track)", "in host memory alone"]])),
    show(at, atWork) {
      if (at < until) { states.clear(); first.forEach((state, key) => states.set(key, state)); place = 0; }
      for (; place < record.changes.length && record.changes[place][0] <= at; place++) {
        const [, layer, expert, state] = record.changes[place];
        states.set(layer * record.experts + expert, state);
      }
      until = at;
      const width = canvas.parentElement.clientWidth || 600, dots = window.devicePixelRatio || 1;
      cell = Math.max(Math.min(Math.floor(width / record.experts), 10), 3);
      canvas.width = cell * record.experts * dots;
      canvas.height = cell * record.layers * dots;
      canvas.style.width = `${cell * record.experts}px`;
      canvas.style.height = `${cell * record.layers}px`;
      const context = canvas.getContext("2d"), colour = colours();
      context.scale(dots, dots);
      for (let layer = 0; layer < record.layers; layer++) {
        for (let expert = 0; expert < record.experts; expert++) {
          context.fillStyle = colour[states.get(layer * record.experts + expert) || "gone"];
          context.fillRect(expert * cell, layer * cell, cell - 1, cell - 1);
        }
      }
      for (const [lane, kind, , , expert, , layer] of atWork) {
        if (expert < 0 || !["gpu", "cpu"].includes(lane)) continue;
        context.fillStyle = colour[lane];
        context.fillRect(expert * cell - 1, layer * cell - 1, cell + 1, cell + 1);
      }
    },
  };
}

function savePerfetto(query, status) {
  const events = [];
  source.asker()("perfetto", query, (record) => { if (record.events) events.push(...record.events); else if (record.text) status.textContent = record.text; }, () => {
    const file = new Blob([JSON.stringify({ displayTimeUnit: "ms", traceEvents: events })], { type: "application/json" });
    const link = h("a", { href: URL.createObjectURL(file), download: "step.perfetto.json" });
    link.click();
    URL.revokeObjectURL(link.href);
    status.textContent = "saved step.perfetto.json: open it at ui.perfetto.dev, which reads it in the browser";
  });
}
