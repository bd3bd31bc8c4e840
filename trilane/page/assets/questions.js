// The form of a machine: names of the catalogue, found as one types.

const PARTS = ["gpu", "cpu", "ram", "ram_gb", "cores", "channels", "sockets", "pcie", "disk", "os"];
const names = { known: null, lists: h("div", {}) };

function loadNames() {
  if (source.isReport || names.known) return;
  document.body.append(names.lists);
  source.asker()("names", {}, (record) => {
    names.known = record;
    for (const kind of ["gpu", "cpu", "ram", "disk", "model"]) {
      names.lists.append(h("datalist", { id: `names-${kind}` },
        record[kind].map((one) => h("option", { value: one.name }, one.title === one.name ? "" : one.title))));
    }
  });
}

function machineOf(query) { return Object.fromEntries(PARTS.filter((name) => query[name]).map((name) => [name, query[name]])); }

function field(name, label, value, attributes) {
  return h("label", {}, label, h("input", { name, value: value || "", autocomplete: "off", spellcheck: "false", ...attributes }));
}

function choice(name, label, values, value) {
  return h("label", {}, label, h("select", { name }, values.map(([key, text]) => h("option", { value: key, selected: key === value }, text))));
}

const USES = [["chat", "chat"], ["code", "code"], ["documents", "long documents"]];

// `ask` is called with the new query; `more`: further fields.
function machineForm(query, ask, more = []) {
  const form = h("form", { "aria-label": "Question" },
    h("div", { class: "fields" },
      field("gpu", "GPU", query.gpu, { list: "names-gpu", placeholder: "this machine's" }),
      field("cpu", "CPU", query.cpu, { list: "names-cpu", placeholder: "usual" }),
      field("ram", "memory modules", query.ram, { list: "names-ram", placeholder: "ddr5-5600" }),
      field("ram_gb", "RAM (GiB)", query.ram_gb, { inputmode: "numeric", placeholder: "enough" }),
      choice("use", "use", USES, query.use || "chat"), more),
    h("details", { open: ["cores", "channels", "pcie", "disk", "os"].some((name) => query[name]) },
      h("summary", {}, "more parts"), h("div", { class: "fields" },
        field("cores", "CPU cores", query.cores, { inputmode: "numeric" }),
        field("channels", "memory channels", query.channels, { inputmode: "numeric" }),
        field("pcie", "PCIe slot", query.pcie, { placeholder: "4x16" }),
        field("disk", "disk (experts that have no room)", query.disk, { list: "names-disk" }),
        choice("os", "system", [["", "any"], ["linux", "Linux"], ["windows", "Windows"], ["macos", "macOS"]], query.os || ""))),
    h("div", { class: "row" }, h("button", { class: "main" }, "Show")));
  const read = () => Object.fromEntries([...new FormData(form)].map(([name, value]) => [name, value.trim()]));
  form.addEventListener("input", () => { form.touched = true; });
  form.addEventListener("submit", (event) => { event.preventDefault(); ask(read()); });
  return form;
}

// Parts of the machine at hand in the fields, unless one has begun to fill them.
function showFound(form, parts) {
  if (form.touched) return;
  for (const [name, value] of Object.entries(parts)) if (form.elements[name]) form.elements[name].value = value;
}

// Parts that were found or taken, as values of a form's fields.
function partsAsQuery(parts) {
  const { system, ...others } = parts;
  return Object.fromEntries(Object.entries({ ...others, os: system }).filter(([, value]) => value !== undefined).map(([name, value]) => [name, String(value)]));
}

function refusal(record) {
  return h("div", { role: "alert" }, record.text.split("\n").map((line) => h("p", { class: "warn" }, line)));
}

function remarks(lines) { return lines.map((line) => h("p", { class: "small soft" }, line)); }
