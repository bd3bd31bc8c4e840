// Charts: places and scales alone; every value and text is the server's.

function chart(label, draw) {
  const element = h("div", { class: "chart" });
  let drawn = 0;
  new ResizeObserver(() => {
    const width = Math.round(element.clientWidth);
    if (!width || width === drawn) return;
    drawn = width;
    const picture = draw(width);
    picture.setAttribute("role", "group");
    picture.setAttribute("aria-label", label);
    put(element, picture);
  }).observe(element);
  return element;
}

function scaleOf(low, high, from, to, log) {
  const at = log ? Math.log : Number;
  const span = at(high) - at(low) || 1;
  return (value) => from + ((at(value) - at(low)) / span) * (to - from);
}

function ticksOf(low, high, log, most = 6) {
  const found = [];
  if (log) {
    for (let power = Math.floor(Math.log10(low)); power <= Math.ceil(Math.log10(high)); power++) {
      for (const digit of [1, 2, 5]) found.push(Number(`${digit}e${power}`));
    }
  } else {
    const rough = (high - low) / most, power = 10 ** Math.floor(Math.log10(rough || 1));
    const step = [1, 2, 5, 10].map((digit) => digit * power).find((one) => one >= rough);
    for (let value = Math.ceil(low / step) * step; value <= high + step / 1e6; value += step) found.push(Number(value.toPrecision(6)));
  }
  const inside = found.filter((value) => value >= low * 0.999 && value <= high * 1.001);
  return inside.length > most + 2 ? inside.filter((value) => /^[15]/.test(value.toString().replace(/^0\.0*/, ""))) : inside;
}

const axisText = (value) => value.toLocaleString("en-US", { maximumFractionDigits: 3 });

// Points joined by a line: { points: [{ x, y, text }], x, y (labels), log, own (a place to mark) }
function lineChart({ label, points, x, y, log, own }) {
  return chart(label, (width) => {
    const height = 240, left = 48, bottom = 42, top = 12, right = 16;
    const xs = points.map((point) => point.x), high = Math.max(...points.map((point) => point.y));
    const across = scaleOf(Math.min(...xs), Math.max(...xs), left, width - right, log);
    const up = scaleOf(0, high * 1.05, height - bottom, top);
    const dots = points.map((point) => withTip(svg("circle", {
      class: "dot", cx: across(point.x), cy: up(point.y), r: 6, fill: "var(--focus)", role: "img", "aria-label": point.text,
    }), point.text));
    roving(dots);
    const shownTicks = points.length <= 10 && width > 420 ? xs : xs.filter((_, place) => place % Math.ceil(xs.length / (width > 420 ? 8 : 5)) === 0);
    return svg("svg", { viewBox: `0 0 ${width} ${height}`, width, height },
      ticksOf(0, high, false, 4).map((value) => [
        svg("line", { class: "grid", x1: left, x2: width - right, y1: up(value), y2: up(value) }),
        svg("text", { class: "soft", x: left - 6, y: up(value) + 4, "text-anchor": "end" }, axisText(value)),
      ]),
      shownTicks.map((value) => svg("text", { class: "soft", x: across(value), y: height - bottom + 18, "text-anchor": "middle" }, axisText(value))),
      svg("text", { class: "soft", x: (left + width - right) / 2, y: height - 6, "text-anchor": "middle" }, x),
      svg("text", { class: "soft", x: left, y: top - 1 }, y),
      own !== undefined && svg("line", { class: "own", x1: across(own), x2: across(own), y1: top + 6, y2: height - bottom }),
      svg("path", { class: "curve", d: points.map((point, place) => `${place ? "L" : "M"}${across(point.x)} ${up(point.y)}`).join("") }),
      dots);
  });
}

// Points of two measures on equal logarithmic axes, with the line on which both are equal.
function scatterChart({ label, points, x, y }) {
  return chart(label, (whole) => {
    const width = Math.min(whole, 620), height = width * 0.86, left = 52, bottom = 44, top = 14, right = 14;
    const values = points.flatMap((point) => [point.x, point.y]);
    const low = Math.min(...values) / 1.2, high = Math.max(...values) * 1.2;
    const across = scaleOf(low, high, left, width - right, true), up = scaleOf(low, high, height - bottom, top, true);
    const dots = points.map((point) => {
      const dot = withTip(svg("circle", {
        class: "dot", cx: across(point.x), cy: up(point.y), r: 5, fill: point.colour, role: point.open ? "button" : "img", "aria-label": point.text,
      }), point.text);
      if (point.open) {
        dot.addEventListener("click", point.open);
        dot.addEventListener("keydown", (event) => { if (event.key === "Enter" || event.key === " ") { event.preventDefault(); point.open(); } });
      }
      return dot;
    });
    roving(dots);
    const ticks = ticksOf(low, high, true);
    return svg("svg", { viewBox: `0 0 ${whole} ${height}`, width: whole, height },
      ticks.map((value) => [
        svg("line", { class: "grid", x1: left, x2: width - right, y1: up(value), y2: up(value) }),
        svg("line", { class: "grid", x1: across(value), x2: across(value), y1: top, y2: height - bottom }),
        svg("text", { class: "soft", x: left - 6, y: up(value) + 4, "text-anchor": "end" }, axisText(value)),
        svg("text", { class: "soft", x: across(value), y: height - bottom + 18, "text-anchor": "middle" }, axisText(value)),
      ]),
      svg("line", { class: "own", x1: across(low), y1: up(low), x2: across(high), y2: up(high) }),
      svg("text", { class: "soft", x: (left + width - right) / 2, y: height - 6, "text-anchor": "middle" }, x),
      svg("text", { class: "soft", x: left, y: top - 3 }, y),
      dots);
  });
}

// A bar of parts, each a share of `end`; a band or a mark over it.
function track({ parts, end, low, high, mark, faint, text }) {
  const share = (value) => `${Math.min((100 * value) / end, 100)}%`;
  const bars = parts.map((part) => h("i", { style: { width: share(part.size), background: part.colour }, class: faint ? "faint" : null }));
  const band = low === null || low === undefined ? [] : [h("i", { class: "band", style: { left: share(low), width: share(Math.min(high, end) - low) } })];
  const line = mark === null || mark === undefined ? [] : [h("i", { class: "mark", style: { left: share(mark) } })];
  const element = h("div", { class: "track", role: "img", "aria-label": text }, bars, band, line);
  return withTip(element, text);
}

function memoryBars(memories) {
  return memories.map((one) => {
    const end = Math.max(one.bytes || 0, one.used);
    const text = `${one.name}: ${one.text}\n${one.parts.map((part) => `${part.name} ${part.text}`).join("\n")}`;
    return h("div", {}, h("h3", {}, `${one.name}: ${one.text}`),
      track({ parts: one.parts.map((part) => ({ size: part.bytes, colour: part.colour })), end, text }),
      legend(one.parts.map((part) => [part.colour, `${part.name} ${part.text}`])));
  });
}

function timeBar(parts) {
  const end = parts.reduce((sum, part) => sum + part.ms, 0);
  return h("div", {}, track({ parts: parts.map((part) => ({ size: part.ms, colour: part.colour })), end, text: parts.map((part) => `${part.name} ${part.text}`).join("\n") }),
    legend(parts.map((part) => [part.colour, `${part.name} ${part.text}`])));
}
