// What if: sliders for the numbers of the machine and of the question.

const WHAT_IF_LENGTHS = [
  ["prompt", "prompt (tokens)", 64, 131072], ["context", "window (tokens)", 512, 262144], ["batch", "sequences together", 1, 32], ["ram_gb", "RAM (GiB)", 8, 1024],
];

function whatIfView(query, main) {
  const machine = { ...machineOf(query), use: query.use, model: query.model || "qwen3-30b-a3b", weights: query.weights };
  const state = { ...machine, ...without(query, ...Object.keys(machine)) };
  const sliders = h("div", { class: "sliders" }), place = h("div", {}), policies = h("section", {}), headline = h("div", { class: "big held" }), trouble = h("div", {});
  put(main, h("h1", { tabindex: "-1" }, "What if?"),
    machineForm(machine, (asked) => address.go("what-if", asked), [field("model", "model", machine.model, { list: "names-model" }), field("weights", "format", machine.weights, { placeholder: "the best" })]),
    headline, h("form", { "aria-label": "Numbers to turn", onsubmit: (event) => event.preventDefault() }, sliders,
      h("div", { class: "row" }, h("button", { type: "button", onclick: () => address.go("what-if", machine) }, "back to the machine as it is"))), trouble, place, policies);
  const ask = source.asker(), simulate = simulator(policies, state, (value) => { state.share = value; address.replace("what-if", state); simulate(); });
  let own = null, built = false, busy = false, again = false;
  source.asker()("what-if", machine, (record) => { own = record; });
  const answer = () => {
    if (busy) { again = true; return; }  // one question at a time: the next one is of the latest values
    busy = true;
    headline.setAttribute("aria-busy", "true");
    ask("what-if", state, (record) => {
      put(trouble);
      if (record.kind !== "what if") { put(trouble, refusal(record)); return; }
      if (!built) { built = true; buildSliders(record, sliders, state, answer); }
      drawWhatIf(record, own, headline, place);
      say(`${record.speed} tokens per second`);
      simulate();
    }, null).finally(() => {
      busy = false;
      headline.setAttribute("aria-busy", "false");
      if (again) { again = false; answer(); }
    });
  };
  answer();
}

function buildSliders(record, place, state, answer) {
  const turn = (name, value) => { state[name] = value; address.replace("what-if", state); answer(); };
  const knobs = record.knobs.map((knob) => slider({ ...knob, whole: knob.name === "cpu_cores", turn: (value) => turn(knob.name, value) }));
  const lengths = WHAT_IF_LENGTHS.filter(([name]) => record.lengths[name] !== null).map(([name, label, low, high]) => {
    const value = record.lengths[name];
    return slider({ label, low: Math.min(low, value), high: Math.max(high, value), value, text: axisText(value), whole: true, turn: (other) => turn(name, other) });
  });
  const share = state.draft_acceptance || 0.3;
  const drafts = record.drafts ? [slider({
    label: "share of drafts accepted (files with layers that draft)", low: 0.3, high: 0.99, value: share, text: share, turn: (value) => turn("draft_acceptance", value),
  })] : [];
  put(place, ...knobs, ...lengths, ...drafts);
}

// Simulations of the latest values, half a second after the last change: they take a second or two.
function simulator(place, state, turnShare) {
  const room = h("div", { class: "sliders" }), status = h("p", { class: "soft" }), parts = h("div", {}), list = h("ol", { class: "bars", "aria-label": "Policies, fastest first" }), cannot = h("div", {});
  const ask = source.asker();
  let timer = null, fits = null;
  const drawRoom = (most) => {
    if (most === fits) return;
    fits = most;
    put(room, most > 5 ? slider({ label: "share of the experts on the GPU (%)", low: 5, high: most, value: Math.min(state.share || most, most), text: state.share || `${most}: what fits`,
      own: most, own_text: `${most}: what fits`, whole: true, turn: turnShare }) : []);
  };
  const run = () => {
    const shown = [], refused = [];
    let count = 0;
    ask("simulated", state, (record) => {
      if (record.kind === "simulated") { count = record.count; drawRoom(record.fits); put(parts, stepLegend(record.parts)); }
      else if (record.kind === "policy") { shown.push(record); drawPolicies(shown, list); }
      else if (record.kind === "cannot") refused.push(record);
      else { put(parts, refusal(record)); return; }
      if (record.kind !== "simulated" || !list.childElementCount) status.textContent = `${shown.length + refused.length} of ${count} policies`;
    }, () => {
      status.textContent = count ? `${shown.length} of ${count} policies can run` : "";
      if (!shown.length) put(list);
      put(cannot, refused.length ? table("Policies that cannot run", [{ title: "policy" }, { title: "why" }], refused.map((one) => [one.policy, one.reason])) : []);
    });
  };
  put(place, h("h2", {}, "Policies on this machine, simulated"), h("p", {}, "The time of one token under the policies that trilane fit plays, on synthetic routing; shorter is better."), room, status, parts, list, cannot);
  return () => { clearTimeout(timer); timer = setTimeout(run, 500); };
}

// A slider that grows by ratios, from `low` to `high`; at the machine's own number nothing is turned.
function slider({ label, low, high, value, text, own, own_text, whole, turn }) {
  const steps = 200, ratio = high / low;
  const at = (number) => Math.round((steps * Math.log(number / low)) / Math.log(ratio));
  const valueAt = (step) => { const number = low * ratio ** (step / steps); return String(whole ? Math.round(number) : Number(number.toPrecision(3))); };
  const shown = h("span", { class: "turned" }, text);
  const input = h("input", { type: "range", min: 0, max: steps, value: at(value), "aria-label": label, "aria-valuetext": text });
  input.addEventListener("input", () => {
    const asItIs = own && Number(input.value) === at(own), number = asItIs ? "" : valueAt(Number(input.value));
    shown.textContent = asItIs ? own_text : axisText(Number(number));
    input.setAttribute("aria-valuetext", shown.textContent);
    turn(number);
  });
  return h("div", {}, h("div", { class: "label", "aria-hidden": "true" }, h("span", {}, label), shown), input);
}

function drawWhatIf(record, own, headline, place) {
  const asItIs = own && own.kind === "what if" ? [{ ...own, name: "the machine as it is", about: "", colour: "var(--grey)" }] : [];
  const more = record.more.map((one) => ({ ...one, colour: "var(--purple)" }));
  const rows = [{ ...record, name: "now", about: "", colour: "var(--blue)" }, ...asItIs, ...more];
  const end = Math.max(...rows.map((one) => one.high || one.tokens_per_s));
  put(headline,
      h("div", {}, h("strong", { id: "what-if-speed" }, record.speed), "tokens/s", h("div", { class: "soft small" }, `four of five such: ${record.band}`)),
      h("div", {}, h("strong", {}, record.first), "to the first token"), h("div", {}, h("strong", {}, record.answer), "to the last token"));
  put(place,
    h("p", {}, `Limited by: ${record.limit}.`),
    h("ol", { class: "bars" }, rows.map((one) => h("li", {}, h("div", { class: "name" }, one.name, one.about ? h("small", {}, one.about) : []),
      track({ parts: [{ size: one.tokens_per_s, colour: one.colour }], end, low: one.low, high: one.high, text: `${one.name}: ${one.speed} tokens/s` }),
      h("div", { class: "value" }, h("strong", {}, one.speed), " tokens/s")))),
    h("div", { class: "panels" }, h("section", {}, h("h2", {}, "Memory"), memoryBars(record.memory)),
      h("section", {}, h("h2", {}, "What takes the time of a token"), timeBar(record.decode))),
    h("h2", {}, "Command line"), commandLine(record));
}
