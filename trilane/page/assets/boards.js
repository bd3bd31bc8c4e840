// Does it pay, Accuracy, Leaderboard.

function paysView(query, main) {
  const place = h("div", {});
  put(main, h("h1", { tabindex: "-1" }, "Does a cache of experts pay?"),
    h("p", {}, "The gain in tokens/s of a cache in llama.cpp, by the share of the experts that the GPU has room for and by the time to copy one expert over PCIe. Blue pays, red costs; the frame is the machine. Each cell is simulated with and without the cache."), place);
  source.asker()("pays", {}, (record) => {
    if (record.kind !== "pays") { put(place, refusal(record)); return; }
    put(place, h("div", { class: "panels" }, record.maps.map((one) => h("section", {}, h("h2", {}, one.title), heatMap(one)))),
      h("p", {}, "For your own machine, in one to three minutes: ", h("code", {}, "trilane pays cache --model MODEL --gpu NAME --ram NAME")));
    say("four maps");
  });
}

function heatMap(map) {
  const cells = new Map(map.cells.map((cell) => [`${cell.x}/${cell.y}`, cell]));
  const colour = (gain) => (gain === null ? "var(--track)" : gain > 0 ? `color-mix(in srgb, var(--blue) ${Math.min(gain / 0.6, 1) * 60}%, #ffffff)` : `color-mix(in srgb, var(--vermillion) ${Math.min(-gain / 0.6, 1) * 60}%, #ffffff)`);
  const rows = [...map.ys].reverse(), all = [];
  const body = rows.map((y) => h("tr", {}, h("th", { scope: "row" }, y.text), map.xs.map((x) => {
    const cell = cells.get(`${x.value}/${y.value}`);
    const element = withTip(h("td", { class: cell.here ? "cell here" : "cell", style: { background: colour(cell.gain), color: cell.gain === null ? "var(--ink)" : "#111111" } }, cell.text), `${cell.text}: ${cell.why}${cell.here ? "\nthis machine" : ""}`);
    all.push(element);
    return element;
  })));
  roving(all);
  return h("div", { class: "scroll" }, h("table", { class: "map" }, h("caption", { class: "unseen" }, `${map.title}: gain of a cache`),
    h("thead", {}, h("tr", {}, h("th", { scope: "col" }, map.y), map.xs.map((x) => h("th", { scope: "col" }, x.text)))), h("tbody", {}, body)),
    h("p", { class: "soft small" }, `columns: ${map.x}`));
}

const ACCURACY_FILTERS = [["gpu", "GPU"], ["model", "model"], ["engine", "engine"], ["regime", "kind of machine"]];
const REGIME_COLOURS = ["var(--blue)", "var(--vermillion)", "var(--green)", "var(--purple)", "var(--orange)", "var(--sky)", "var(--soft)", "var(--ink)"];

function accuracyView(query, main) {
  const place = h("div", {}), opened = h("div", { "aria-live": "polite" });
  const speed = query.speed === "prompts" ? "prompts" : "decode";
  put(main, h("h1", { tabindex: "-1" }, "How accurate are the predictions?"),
    h("p", {}, "Each point is a published speed: across as measured, up as predicted with numbers that were fitted to all machines but its own. On the dashed line both are equal."), place, opened);
  source.asker()("accuracy", {}, (record) => {
    if (record.kind !== "accuracy") { put(place, refusal(record)); return; }
    const measured = record.points.filter((one) => one.scored && one[`measured_${speed}`] && one[`predicted_${speed}`]);
    const shown = measured.filter((one) => ACCURACY_FILTERS.every(([key]) => !query[key] || one[key] === query[key]));
    const regimes = [...new Set(measured.map((one) => one.regime))].sort();
    const colourOfRegime = (name) => REGIME_COLOURS[regimes.indexOf(name) % REGIME_COLOURS.length];
    const form = h("form", { "aria-label": "Filters", onsubmit: (event) => event.preventDefault(), onchange: () => address.go("accuracy", Object.fromEntries(new FormData(form))) },
      h("div", { class: "fields" }, choice("speed", "speed", [["decode", "tokens/s"], ["prompts", "prompt tokens/s"]], speed),
        ACCURACY_FILTERS.map(([key, label]) => choice(key, label, [["", "all"], ...[...new Set(measured.map((one) => one[key]))].sort().map((name) => [name, name])], query[key] || ""))));
    put(place, form, h("p", {}, `${shown.length} of ${measured.length} speeds`), legend(regimes.map((name) => [colourOfRegime(name), name])),
      shown.length ? scatterChart({ label: "Predicted by measured speed; arrow keys go from point to point, Enter explains one", x: "measured", y: "predicted",
        points: shown.map((one) => ({ x: one[`measured_${speed}`], y: one[`predicted_${speed}`], colour: colourOfRegime(one.regime), open: () => explainRow(one, opened),
          text: `${one.model} ${one.weights} on ${one.machine}, ${one.engine}\nmeasured ${one[`measured_${speed}_text`]}, predicted ${one[`predicted_${speed}_text`]}\n${one.source}` })) }) : h("p", {}, "No speed has all of these."),
      numbers("numbers", table("Measured and predicted speeds", [{ title: "row" }, { title: "model" }, { title: "machine" }, { title: "engine" }, { title: "measured", number: true }, { title: "predicted", number: true }, { title: "source" }],
        shown.map((one) => [h("button", { type: "button", onclick: () => explainRow(one, opened) }, one.id), `${one.model} ${one.weights}`, one.machine, one.engine, one[`measured_${speed}_text`], one[`predicted_${speed}_text`], one.source]))));
    say(`${shown.length} speeds`);
  });
}

function explainRow(point, place) {
  source.asker()("row", { id: point.id }, (record) => {
    if (record.kind !== "row") { put(place, refusal(record)); return; }
    put(place, h("h2", {}, `Row ${point.id}: ${point.model} ${point.weights} on ${point.machine}`),
      h("dl", {}, [["source", `${point.source}, ${point.date}`], ["engine", point.engine], ["setting", point.setting], ["assumed", point.assumed || "nothing"],
        ["error", `tokens/s ${record.errors.decode}, prompts ${record.errors.prompts}`]].map(([name, text]) => [h("dt", {}, name), h("dd", {}, text)])),
      record.times.map((time) => h("div", {}, h("h3", {}, time.quantity === "decode" ? "What takes the time of a token, as predicted" : "What takes the time of the prompt, as predicted"),
        timeBar(time.parts.map((part, number) => ({ ms: part.ns, name: part.name, text: part.text, colour: REGIME_COLOURS[number] }))))));
    place.scrollIntoView({ block: "nearest" });
  });
}

function leaderboardView(query, main) {
  const place = h("div", {}), key = query.sort || "score", all = query.all === "yes";
  put(main, h("h1", { tabindex: "-1" }, "Every policy on four classes of machines"), place);
  source.asker()("leaderboard", {}, (record) => {
    if (record.kind !== "leaderboard") { put(place, refusal(record)); return; }
    const setting = record.settings.find((one) => one.name === key);
    const valueOf = setting ? (one) => one.relative[key] ?? -1 : (one) => one[key] ?? -1;
    const fair = record.rows.filter((one) => all || one.kind === "keeps the routing");
    const sorted = [...fair].sort((one, other) => (key === "policy" ? one.policy.localeCompare(other.policy) : valueOf(other) - valueOf(one)));
    const shown = all ? sorted : sorted.slice(0, 12);
    const head = (name, text, about) => ({ title: h("button", { type: "button", "aria-pressed": String(name === key), title: about || null, onclick: () => address.go("leaderboard", { ...query, sort: name }) }, text), number: name !== "policy" });
    put(place,
      h("p", {}, "Speed over that of the fastest policy that keeps the routing, in each of ", String(record.settings.length), " settings: machines, families of models, batches. Simulated, on synthetic routing. A column's name sorts by it."),
      h("div", { class: "row" }, h("button", { type: "button", "aria-pressed": String(all), onclick: () => address.go("leaderboard", { ...query, all: all ? "" : "yes" }) }, `all ${record.rows.length} policies`)),
      table("Leaderboard", [head("policy", "policy"), head("score", "score", record.meanings.score), head("lowest", "lowest", record.meanings.lowest), head("best_in", "best in", record.meanings["best in"]), head("runs_in", "runs in", record.meanings["runs in"]), head("kl", "KL", record.meanings.KL),
        ...record.settings.map((one) => head(one.name, `${one.machine} ${one.family} ${one.batch}`, `${one.machine}, ${one.family}, batch ${one.batch}: tokens/s of all sequences`))],
        shown.map((one) => [one.marked, one.score_text, one.lowest_text, String(one.best_in), String(one.runs_in), one.kl_text, ...record.settings.map((each) => one.speeds[each.name] || "-")])),
      legend(Object.entries(record.marks).map(([sign, text]) => ["transparent", `${sign} ${text}`])));
    say(`${shown.length} policies`);
  });
}
