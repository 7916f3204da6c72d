// Trust: predicted against measured values.
import * as Plot from "@observablehq/plot";
import { bytes, el, seconds, table, width } from "./dom.js";

export function trust(data) {
  const parts = [];
  for (const [unit, shown, factor, label] of [["seconds", seconds, 1e3, "milliseconds"], ["bytes", bytes, 1e-6, "megabytes"]]) {
    const points = data.points.filter((point) => point[1] === unit).map(([name, , predicted, measured, spread]) => ({ name, predicted, measured, spread }));
    if (points.length) parts.push(part(points, unit, shown, factor, label));
  }
  return el("div", {}, parts);
}

function part(points, unit, shown, factor, label) {
  const error = (point) => point.predicted / point.measured - 1;
  const percent = (value) => `${value < 0 ? "−" : "+"}${Math.abs(100 * value).toFixed(1)}%`;
  const values = points.flatMap((point) => [point.predicted * factor, point.measured * factor]);
  const domain = [Math.min(...values) * 0.9, Math.max(...values) * 1.1];
  const chart = Plot.plot({
    width: Math.min(640, width()),
    height: 480,
    marginLeft: 70,
    marginBottom: 44,
    x: { label: `measured ${label} →`, domain, grid: true },
    y: { label: `↑ predicted ${label}`, domain, grid: true },
    marks: [
      Plot.line([[domain[0], domain[0]], [domain[1], domain[1]]], { strokeDasharray: "4 3" }),
      Plot.ruleY(points, { y: (point) => point.predicted * factor, x1: (point) => point.measured * (1 - point.spread) * factor, x2: (point) => point.measured * (1 + point.spread) * factor, stroke: "#0072b2" }),
      Plot.dot(points, { x: (point) => point.measured * factor, y: (point) => point.predicted * factor, fill: "#0072b2", r: 5, tip: true, title: (point) => `${point.name}\npredicted ${shown(point.predicted)}\nmeasured ${shown(point.measured)} (${percent(error(point))})` }),
    ],
  });
  const worst = Math.max(...points.map((point) => Math.abs(error(point))));
  const title = unit === "seconds" ? "Computing time" : "Peak memory";
  const rows = points.map((point) => [point.name, shown(point.predicted), shown(point.measured), percent(error(point))]);
  return el("div", {}, el("h2", {}, title), el("p", {}, `Predictions differ from measurements by at most ${(100 * worst).toFixed(1)}%. The dashed line is agreement.`), chart, table(["run", "predicted", "measured", "error"], rows));
}
