// Trade-off: Pareto front of step time and variance; a click shows the plan of a point.
import * as Plot from "@observablehq/plot";
import { asTable, bytes, el, formatColour, formatLegend, inkOn, power, precise, seconds, table, width } from "./dom.js";

const MARKS = { front: ["#0072b2", "circle", "plan of the front"], uniform: ["#e69f00", "square", "one format for all operators"], chosen: ["#d55e00", "star", "this plan"] };

export function tradeoff(data, report) {
  const detail = el("div", { class: "detail", "aria-live": "polite" });
  const points = data.points;
  // A log axis has no zero: plans without variance stand on the lower edge.
  const positive = points.map((point) => point.variance).filter((value) => value > 0);
  const floor = (positive.length ? Math.min(...positive) : 1) / 4;
  const rows = points.map((point, index) => ({ ...point, index, x: point.seconds * 1e3, y: Math.max(point.variance, floor) }));
  const text = (point) => [point.label, `${seconds(point.seconds)} per step`, `variance ${precise(point.variance)}`, point.exceeds ? `exceeds ${point.exceeds}` : ""].filter(Boolean).join("\n");
  const marks = [Plot.line(rows.filter((point) => point.kind === "front"), { x: "x", y: "y", stroke: "#0072b2", curve: "step-after" })];
  for (const [kind, [colour, symbol]] of Object.entries(MARKS)) {
    marks.push(Plot.dot(rows.filter((point) => point.kind === kind), { x: "x", y: "y", fill: colour, stroke: "var(--page)", symbol, r: kind === "chosen" ? 9 : 6 }));
  }
  marks.push(Plot.tip(rows, Plot.pointer({ x: "x", y: "y", title: text })));
  const chart = Plot.plot({
    width: width(),
    height: 420,
    marginLeft: 80,
    marginBottom: 44,
    inset: 12,
    x: { label: "milliseconds per step →", grid: true },
    y: { type: "log", label: "↑ variance added to the gradients", tickFormat: power, grid: true },
    marks,
  });
  chart.addEventListener("click", () => {
    if (chart.value) show(chart.value.index);
  });

  function show(index) {
    const point = points[index];
    const used = new Set();
    const parts = Object.entries(point.plans).map(([name, formats]) => {
      formats.forEach((fmt) => used.add(fmt));
      const rows = point.operators[name].map((operator, row) => {
        const colour = formatColour(report, formats[row]);
        return el("tr", {}, el("th", { scope: "row" }, operator), el("td", { style: `background:${colour};color:${inkOn(colour)}` }, formats[row]));
      });
      const facts = `waits ${seconds(point.waiting[name])}, peak memory ${bytes(point.peaks[name])}`;
      return el("div", {}, el("h3", {}, name), el("p", {}, facts), el("div", { class: "scroll tall" }, el("table", { class: "heat" }, el("tbody", {}, rows))));
    });
    detail.replaceChildren(
      el("h2", {}, `${point.label}: ${seconds(point.seconds)}, variance ${precise(point.variance)}`),
      point.exceeds ? el("p", {}, `It exceeds ${point.exceeds}.`) : "",
      formatLegend(report, used),
      el("div", { class: "columns" }, parts),
    );
    for (const button of buttons) button.setAttribute("aria-pressed", String(Number(button.dataset.index) === index));
  }

  const buttons = points.map((point, index) => el("button", { "data-index": index, "aria-pressed": "false", onclick: () => show(index) }, point.label));
  const chosen = points.findIndex((point) => point.kind === "chosen");
  show(chosen < 0 ? 0 : chosen);
  const keys = Object.values(MARKS).map(([colour, symbol, name]) => el("li", {}, el("span", { class: `swatch ${symbol}`, style: `background:${colour}` }), name));
  return el(
    "div",
    {},
    el("ul", { class: "legend" }, keys),
    el("figure", {}, el("figcaption", {}, "No plan is both faster and more accurate than a plan of the front. Click near a point for its plan."), chart),
    el("div", { class: "controls", role: "group", "aria-label": "Plans" }, buttons),
    detail,
    asTable(["plan", "step", "variance", "limits"], points.map((point) => [point.label, seconds(point.seconds), precise(point.variance), point.exceeds ? `exceeds ${point.exceeds}` : "met"])),
  );
}
