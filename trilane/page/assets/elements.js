// Elements of the page, by name, attributes and children; texts are never read as markup.

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "style") for (const [key, text] of Object.entries(value)) element.style.setProperty(key, text);
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat(3).filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

function h(name, attributes, ...children) { return fill(document.createElement(name), attributes, children); }

function svg(name, attributes, ...children) {
  return fill(document.createElementNS("http://www.w3.org/2000/svg", name), attributes, children);
}

function put(element, ...children) {
  element.replaceChildren();
  return fill(element, {}, children);
}

function say(text) { document.getElementById("said").textContent = text; }

// A text that appears next to an element under the pointer or with the focus.
function withTip(element, text) {
  const tip = document.getElementById("tip");
  const show = () => {
    const box = element.getBoundingClientRect();
    tip.textContent = text;
    tip.hidden = false;
    const left = Math.min(box.left, document.documentElement.clientWidth - tip.offsetWidth - 8);
    const below = box.bottom + 6 + tip.offsetHeight < window.innerHeight;
    tip.style.left = `${Math.max(left, 8) + window.scrollX}px`;
    tip.style.top = `${(below ? box.bottom + 6 : box.top - tip.offsetHeight - 6) + window.scrollY}px`;
  };
  const hide = () => { tip.hidden = true; };
  element.addEventListener("pointerenter", show);
  element.addEventListener("pointerleave", hide);
  element.addEventListener("focus", show);
  element.addEventListener("blur", hide);
  return element;
}

// One of many elements takes the focus; arrow keys, Home and End move it.
function roving(elements) {
  elements.forEach((element, place) => {
    element.setAttribute("tabindex", place ? "-1" : "0");
    element.addEventListener("keydown", (event) => {
      const last = elements.length - 1;
      const steps = { ArrowRight: place + 1, ArrowDown: place + 1, ArrowLeft: place - 1, ArrowUp: place - 1, Home: 0, End: last };
      if (!(event.key in steps)) return;
      event.preventDefault();
      const next = elements[Math.min(Math.max(steps[event.key], 0), last)];
      element.setAttribute("tabindex", "-1");
      next.setAttribute("tabindex", "0");
      next.focus();
    });
  });
}

function table(caption, columns, rows) {
  const cell = (name, content, column) => h(name, { class: column.number ? "number" : null, scope: name === "th" ? "col" : null }, content);
  return h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": caption }, h("table", {},
    h("caption", { class: "unseen" }, caption),
    h("thead", {}, h("tr", {}, columns.map((column) => cell("th", column.title, column)))),
    h("tbody", {}, rows.map((row) => h("tr", {}, row.map((content, place) => cell("td", content, columns[place])))))));
}

function legend(entries) {
  return h("ul", { class: "legend" }, entries.map(([colour, label]) =>
    h("li", {}, h("i", { style: { background: colour }, "aria-hidden": "true" }), label)));
}

function numbers(summary, ...children) { return h("details", {}, h("summary", {}, summary), children); }
