// The address holds the question: #/view?name=value, so that it can be sent, and the browser's history works.

const address = {
  read() {
    const [path, query] = (location.hash.slice(2) || "").split("?");
    return { view: path, query: Object.fromEntries(new URLSearchParams(query || "")) };
  },
  of(view, query) {
    const pairs = Object.entries(query).filter(([, value]) => value !== "" && value !== undefined && value !== null);
    const text = new URLSearchParams(pairs).toString();
    return `#/${view}${text ? `?${text}` : ""}`;
  },
  go(view, query) { location.hash = this.of(view, query); },
  replace(view, query) { history.replaceState(null, "", this.of(view, query)); },
};
