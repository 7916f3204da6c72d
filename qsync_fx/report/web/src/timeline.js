// Timeline: tracks of each device class in a step, of one plan or of two below each other.
import * as Plot from "@observablehq/plot";
import { choice, el, kindColour, legend, seconds, table, width } from "./dom.js";

const KINDS = ["forward", "backward", "cast", "outside", "optimizer", "waiting", "sending"];

export function timeline(data) {
  const longest = Math.max(...data.variants.map((item) => item.seconds)) * 1e6;
  let from = 0;
  let until = longest;
  let device = -1;
  const charts = el("div");
  const span = el("span", { class: "muted", "aria-live": "polite" });
  const names = [...new Set(data.variants.flatMap((item) => item.devices.map((part) => part.name)))];

  function draw() {
    span.textContent = `${seconds(from / 1e6)} to ${seconds(until / 1e6)}`;
    charts.replaceChildren(...data.variants.map((item) => variant(data, item, from, until, device < 0 ? null : names[device])));
  }

  function zoom(factor, shift) {
    const size = Math.min(longest, Math.max(longest / 2000, (until - from) * factor));
    const middle = (from + until) / 2 + shift * size;
    from = Math.min(Math.max(0, middle - size / 2), longest - size);
    until = from + size;
    draw();
  }

  function keys(event) {
    const action = { "+": [0.5, 0], "-": [2, 0], ArrowLeft: [1, -0.25], ArrowRight: [1, 0.25], 0: [1e9, 0] }[event.key];
    if (!action) return;
    event.preventDefault();
    zoom(...action);
  }

  draw();
  const button = (text, label, ...change) => el("button", { "aria-label": label, title: label, onclick: () => zoom(...change) }, text);
  return el(
    "div",
    {},
    el(
      "div",
      { class: "controls" },
      names.length > 1 ? choice("Devices", ["all", ...names], (index) => { device = index - 1; draw(); }) : null,
      button("+", "zoom in", 0.5, 0),
      button("−", "zoom out", 2, 0),
      button("←", "earlier", 1, -0.25),
      button("→", "later", 1, 0.25),
      button("whole step", "show the whole step", 1e9, 0),
      span,
    ),
    legend(KINDS.filter((kind) => data.kinds.includes(kind)).map((kind) => [kind, kindColour(kind)])),
    el("p", { class: "muted" }, "A step ends when the next one can begin on all devices: a track may end later, or begin after 0."),
    el("div", { class: "frame", tabindex: 0, role: "group", "aria-label": "Timelines: plus and minus zoom, arrow keys move", onkeydown: keys }, charts),
    totals(data),
  );
}

function variant(data, item, from, until, only) {
  const rows = [];
  const tracks = [];
  for (const device of item.devices) {
    if (only && device.name !== only) continue;
    const shown = device.count > 1 ? `${device.count} × ${device.name}` : device.name;
    for (const [kind, pieces] of [["computing", device.computing], ["sending", device.communicating]]) {
      if (!pieces.length) continue;
      const track = `${shown}\n${kind}`;
      tracks.push(track);
      for (const [name, type, begin, end] of pieces) {
        if (end < from || begin > until) continue;
        rows.push({ track, name: data.names[name], kind: data.kinds[type], begin: Math.max(begin, from) / 1e3, end: Math.min(end, until) / 1e3, length: (end - begin) / 1e6 });
      }
    }
  }
  const chart = Plot.plot({
    width: width(),
    height: 70 + 44 * tracks.length,
    marginLeft: 120,
    marginBottom: 44,
    x: { label: "milliseconds", domain: [from / 1e3, until / 1e3], grid: true },
    y: { domain: tracks, label: null, padding: 0.15 },
    marks: [
      Plot.barX(rows, {
        x1: "begin",
        x2: "end",
        y: "track",
        fill: (row) => kindColour(row.kind),
        stroke: "var(--page)",
        strokeWidth: 0.3,
        title: (row) => `${row.name}\n${row.kind}: ${seconds(row.length)}`,
        tip: true,
      }),
    ],
  });
  return el("figure", {}, el("figcaption", {}, `${item.label}: ${seconds(item.seconds)} per step`), chart);
}

function totals(data) {
  const kinds = KINDS.filter((kind) => data.kinds.includes(kind));
  const rows = data.variants.flatMap((item) =>
    item.devices.map((device) => {
      const sums = kinds.map(() => 0);
      for (const [, kind, begin, end] of device.computing) sums[kinds.indexOf(data.kinds[kind])] += (end - begin) / 1e6;
      return [item.label, device.name, seconds(item.seconds), ...sums.map(seconds)];
    }),
  );
  return el("div", {}, el("h2", {}, "Seconds of one device"), table(["plan", "device", "step", ...kinds], rows, 2));
}
