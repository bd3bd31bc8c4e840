// One model on one machine.

function modelView(query, main) {
  const machine = { ...machineOf(query), use: query.use };
  const title = h("h1", { tabindex: "-1" }, query.model || "A model"), about = h("div", {}), status = h("p", { class: "soft" }, "working it out ...");
  const places = Object.fromEntries(["answer", "context", "cpu layers", "upgrades", "formats", "measured"].map((kind) => [kind, h("section", {})]));
  const form = source.isReport ? [] : [numbers("another model, format or machine", machineForm(query, (asked) => address.go("model", asked), [
    field("model", "model", query.model, { list: "names-model" }), field("weights", "format", query.weights, { placeholder: "the best" }),
    field("context", "window (tokens)", query.context, { inputmode: "numeric", placeholder: "of the use" })]))];
  put(main, h("p", {}, h("a", { href: address.of("machine", machine) }, "all models on this machine")), title, about, form, status, places.answer,
    places.upgrades, h("div", { class: "panels" }, places.context, places["cpu layers"]), h("div", { class: "panels" }, places.formats, places.measured));
  source.asker()("model", query, (record) => {
    if (record.kind === "model") {
      title.textContent = `${record.model}${record.weights ? `, ${record.weights}` : ""}`;
      put(about, h("p", {}, h("strong", {}, record.about.replace("Assembled: ", "")), h("br", {}), record.lengths));
    } else if (record.kind in places) drawPart[record.kind](record, places[record.kind], query);
    else { about.append(refusal(record)); status.textContent = ""; }
  }, () => { status.textContent = ""; say(`${title.textContent}: done`); });
}

const drawPart = {
  answer(record, place, query) {
    put(place, 
      h("div", { class: "big" },
        h("div", {}, h("strong", {}, record.speed), "tokens/s", h("div", { class: "soft small" }, `four of five such: ${record.band}`)),
        h("div", {}, h("strong", {}, record.first), "to the first token"),
        h("div", {}, h("strong", {}, record.answer), "to the last token")),
      h("p", {}, `Limited by: ${record.limit}. `, query && source.has("what-if", without(query, "sort")) && !source.isReport && h("a", { href: address.of("what-if", query) }, "What if the machine were another?")),
      h("h2", {}, "Command line"), commandLine(record),
      h("div", { class: "panels" }, h("section", {}, h("h2", {}, "Memory"), memoryBars(record.memory)),
        h("section", {}, h("h2", {}, "What takes the time of a token"), timeBar(record.decode), h("h3", {}, "of the prompt"), timeBar(record.prompt))),
      record.notes.length ? h("div", {}, h("h2", {}, "Caveats"), h("ul", {}, record.notes.map((note) => h("li", {}, note)))) : [],
      numbers("the answer of trilane tune in words", h("dl", {}, record.facts.map(([name, text]) => [h("dt", {}, name), h("dd", {}, text)]))),
      record.others.length ? numbers("other engines", table("Other engines", [{ title: "engine" }, { title: "tokens/s", number: true }, { title: "first token", number: true }, { title: "whole answer takes", number: true }, { title: "command line" }],
        record.others.map((other) => [other.engine, other.speed, other.first, other.slower, h("code", {}, other.command)]))) : []);
  },
  context(record, place) {
    if (record.points.length < 2) return;
    put(place, h("h2", {}, "Speed with a longer prompt"), lineChart({
      label: "Tokens per second by tokens of the prompt; arrow keys go from point to point", log: true, x: "tokens of the prompt", y: "tokens/s",
      points: record.points.map((one) => ({ x: one.at, y: one.tokens_per_s, text: `${axisText(one.at)} tokens: ${one.speed} tokens/s, first token ${one.first}` })),
    }), numbers("numbers", table("Speed by tokens of the prompt", [{ title: "tokens", number: true }, { title: "tokens/s", number: true }, { title: "first token", number: true }],
      record.points.map((one) => [axisText(one.at), one.speed, one.first]))));
  },
  "cpu layers"(record, place) {
    if (record.points.length < 2) return;
    put(place, h("h2", {}, "Speed with more layers on the CPU"), lineChart({
      label: "Tokens per second by N of --n-cpu-moe; arrow keys go from point to point", x: "N of --n-cpu-moe: layers whose experts the CPU computes", y: "tokens/s",
      points: record.points.map((one) => ({ x: one.at, y: one.tokens_per_s, text: `--n-cpu-moe ${one.at}: ${one.speed} tokens/s, first token ${one.first}` })),
    }), numbers("numbers", table("Speed by N of --n-cpu-moe", [{ title: "N", number: true }, { title: "tokens/s", number: true }, { title: "first token", number: true }],
      record.points.map((one) => [axisText(one.at), one.speed, one.first]))));
  },
  upgrades(record, place, query) {
    const rows = record.rows, end = Math.max(...rows.map((one) => one.tokens_per_s), 1);
    put(place, h("h2", {}, "What to buy"), record.none || !rows.length ? h("p", {}, record.none || "No part of the catalogue helps here.") : [
      h("p", { class: "soft small" }, "Real parts that this machine takes, each in place of its own; gain: of the time until the last token."),
      h("ol", { class: "bars" }, rows.map((one) => h("li", {},
        h("div", { class: "name" }, source.isReport ? one.title : h("a", { href: address.of("model", { ...query, ...stringsOf(one.changes) }) }, one.title), h("small", {}, `${one.part}${one.watts === "-" ? "" : `, at most ${one.watts} W`}`)),
        track({ parts: [{ size: one.tokens_per_s, colour: one.pays ? "var(--green)" : "var(--grey)" }], end, text: `${one.title}: ${one.speed} tokens/s, first token ${one.first}` }),
        h("div", { class: "value" }, h("strong", {}, one.gain), one.pays ? " faster" : "", h("small", {}, `${one.speed} tokens/s`)))))]);
  },
  formats(record, place, query) {
    put(place, h("h2", {}, "Its formats"), table("Formats of the model", [{ title: "format" }, { title: "bits", number: true }, { title: "tokens/s", number: true }, { title: "first token", number: true }],
      record.rows.map((one) => [source.isReport || one.weights === "as published" ? one.weights : h("a", { href: address.of("model", { ...query, weights: one.weights }) }, one.weights), one.bits, one.speed, one.first])));
  },
  measured(record, place) {
    const points = record.points;
    if (!points.length) { put(place, h("h2", {}, "Measured by others"), h("p", {}, "Models of this architecture were never measured.")); return; }
    put(place, h("h2", {}, "Such speeds, measured by others"), scatterChart({
      label: "Predicted by measured tokens per second; arrow keys go from point to point", x: "measured tokens/s", y: "predicted tokens/s, without this machine's rows",
      points: points.map((one) => ({ x: one.measured_decode, y: one.predicted_decode, colour: "var(--focus)", text: pointText(one) })),
    }), numbers("numbers", table("Measured speeds", [{ title: "model" }, { title: "machine" }, { title: "measured", number: true }, { title: "predicted", number: true }, { title: "source" }],
      points.map((one) => [`${one.model} ${one.weights}`, one.machine, one.measured_decode_text, one.predicted_decode_text, one.source]))));
  },
};

function stringsOf(changes) { return Object.fromEntries(Object.entries(changes).map(([name, value]) => [name, value === null ? "" : String(value)])); }

function pointText(one) {
  return `${one.model} ${one.weights} on ${one.machine}, ${one.engine}\nmeasured ${one.measured_decode_text}, predicted ${one.predicted_decode_text} tokens/s\n${one.source}`;
}

function commandLine(record) {
  const about = h("p", { class: "about-word soft", "aria-live": "polite" }, "Each word says what it does: point at it, or go to it with Tab and the arrow keys.");
  const words = record.words.map((word) => {
    const element = h("span", { role: "note", "aria-label": `${word.text}: ${word.about}` }, word.text);
    const show = () => { about.textContent = `${word.text}: ${word.about || "as it says"}`; };
    element.addEventListener("pointerenter", show);
    element.addEventListener("focus", show);
    return element;
  });
  roving(words);
  const copied = h("button", { type: "button", onclick: async () => {
    try { await navigator.clipboard.writeText(record.command); copied.textContent = "Copied"; } catch { copied.textContent = "Select it to copy"; }
  } }, "Copy");
  return h("div", {}, h("pre", { class: "command", "aria-label": "Command line" }, words.flatMap((word) => [word, " "])), copied, about,
    numbers("what each word does", h("dl", {}, record.words.map((word) => [h("dt", {}, h("code", {}, word.text)), h("dd", {}, word.about)]))));
}
