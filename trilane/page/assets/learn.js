// Learn: filled with a later piece.
function learnView(query, main) { put(main, h("h1", { tabindex: "-1" }, "Learn")); }
