// Elements, texts of numbers, and colours that all tabs share.

// Okabe and Ito, "Color Universal Design", 2008: distinguishable with each kind of colour blindness.
const FORMAT_COLOURS = [
  "#767676", // fp64
  "#999999", // fp32
  "#cc79a7", // tf32
  "#56b4e9", // bf16
  "#0072b2", // fp16
  "#009e73", // fp8
  "#f0e442", // fp8_e5m2
  "#e69f00", // int8
  "#d55e00", // int8_grad
];
export const SERIES_COLOURS = [
  "#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#f0e442", "#999999",
];
const KIND_COLOURS = {
  forward: "#0072b2",
  backward: "#56b4e9",
  cast: "#e69f00",
  outside: "#999999",
  optimizer: "#009e73",
  waiting: "#d55e00",
  sending: "#cc79a7",
};

export function el(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value !== null && value !== undefined && value !== false) element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return element;
}

export function svg(tag, attributes = {}, ...children) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value !== null && value !== undefined) element.setAttribute(name, value);
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return element;
}

export function seconds(value) {
  if (value === null || value === undefined) return "?";
  const size = Math.abs(value);
  if (size < 1e-12) return "0";
  if (size >= 1) return `${precise(value)} s`;
  if (size >= 1e-3) return `${precise(value * 1e3)} ms`;
  return `${precise(value * 1e6)} µs`;
}

export function bytes(value) {
  return value === null || value === undefined ? "?" : scaled(value, "B");
}

export function scaled(value, unit = "") {
  if (typeof value === "string") return `${value} ${unit}`.trim();
  if (!value) return "0";
  const steps = ["", "K", "M", "G", "T", "P"];
  let step = 0;
  while (Math.abs(value) >= 1000 && step < steps.length - 1) {
    value /= 1000;
    step += 1;
  }
  return `${precise(value)} ${steps[step]}${unit}`.trim();
}

export function precise(value) {
  if (value === null || value === undefined) return "?";
  const size = Math.abs(value);
  return size && (size < 1e-3 || size >= 1e6) ? scientific(value) : String(Number(value.toPrecision(3)));
}

function scientific(value) {
  const [digits, power] = value.toExponential(2).split("e");
  return `${Number(digits)}e${Number(power)}`;
}

// Powers of ten at the ticks of a logarithmic axis: 1e-6, never 1µ.
export function power(value) {
  const [digits, exponent] = value.toExponential(0).split("e");
  return digits === "1" ? `1e${Number(exponent)}` : "";
}

export function formatColour(report, name) {
  const fmt = report.formats.find((item) => item.name === name);
  return fmt ? FORMAT_COLOURS[fmt.colour % FORMAT_COLOURS.length] : "transparent";
}

// Names of formats stand on their colour: black or white, whichever has more contrast.
export function inkOn(colour) {
  if (!colour.startsWith("#")) return "currentColor";
  const [red, green, blue] = [1, 3, 5].map((index) => parseInt(colour.slice(index, index + 2), 16) / 255);
  const linear = [red, green, blue].map((part) => (part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4));
  const luminance = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2];
  return luminance > 0.18 ? "#000" : "#fff";
}

export function kindColour(kind) {
  return KIND_COLOURS[kind] ?? "#999999";
}

export function legend(entries) {
  return el(
    "ul",
    { class: "legend" },
    entries.map(([name, colour]) => el("li", {}, el("span", { class: "swatch", style: `background:${colour}` }), name)),
  );
}

export function formatLegend(report, used) {
  const shown = report.formats.filter((fmt) => used.has(fmt.name));
  return legend(shown.map((fmt) => [fmt.name, formatColour(report, fmt.name)]));
}

export function table(columns, rows, numeric = 1) {
  const cells = (row, tag) => row.map((cell, index) => el(tag, { class: index >= numeric ? "number" : null }, cell ?? ""));
  return el(
    "div",
    { class: "scroll" },
    el("table", {}, el("thead", {}, el("tr", {}, cells(columns, "th"))), el("tbody", {}, rows.map((row) => el("tr", {}, cells(row, "td"))))),
  );
}

// The same numbers for readers of text: a chart alone is no use to a screen reader.
export function asTable(columns, rows, numeric = 1) {
  return el("details", {}, el("summary", {}, "Show as a table"), table(columns, rows, numeric));
}

export function choice(label, options, onchange) {
  const select = el("select", { onchange: () => onchange(Number(select.value)) }, options.map((text, index) => el("option", { value: index }, text)));
  return el("label", { class: "control" }, `${label} `, select);
}

export function width() {
  return Math.max(320, Math.min(1400, document.documentElement.clientWidth - 64));
}
