// Plan: heat map of layers by devices, coloured by format.
import { el, formatColour, formatLegend, inkOn, precise } from "./dom.js";

export function plan(data, report) {
  const used = new Set(data.layers.flatMap((layer) => layer.cells.filter(Boolean).map((cell) => cell[0])));
  const detail = el("div", { class: "detail", "aria-live": "polite" }, "Select a cell for its choices.");
  const body = el("tbody");
  const search = el("input", { type: "search", placeholder: "part of an operator's id", oninput: () => fill() });
  let different = false;

  function fill() {
    const text = search.value.toLowerCase();
    const rows = data.layers.filter((layer) => {
      const formats = new Set(layer.cells.map((cell) => (cell ? cell[0] : null)));
      return layer.id.toLowerCase().includes(text) && (!different || formats.size > 1);
    });
    body.replaceChildren(...rows.map(row));
    count.textContent = `${rows.length} of ${data.layers.length} operators`;
  }

  function row(layer) {
    const cells = layer.cells.map((cell, index) => {
      if (!cell) return el("td", {}, "");
      const colour = formatColour(report, cell[0]);
      const style = `background:${colour};color:${inkOn(colour)}`;
      return el("td", {}, el("button", { class: "cell", style, onclick: () => explain(layer, index) }, cell[0]));
    });
    return el("tr", {}, el("th", { scope: "row", title: layer.id }, layer.id), cells);
  }

  function explain(layer, index) {
    const [fmt, variance, choices, reason] = layer.cells[index];
    const lines = [`${data.devices[index].name} runs it in ${fmt}.`];
    if (variance !== null) lines.push(`It adds ${precise(variance)} to the variance of this device's gradients.`);
    if (choices.length) lines.push(`Choices: ${choices.join(", ")}.`);
    if (reason) lines.push(`Reason: ${reason}.`);
    if (layer.line) lines.push(`Source: ${layer.line}.`);
    detail.replaceChildren(el("strong", {}, layer.id), ...lines.map((line) => el("p", {}, line)));
  }

  const count = el("span", { class: "muted" });
  const heads = data.devices.map((item) => el("th", { scope: "col" }, item.count ? `${item.count} × ${item.name}` : item.name));
  const filter = el("label", { class: "control" }, el("input", { type: "checkbox", onchange: (event) => { different = event.target.checked; fill(); } }), " only operators whose format differs by device");
  fill();
  return el(
    "div",
    {},
    el("div", { class: "controls" }, el("label", { class: "control" }, "Search ", search), data.devices.length > 1 ? filter : null, count),
    formatLegend(report, used),
    counts(data, used, report),
    el("div", { class: "columns" }, el("div", { class: "scroll tall" }, el("table", { class: "heat" }, el("thead", {}, el("tr", {}, el("th", { scope: "col" }, "operator"), heads)), body)), detail),
  );
}

function counts(data, used, report) {
  const formats = report.formats.filter((fmt) => used.has(fmt.name)).map((fmt) => fmt.name);
  const bars = data.devices.map((device, index) => {
    const number = formats.map((fmt) => data.layers.filter((layer) => layer.cells[index]?.[0] === fmt).length);
    const total = number.reduce((sum, item) => sum + item, 0) || 1;
    const parts = formats.map((fmt, index) => {
      const colour = formatColour(report, fmt);
      return number[index] ? el("span", { style: `flex:${number[index]};background:${colour};color:${inkOn(colour)}`, title: `${number[index]} in ${fmt}` }, `${number[index]}`) : null;
    });
    return el("div", { class: "share" }, el("span", { class: "name" }, device.name), el("div", { class: "bar", "aria-label": `${total} operators` }, parts));
  });
  return el("div", { class: "shares" }, bars);
}
