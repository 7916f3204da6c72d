// Memory: live bytes over a step, stacked by purpose, with the peak and the limit.
import * as Plot from "@observablehq/plot";
import { asTable, bytes, choice, el, legend, SERIES_COLOURS, width } from "./dom.js";

export function memory(data) {
  const holder = el("div");
  const draw = (index) => holder.replaceChildren(device(data.devices[index]));
  draw(0);
  const names = data.devices.map((item) => item.name);
  return el("div", {}, names.length > 1 ? choice("Device", names, draw) : null, holder);
}

function device(item) {
  const colour = (index) => SERIES_COLOURS[index % SERIES_COLOURS.length];
  const rows = [];
  const sums = item.moments.map(([place, operator, sizes], index) => {
    sizes.forEach((size, series) => rows.push({ index, series: item.series[series], size: size / 1e6, order: series }));
    return { index, place, operator, sizes, total: sizes.reduce((sum, size) => sum + size, 0) };
  });
  const peak = sums.reduce((best, moment) => (moment.total > best.total ? moment : best));
  const limited = item.limit && item.limit < 3 * peak.total;
  const starts = sums.filter((moment, index) => index === 0 || sums[index - 1].place !== moment.place);
  const text = (moment) => {
    const parts = moment.sizes.map((size, index) => [size, item.series[index]]).filter(([size]) => size).sort((a, b) => b[0] - a[0]);
    return [`${moment.place}${moment.operator ? `, ${moment.operator}` : ""}`, `${bytes(moment.total)} in all`, ...parts.map(([size, name]) => `${bytes(size)} ${name}`)].join("\n");
  };
  const marks = [
    Plot.areaY(rows, { x: "index", y: "size", fill: (row) => colour(row.order), z: "series", order: item.series, curve: "step-after" }),
    Plot.ruleX(starts, { x: "index", strokeDasharray: "4 3" }),
    Plot.text(starts.filter((moment) => moment.index < 0.9 * sums.length), { x: "index", frameAnchor: "top-left", dx: 4, dy: -40, text: "place", textAnchor: "start" }),
    Plot.text(starts.filter((moment) => moment.index >= 0.9 * sums.length), { x: "index", frameAnchor: "top-right", dx: -4, dy: -40, text: "place", textAnchor: "end" }),
    Plot.dot([peak], { x: "index", y: (moment) => moment.total / 1e6, r: 6, fill: "currentColor", stroke: "var(--page)", strokeWidth: 2 }),
    Plot.text([peak], { x: "index", y: (moment) => moment.total / 1e6, text: (moment) => `peak ${bytes(moment.total)}`, dy: -14, fontWeight: "bold" }),
    Plot.tip(sums, Plot.pointerX({ x: "index", y: (moment) => moment.total / 1e6, title: text })),
  ];
  if (limited) marks.push(Plot.ruleY([item.limit / 1e6], { strokeWidth: 3, strokeDasharray: "8 4" }));
  const chart = Plot.plot({
    width: width(),
    height: 460,
    marginLeft: 70,
    marginTop: 64,
    x: { label: "moments of the step, in order →", ticks: [] },
    y: { label: "↑ megabytes", grid: true },
    marks,
  });
  const where = `${peak.place}${peak.operator ? `, in ${peak.operator}` : ""}`;
  const limit = item.limit ? ` The limit is ${bytes(item.limit)}${limited ? "" : ", above this chart"}.` : "";
  const used = item.series.map((name, index) => [name, colour(index)]);
  const difference = item.peak_bytes - peak.total;
  const corrected = Math.abs(difference) > 0.001 * peak.total ? ` Corrected by measured plans: ${bytes(item.peak_bytes)}.` : "";
  const shares = peak.sizes.map((size, index) => [item.series[index], bytes(size), `${((100 * size) / peak.total).toFixed(1)}%`]).filter((_, index) => peak.sizes[index]);
  return el(
    "div",
    {},
    legend(used),
    el("figure", {}, el("figcaption", {}, `The peak of ${bytes(peak.total)} is reached in: ${where}.${corrected}${limit}`), chart),
    asTable(["at the peak", "bytes", "share"], shares),
  );
}
