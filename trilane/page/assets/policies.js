// Policies: the comparison as bars, split by what the GPU waits for.

const SETTING_NAMES = [["deepseek-v2-lite", "DeepSeek-V2-Lite, RTX 3090"], ["gpt-oss-20b", "gpt-oss-20b, RTX 3060 Ti, batch 8"], ["small", "a small model"]];

function settingForm(query, ask, label, more) {
  const form = h("form", { "aria-label": label },
    h("div", { class: "fields" },
      choice("setting", "model and machine", SETTING_NAMES, query.setting || "deepseek-v2-lite"),
      field("share", "experts on the GPU (%)", query.share, { inputmode: "numeric", placeholder: "what fits" }),
      field("batch", "sequences together", query.batch, { inputmode: "numeric", placeholder: "of the setting" }),
      field("gpu", "another GPU", query.gpu, { list: "names-gpu", placeholder: "of the setting" }),
      field("ram", "with memory modules", query.ram, { list: "names-ram", placeholder: "ddr5-5600" }), more),
    h("div", { class: "row" }, h("button", { class: "main" }, "Show")));
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    ask(Object.fromEntries([...new FormData(form)].map(([name, value]) => [name, value.trim()])));
  });
  return form;
}

function policiesView(query, main) {
  const status = h("p", { class: "soft" }, "simulating ..."), about = h("div", {}), list = h("ol", { class: "bars", "aria-label": "Policies, fastest first" });
  const parts = h("div", {}), cannot = h("div", {}), shown = [], refused = [];
  put(main, h("h1", { tabindex: "-1" }, "Which policy is fastest?"),
    h("p", {}, "A policy decides which experts the GPU holds, which are copied to it, and which the CPU computes. Each bar is the simulated time of one token; shorter is better."),
    settingForm(query, (asked) => address.go("policies", asked), "Scenario", [field("policies", "policies (with commas)", query.policies, { placeholder: "14 usual ones" })]),
    about, status, parts, list, cannot);
  let count = 0;
  source.asker()("policies", query, (record) => {
    if (record.kind === "policies") {
      count = record.count;
      put(about, h("p", {}, record.scenario));
      put(parts, stepLegend(record.parts));
    } else if (record.kind === "policy") { shown.push(record); drawPolicies(shown, list, (name) => address.of("timeline", { ...without(query, "policies"), policies: `${name === "on-demand" ? "mixtral-offloading" : "on-demand"},${name}` })); }
    else if (record.kind === "cannot") refused.push(record);
    else put(about, refusal(record));
    status.textContent = count ? `${shown.length + refused.length} of ${count} policies` : "";
  }, () => {
    if (!count) return;
    status.textContent = `${shown.length} policies, simulated once each`;
    say(status.textContent);
    if (refused.length) put(cannot, h("h2", {}, "What cannot run here"), table("Policies that cannot run", [{ title: "policy" }, { title: "why" }], refused.map((one) => [one.policy, one.reason])));
  });
}

function stepLegend(parts) {
  return legend([...parts.map((part) => [part.colour, part.label]), ["var(--ink)", "line: no policy that keeps the routing can be faster"]]);
}

// `addressOf`: of a policy's timeline, where there is one.
function drawPolicies(shown, list, addressOf = null) {
  const ordered = [...shown].sort((one, other) => one.tpot_ms - other.tpot_ms), middle = ordered[Math.floor(ordered.length / 2)].tpot_ms;
  const end = Math.min(ordered[ordered.length - 1].tpot_ms, 2.5 * middle);  // or the others could not be read
  put(list, ordered.map((one) => h("li", {},
    h("div", { class: "name" }, addressOf ? h("a", { href: addressOf(one.policy) }, one.marked) : one.marked, h("small", {}, one.summary)),
    track({ parts: one.parts.map((part) => ({ size: part.ms, colour: part.colour })), end, mark: one.bound,
      text: `${one.marked}: ${one.tpot} a token\n${one.parts.map((part) => `${part.name} ${part.text}`).join("\n")}\n${one.hits} of the experts were on the GPU, ${one.copied} MiB copied a token${one.mark ? `\n${one.mark}` : ""}` }),
    h("div", { class: "value" }, h("strong", {}, one.tpot_ms > end ? `${one.tpot} \u2192` : one.tpot), h("small", {}, `${one.tokens_per_s} tokens/s`)))));
}
