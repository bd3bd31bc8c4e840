// Learn: the way of a token, ten words, five questions.

function learnView(query, main) {
  const place = h("div", {});
  put(main, h("h1", { tabindex: "-1" }, "The way of a token"), place);
  source.asker()("learn", {}, (record) => {
    if (record.kind !== "learn") { put(place, refusal(record)); return; }
    put(place,
      h("p", {}, "In each layer a router chooses a few of many experts. One that the GPU holds is computed at once; another must be copied over PCIe first, or is computed by the CPU where it lies."),
      source.isReport ? [] : h("div", { class: "drawing" }, h("img", { src: "token.svg", alt: "One token in one layer: one of its experts is on the GPU, one is copied, one is computed by the CPU" })),
      h("h2", {}, "Ten words"), h("dl", {}, Object.entries(record.words).map(([word, meaning]) => [h("dt", {}, word), h("dd", {}, meaning)])),
      h("h2", {}, "Five questions"), record.questions.map((one) => h("section", {}, h("h3", {}, one.question),
        h("p", {}, h("a", { href: one.address }, "Try it")), h("details", {}, h("summary", {}, "the answer"), h("p", {}, one.answer)))));
    say("words and questions");
  });
}
