// Views by name, and what happens when the address changes.

const VIEWS = {
  machine: ["My machine", machineView, "machine"],
  model: [null, modelView, "model"],
  "what-if": ["What if", whatIfView, "what-if"],
  policies: ["Policies", policiesView, "policies"],
  timeline: ["One token", timelineView, "timeline"],
  pays: ["Does it pay", paysView, "pays"],
  accuracy: ["Accuracy", accuracyView, "accuracy"],
  leaderboard: ["Leaderboard", leaderboardView, "leaderboard"],
  learn: ["Learn", learnView, "learn"],
  share: ["Share", shareView, "share"],
};

function show() {
  const { view, query } = address.read();
  if (!Object.hasOwn(VIEWS, view)) { history.replaceState(null, "", source.first); show(); return; }
  const main = document.getElementById("content"), [title, draw] = VIEWS[view];
  const fresh = h("div", {});
  document.getElementById("tip").hidden = true;
  document.title = `${title || query.model || view} - Trilane`;
  drawNavigation(view, query);
  draw(query, fresh);
  put(main, fresh);
  if (show.again) { window.scrollTo(0, 0); fresh.querySelector("h1").focus({ preventScroll: true }); }
  show.again = true;
}

function drawNavigation(view, query) {
  const machine = { ...machineOf(query), use: query.use }, keeps = { ...machine, model: query.model, weights: query.weights };
  const current = view === "model" ? "machine" : view;
  document.getElementById("views").replaceChildren(...Object.entries(VIEWS)
    .filter(([, [title, , asked]]) => title && (!asked || source.has(asked)))
    .map(([name, [title]]) => h("li", {}, h("a", {
      href: source.isReport && name === "machine" ? source.first : address.of(name, name === "what-if" ? keeps : name === "machine" ? machine : {}),
      "aria-current": name === current ? "page" : null,
    }, title))));
}

document.getElementById("footer").append(source.isReport
  ? "A report of Trilane: predictions by formulas fitted to published speeds. It asks no server."
  : "Predictions by formulas fitted to published speeds, and by simulation. This page asks the program on this computer alone.");
window.addEventListener("hashchange", show);
loadNames();
show();
