// Summary: seconds, waiting, memory, variance, and what limits the plan, in words.
import { bytes, el, precise, seconds, table } from "./dom.js";

export function summary(data) {
  const facts = data.facts.map((fact) => {
    const value = "seconds" in fact ? seconds(fact.seconds) : "bytes" in fact ? bytes(fact.bytes) : "number" in fact ? precise(fact.number) : fact.text;
    return el("div", { class: "fact" }, el("dt", {}, fact.label), el("dd", {}, value), fact.note ? el("p", {}, fact.note) : null);
  });
  const parts = [];
  if (facts.length) parts.push(el("dl", { class: "facts" }, facts));
  if (data.sentences.length) parts.push(el("ul", { class: "sentences" }, data.sentences.map((text) => el("li", {}, text))));
  if (data.devices.length) parts.push(el("h2", {}, "Devices"), devices(data.devices));
  if (data.details.length)
    parts.push(el("details", { open: data.details.length < 12 }, el("summary", {}, "Details"), el("ul", {}, data.details.map((text) => el("li", {}, text)))));
  return el("div", {}, parts);
}

function devices(entries) {
  const columns = ["device class", "count", "computing", "waiting", "sending", "peak memory"];
  const variance = entries.some((item) => "variance" in item);
  if (variance) columns.push("variance");
  const rows = entries.map((item) => {
    const limit = item.memory ? ` of ${bytes(item.memory)}` : "";
    const row = [item.name, String(item.count), seconds(item.computing), seconds(item.waiting), seconds(item.sending), bytes(item.peak_bytes) + limit];
    return variance ? [...row, precise(item.variance)] : row;
  });
  return table(columns, rows);
}
