// Sensitivity: variance that an operator adds in a format, against the time that the format saves.
import * as Plot from "@observablehq/plot";
import { asTable, choice, el, formatColour, power, precise, seconds, width } from "./dom.js";

const SHAPES = ["circle", "square", "triangle", "diamond", "star"];

export function sensitivity(data, report) {
  const holder = el("div");
  const draw = (index) => holder.replaceChildren(device(data.devices[index], report));
  draw(0);
  const names = data.devices.map((item) => item.name);
  return el("div", {}, names.length > 1 ? choice("Device", names, draw) : null, holder);
}

function device(item, report) {
  const points = item.points.map(([operator, fmt, variance, saved, chosen], index) => ({ operator, fmt, variance, saved, chosen, index }));
  const formats = report.formats.map((fmt) => fmt.name).filter((name) => points.some((point) => point.fmt === name));
  const shape = (name) => SHAPES[formats.indexOf(name) % SHAPES.length];
  const timed = points.some((point) => point.saved !== null);
  const shown = points.filter((point) => point.variance > 0 && (!timed || point.saved !== null));
  const hidden = points.length - shown.length;
  const planned = points.some((point) => point.chosen !== null);
  const text = (point) => {
    const lines = [point.operator, `${point.fmt} adds ${precise(point.variance)}`];
    if (point.saved !== null) lines.push(`saves ${seconds(point.saved)}`);
    if (point.chosen) lines.push("chosen by the plan");
    return lines.join("\n");
  };
  const x = timed ? (point) => point.saved * 1e6 : "index";
  const marks = [
    Plot.dot(shown, {
      x,
      y: "variance",
      r: 5,
      fill: (point) => (point.chosen || !planned ? formatColour(report, point.fmt) : "var(--page)"),
      stroke: (point) => formatColour(report, point.fmt),
      strokeWidth: 2,
      symbol: "fmt",
      title: text,
      tip: true,
    }),
  ];
  if (timed) marks.unshift(Plot.ruleX([0], { strokeDasharray: "4 3" }));
  const chart = Plot.plot({
    width: width(),
    height: 460,
    marginLeft: 80,
    marginBottom: 44,
    inset: 12,
    x: { label: timed ? "time saved on this device (µs) →" : "operator, in the order of the model →", grid: true },
    y: { type: "log", label: "↑ variance added to the gradients", tickFormat: power, grid: true },
    symbol: { domain: formats, range: formats.map(shape) },
    marks,
  });
  const notes = ["Good candidates for a narrow format are at the lower right."];
  if (!timed) notes[0] = "The time that a format saves is unknown: add a profile.";
  if (planned) notes.push("Filled points are in the plan.");
  if (hidden) notes.push(`${hidden} points without variance or time are only in the table.`);
  const rows = points.map((point) => [point.operator, point.fmt, precise(point.variance), point.saved === null ? "?" : seconds(point.saved), point.chosen ? "yes" : ""]);
  return el(
    "div",
    {},
    el("ul", { class: "legend" }, formats.map((name) => el("li", {}, el("span", { class: `swatch ${shape(name)}`, style: `background:${formatColour(report, name)}` }), name))),
    el("figure", {}, el("figcaption", {}, notes.join(" ")), chart),
    asTable(["operator", "format", "variance", "time saved", "in the plan"], rows, 2),
  );
}
