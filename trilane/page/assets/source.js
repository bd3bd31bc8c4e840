// Answers: of the server, record by record, or of the report that this document is.

const source = (() => {
  const element = document.getElementById("answers");
  const kept = element ? JSON.parse(element.textContent) : null;

  function addressOf(view, query) {
    const pairs = Object.entries(query).filter(([, value]) => value !== "" && value !== undefined && value !== null);
    return `${view}?${new URLSearchParams(pairs.sort(([one], [other]) => (one < other ? -1 : 1)))}`;
  }

  function has(view, query) {
    if (!kept) return true;
    if (query) return addressOf(view, query) in kept.answers;
    return Object.keys(kept.answers).some((address) => address.startsWith(`${view}?`));
  }

  async function ask(view, query, take, signal) {
    const address = addressOf(view, query);
    if (kept) {
      const records = kept.answers[address];
      if (records) records.forEach(take);
      else take({ kind: "refused", text: "This report has no answer to that question; trilane explore answers it." });
      return;
    }
    const response = await fetch(`answers/${address}`, { signal });
    if (!response.ok) { take({ kind: "failed", text: await response.text() }); return; }
    const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
    for (let rest = ""; ;) {
      const { value, done } = await reader.read();
      if (done) break;
      const lines = (rest + value).split("\n");
      rest = lines.pop();
      lines.forEach((line) => take(JSON.parse(line)));
    }
  }

  // Records of one question; what was asked before by the same asker is given up.
  function asker() {
    let controller = null;
    return async (view, query, take, done) => {
      if (controller) controller.abort();
      const own = controller = new AbortController();
      try {
        await ask(view, query, (record) => { if (!own.signal.aborted) take(record); }, own.signal);
        if (!own.signal.aborted && done) done();
      } catch (error) {
        if (own.signal.aborted) return;
        take({ kind: "failed", text: `No answer: ${error.message}. Is trilane explore still running?` });
      }
    };
  }

  return { asker, has, isReport: Boolean(kept), first: kept ? kept.address : "#/machine" };
})();
