// Share: one's own speeds next to the predictions, and a file to attach to an issue; nothing is sent elsewhere.

const SHARE_FIELDS = [
  ["model", "model", { list: "names-model" }], ["weights", "format", {}], ["gpu", "GPU", { list: "names-gpu" }], ["cpu", "CPU", { list: "names-cpu" }],
  ["ram", "memory modules", { list: "names-ram", placeholder: "ddr5-5600" }], ["n_cpu_moe", "--n-cpu-moe", { inputmode: "numeric" }], ["pcie", "PCIe slot", { placeholder: "4x16" }],
];

function shareView(query, main) {
  const place = h("div", { "aria-live": "polite" });
  const text = h("textarea", { rows: 8, spellcheck: "false", placeholder: "llama-bench -o json ...", "aria-label": "Output of llama-bench, a server's timings, or trilane measure" });
  const file = h("input", { type: "file", "aria-label": "or a file with it", onchange: async () => { if (file.files[0]) text.value = await file.files[0].slice(0, 1000000).text(); } });
  const form = h("form", { "aria-label": "Your measurement" }, h("label", {}, "output", text), h("label", {}, "or a file", file),
    h("div", { class: "fields" }, SHARE_FIELDS.map(([name, label, attributes]) => field(name, label, query[name], { placeholder: "as the output says", ...attributes }))),
    h("div", { class: "row" }, h("button", { class: "main" }, "Compare")));
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    const asked = Object.fromEntries([...new FormData(form)].filter(([, value]) => typeof value === "string" && value.trim()).map(([name, value]) => [name, value.trim()]));
    put(place, h("p", { class: "soft" }, "comparing ..."));
    try {
      const response = await fetch(`share?${new URLSearchParams(asked)}`, { method: "POST", body: text.value });
      drawShared(response.ok ? await response.json() : { kind: "refused", text: await response.text() }, form, place);
    } catch (error) { put(place, refusal({ text: `No answer: ${error.message}. Is trilane explore still running?` })); }
  });
  put(main, h("h1", { tabindex: "-1" }, "Share your speeds"),
    h("p", {}, "Paste what a program printed. You see what was predicted for your machine, and a small file that you can attach to an issue, so that predictions become better. Nothing is sent: the text goes to the program on this computer alone."), form, place);
  say("a form");
}

function drawShared(record, form, place) {
  if (record.kind === "lacking") {
    put(place, h("h2", {}, "This is missing"), h("ul", {}, record.missing.map((one) => h("li", {}, h("strong", {}, one.name.replaceAll("_", "-")), `: ${one.why}`))));
    form.elements[record.missing[0].name]?.focus();
    return;
  }
  if (record.kind !== "shared") { put(place, refusal(record)); return; }
  const end = Math.max(...record.rows.flatMap((row) => row.speeds.flatMap((speed) => [speed.measured, speed.predicted])));
  const used = record.columns.map((_, number) => number).filter((number) => record.lines.some((line) => line[number] !== ""));
  put(place, h("h2", {}, "Measured and predicted"), legend([["var(--blue)", "measured"], ["var(--grey)", "predicted"]]),
    h("ol", { class: "bars" }, record.rows.flatMap((row) => row.speeds.map((speed) => h("li", {}, h("div", { class: "name" }, `row ${row.id}: ${speed.name}`, h("small", {}, row.remark)),
      h("div", {}, track({ parts: [{ size: speed.measured, colour: "var(--blue)" }], end, text: `measured ${speed.measured_text}` }), track({ parts: [{ size: speed.predicted, colour: "var(--grey)" }], end, text: `predicted ${speed.predicted_text}` })),
      h("div", { class: "value" }, h("strong", {}, speed.measured_text), h("small", {}, `predicted ${speed.predicted_text} (${row.error})`)))))),
    h("h2", {}, "Everything in the file"), table("Rows to share", used.map((number) => ({ title: record.columns[number] })), record.lines.map((line) => used.map((number) => line[number]))),
    h("p", {}, h("button", { type: "button", class: "main", onclick: () => {
      const link = h("a", { href: URL.createObjectURL(new Blob([record.csv], { type: "text/csv" })), download: "speeds.csv" });
      link.click();
      URL.revokeObjectURL(link.href);
    } }, "Save speeds.csv")), h("p", { class: "soft" }, record.note));
}
