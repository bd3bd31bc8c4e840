// My machine: all models as bars.

const SORTS = {
  size: ["largest first", (one) => -one.params],
  speed: ["fastest first", (one) => -one.tokens_per_s],
  first: ["soonest first token first", (one) => one.first_ms],
};

function machineView(query, main) {
  const status = h("p", { class: "soft" }, "working out all models ..."), bar = h("i", {});
  const runs = h("ol", { class: "bars", "aria-label": "Models that run" }), lacks = h("div", {}), about = h("div", {}), limits = h("div", {});
  const sort = query.sort in SORTS ? query.sort : "size";
  const sorting = h("div", { class: "row", role: "group", "aria-label": "Order" }, Object.entries(SORTS).map(([key, [text]]) =>
    h("button", { type: "button", "aria-pressed": String(key === sort), onclick: () => address.go("machine", { ...query, sort: key }) }, text)));
  const form = source.isReport ? null : machineForm(query, (asked) => address.go("machine", { ...asked, sort: query.sort }));
  put(main, h("h1", { tabindex: "-1" }, "What runs on my machine?"), form, about, h("div", { class: "progress", "aria-hidden": "true" }, bar), status, sorting, limits, runs, lacks);
  const shown = { head: null, runs: [], lacks: [] };
  let waiting = false;
  const draw = () => {
    waiting = false;
    const done = shown.runs.length + shown.lacks.length, of = shown.head ? shown.head.models : 0;
    bar.style.width = `${(100 * done) / (of || 1)}%`;
    status.textContent = done < of ? `${done} of ${of} models` : `${shown.runs.length} of ${of} models run; the line over a bar holds four of five such speeds`;
    drawModels(shown, query, sort, runs, limits);
  };
  source.asker()("machine", without(query, "sort"), (record) => {
    if (record.kind === "machine") {
      shown.head = record;
      put(about, h("p", {}, h("strong", {}, record.about.replace("Assembled: ", "")), h("br", {}), `${record.use}: ${record.lengths}`), ...remarks(record.remarks));
      if (form && !query.gpu) showFound(form, partsAsQuery(record.parts));
    } else if (record.kind === "runs") shown.runs.push(record);
    else if (record.kind === "lacks") shown.lacks.push(record);
    else about.append(refusal(record));
    if (!waiting) { waiting = true; requestAnimationFrame(draw); }
  }, () => {
    draw();
    if (!shown.head) status.textContent = "";
    say(status.textContent);
    if (shown.lacks.length) {
      shown.lacks.sort((one, other) => other.params - one.params);
      put(lacks, h("h2", {}, "What does not run, and what it lacks"), table("Models that do not run",
        [{ title: "model" }, { title: "billion parameters", number: true }, { title: "format" }, { title: "it lacks" }],
        shown.lacks.map((one) => [one.model, one.size, one.weights, one.lack])));
    }
  });
}

function without(query, ...keys) { return Object.fromEntries(Object.entries(query).filter(([key]) => !keys.includes(key))); }

function drawModels(shown, query, sort, list, limits) {
  const machine = shown.head ? { ...machineOf(query.gpu || source.isReport ? query : partsAsQuery(shown.head.parts)), use: query.use } : query;
  const key = SORTS[sort][1];
  const ordered = [...shown.runs].sort((one, other) => one.drawback - other.drawback || key(one) - key(other));
  const end = Math.max(...ordered.map((one) => one.high || one.tokens_per_s), 1);
  const colours = new Map(ordered.filter((one) => one.limited_by).map((one) => [one.limited_by, one.colour]));
  const held = list.contains(document.activeElement) ? document.activeElement.getAttribute("href") : null;
  put(limits, legend([...colours].map(([owner, colour]) => [colour, `limited by ${owner}`])));
  put(list, ...ordered.map((one) => h("li", {},
    h("div", { class: "name" }, h("a", { href: address.of("model", { ...machine, model: one.model }) }, one.model),
      h("small", {}, `${one.size} billion, ${one.weights}${one.drawback ? `, ${one.slow_first ? "slow to the first token" : "little memory is left"}` : ""}`)),
    track({ parts: [{ size: one.tokens_per_s, colour: one.colour }], end, low: one.low, high: one.high, faint: one.drawback,
      text: `${one.model}: ${one.speed} tokens/s, four of five such speeds are ${one.band}${one.sure === false ? " (few such were measured)" : ""}\nfirst token ${one.first}\n${one.memory.map((memory) => `${memory.name} ${memory.text}`).join("\n")}\nlimited by ${one.limited_by || "no part by itself"}` }),
    h("div", { class: "value" }, h("strong", {}, one.speed), " tokens/s", h("small", {}, `first token ${one.first}`)))));
  if (held) [...list.querySelectorAll("a")].find((link) => link.getAttribute("href") === held)?.focus();
}
