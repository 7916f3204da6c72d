// Graph: operators by module, coloured by the format that they have after a pass.
import { Graph, layout } from "@dagrejs/dagre";
import { bytes, el, formatColour, formatLegend, inkOn, scaled, svg } from "./dom.js";

const MOST_VISIBLE = 40;
const LONGEST = 26;

export function graph(data, report) {
  const modules = modulesOf(data.nodes);
  const open = initiallyOpen(data.nodes, modules);
  const view = { x: 0, y: 0, width: 100, height: 100 };
  const canvas = svg("svg", { role: "group", "aria-label": "Operators: arrow keys move, Enter opens a module" });
  const detail = el("div", { class: "detail", "aria-live": "polite" }, "Select an operator for its reason, cost and source line, or a module to open it.");
  const search = el("input", { type: "search", placeholder: "part of an operator's id", oninput: mark, onkeydown: (event) => event.key === "Enter" && jump() });
  const matches = el("span", { class: "muted", "aria-live": "polite" });
  const passName = el("strong");
  const passText = el("div");
  const last = data.passes.length - 1;
  const slider = el("input", { type: "range", min: 0, max: last, value: last, "aria-label": "pass", oninput: () => draw() });
  let placed = new Map();
  let selected = null;
  let shownMatch = -1;

  const pass = () => data.passes[Number(slider.value)];
  const state = (index) => pass().formats[index] ?? [null, null];

  // The innermost open place of an operator: itself, or its outermost closed module.
  function visible(index) {
    for (const path of data.nodes[index].path) if (modules.has(path) && !open.has(path)) return path;
    return index;
  }

  function draw(focus = null) {
    const shown = new Map();
    data.nodes.forEach((_, index) => {
      const key = visible(index);
      if (!shown.has(key)) shown.set(key, []);
      shown.get(key).push(index);
    });
    const dag = new Graph({ compound: true });
    dag.setGraph({ rankdir: "TB", nodesep: 18, ranksep: 32, marginx: 12, marginy: 12 });
    dag.setDefaultEdgeLabel(() => ({}));
    for (const [key, indices] of shown) {
      const text = labels(key, indices);
      dag.setNode(String(key), { key, indices, text, width: 28 + 7.8 * Math.max(...text.map((line) => line.length)), height: text.length > 1 ? 44 : 28 });
    }
    const boxes = new Set();
    for (const [key, indices] of shown) {
      const outside = data.nodes[indices[0]].path.filter((path) => open.has(path) && path !== key);
      outside.forEach((path, depth) => {
        const name = `box ${path}`;
        if (!boxes.has(path)) {
          boxes.add(path);
          dag.setNode(name, { box: path });
        }
        if (depth) dag.setParent(name, `box ${outside[depth - 1]}`);
      });
      if (outside.length) dag.setParent(String(key), `box ${outside[outside.length - 1]}`);
    }
    for (const [source, reader] of data.edges) {
      const [from, to] = [visible(source), visible(reader)];
      if (from !== to) dag.setEdge(String(from), String(to));
    }
    layout(dag);
    placed = new Map();
    const layers = { boxes: [], edges: [], nodes: [] };
    for (const name of dag.nodes()) {
      const node = dag.node(name);
      if (node.box !== undefined) layers.boxes.push(box(node));
      else {
        node.element = drawNode(node);
        placed.set(node.key, node);
        layers.nodes.push(node.element);
      }
    }
    for (const edge of dag.edges()) layers.edges.push(drawEdge(dag.edge(edge).points));
    canvas.replaceChildren(arrow(), ...layers.boxes, ...layers.edges, ...layers.nodes);
    size = dag.graph();
    passName.textContent = `${pass().name} (${Number(slider.value) + 1} of ${data.passes.length})`;
    describePass();
    mark();
    if (focus !== null && placed.has(focus)) placed.get(focus).element.focus();
  }

  let size = { width: 100, height: 100 };

  function labels(key, indices) {
    if (typeof key === "string") return [cut(key.split(".").slice(-2).join(".")), `${indices.length} operators`];
    const node = data.nodes[key];
    const [precision, output] = state(key);
    const casts = (pass().casts[key] ?? []).length;
    const parts = [precision ? (output && output !== precision ? `${precision} → ${output}` : precision) : node.kind];
    if (casts) parts.push(casts > 1 ? `${casts} casts` : "1 cast");
    const name = node.module ? node.module.split(".").slice(-1)[0] : "";
    const title = name && open.has(node.module) === false ? `${name}/${node.operator}` : node.operator;
    return [cut(title), parts.join(", ")];
  }

  function drawNode(node) {
    const { key, indices, text, x, y, width, height } = node;
    const colours = shares(indices);
    const group = typeof key === "string";
    const left = x - width / 2;
    const single = colours.length === 1 && !group;
    const fill = single ? colours[0][0] : "var(--page)";
    const ink = single ? inkOn(fill) : "currentColor";
    const title = group ? `${key}: ${indices.length} operators, Enter opens it` : data.nodes[key].id;
    const stripes = [];
    if (!single) {
      const total = colours.reduce((sum, [, count]) => sum + count, 0);
      let start = left + 6;
      for (const [colour, count] of colours) {
        const length = ((width - 12) * count) / total;
        stripes.push(svg("rect", { x: start, y: y + height / 2 - 7, width: length, height: 4, fill: colour, style: "stroke:none" }));
        start += length;
      }
    }
    return svg(
      "g",
      { class: selected === key ? "node selected" : "node", tabindex: 0, role: "button", "aria-label": title, onclick: () => activate(key), onkeydown: (event) => keys(event, key) },
      svg("rect", { x: left, y: y - height / 2, width, height, rx: group ? 2 : 8, fill: fill === "transparent" ? "var(--page)" : fill, "stroke-width": group ? 2 : 1, "stroke-dasharray": !group && data.nodes[key].kind === "fixed" ? "4 2" : null }),
      stripes,
      svg("text", { x, y: y - 5, "text-anchor": "middle", fill: ink, style: "font-weight:600" }, group ? `▸ ${text[0]}` : text[0]),
      svg("text", { x, y: y + 11, "text-anchor": "middle", fill: ink }, text[1]),
      svg("title", {}, title),
    );
  }

  function shares(indices) {
    const counts = new Map();
    for (const index of indices) {
      const colour = formatColour(report, state(index)[0]);
      counts.set(colour, (counts.get(colour) ?? 0) + 1);
    }
    return [...counts].sort((a, b) => b[1] - a[1]);
  }

  function box(node) {
    const [x, y] = [node.x - node.width / 2, node.y - node.height / 2];
    return svg(
      "g",
      {},
      svg("rect", { class: "box", x, y, width: node.width, height: node.height, rx: 6 }),
      svg("text", { class: "boxname", x: x + 6, y: y + 13, tabindex: 0, role: "button", "aria-label": `close ${node.box}`, onclick: () => close(node.box), onkeydown: (event) => (event.key === "Enter" || event.key === " ") && (event.preventDefault(), close(node.box)) }, `▾ ${node.box}`),
    );
  }

  function close(path) {
    for (const other of [...open]) if (other === path || other.startsWith(`${path}.`)) open.delete(other);
    draw(path);
  }

  function activate(key) {
    if (typeof key === "string") {
      open.add(key);
      describeModule(key);
      const first = data.nodes.findIndex((node) => node.path.includes(key));
      draw(visible(first));
      center(visible(first));
    } else {
      selected = key;
      for (const node of placed.values()) node.element.classList.toggle("selected", node.key === key);
      describe(key);
    }
  }

  function keys(event, key) {
    if (event.key === "Enter" || event.key === " ") {
      event.preventDefault();
      activate(key);
      return;
    }
    const direction = { ArrowUp: [0, -1], ArrowDown: [0, 1], ArrowLeft: [-1, 0], ArrowRight: [1, 0] }[event.key];
    if (!direction) return;
    event.preventDefault();
    const from = placed.get(key);
    let best = null;
    for (const node of placed.values()) {
      const [dx, dy] = [node.x - from.x, node.y - from.y];
      const ahead = dx * direction[0] + dy * direction[1];
      if (ahead < 1) continue;
      const distance = ahead + 2 * Math.abs(dx * direction[1]) + 2 * Math.abs(dy * direction[0]);
      if (best === null || distance < best.distance) best = { node, distance };
    }
    if (best) {
      best.node.element.focus({ preventScroll: true });
      center(best.node.key);
    }
  }

  function describe(key) {
    const node = data.nodes[key];
    const [precision, output] = state(key);
    const lines = [["kind", node.kind], ["compute format", precision ?? "none yet"], ["output format", output ?? "as written"]];
    if (node.planned) lines.push(["planned format", node.planned]);
    const casts = pass().casts[key];
    if (casts) lines.push(["casts before it", casts.join(", ")]);
    lines.push(["reason", node.reason || "none"]);
    for (const [name, unit] of [["flops", ""], ["bytes", "B"], ["saved", "B"]])
      if (node[name] !== undefined) lines.push([{ flops: "operations", bytes: "bytes moved", saved: "saved for backward" }[name], unit === "B" && typeof node[name] === "number" ? bytes(node[name]) : scaled(node[name], unit)]);
    if (node.line) lines.push(["source", node.code ? `${node.line}: ${node.code}` : node.line]);
    detail.replaceChildren(el("strong", {}, node.id), ...lines.map(([name, text]) => el("p", {}, el("span", { class: "muted" }, `${name}: `), text)));
  }

  function describeModule(path) {
    const nodes = data.nodes.filter((node) => node.path.includes(path));
    const sum = (name) => nodes.reduce((total, node) => total + (typeof node[name] === "number" ? node[name] : 0), 0);
    detail.replaceChildren(
      el("strong", {}, path),
      el("p", {}, `${nodes.length} operators`),
      el("p", {}, `${scaled(sum("flops"))} operations, ${bytes(sum("bytes"))} moved, ${bytes(sum("saved"))} saved for backward`),
    );
  }

  function describePass() {
    const { diff, nodes } = pass();
    const lines = [];
    if (diff.length) lines.push(el("details", {}, el("summary", {}, `${diff.length} changed lines`), el("pre", { tabindex: 0 }, diff.join("\n"))));
    passText.replaceChildren(el("span", { class: "muted" }, `${nodes} nodes`), ...lines);
  }

  function mark() {
    const text = search.value.toLowerCase();
    const results = text ? data.nodes.map((node, index) => (node.id.toLowerCase().includes(text) ? index : -1)).filter((index) => index >= 0) : [];
    const keys = new Set(results.map(visible));
    for (const node of placed.values()) node.element.classList.toggle("match", keys.has(node.key));
    matches.textContent = text ? `${results.length} operators; Enter shows the next` : "";
    return results;
  }

  function jump() {
    const results = mark();
    if (!results.length) return;
    shownMatch = results.find((index) => index > shownMatch) ?? results[0];
    for (const path of data.nodes[shownMatch].path) if (modules.has(path)) open.add(path);
    draw();
    activate(shownMatch);
    center(shownMatch);
  }

  function apply() {
    canvas.setAttribute("viewBox", `${view.x} ${view.y} ${view.width} ${view.height}`);
  }

  function center(key) {
    const node = placed.get(key);
    if (!node) return;
    view.x = node.x - view.width / 2;
    view.y = node.y - view.height / 2;
    apply();
  }

  function scale(factor, x = view.x + view.width / 2, y = view.y + view.height / 2) {
    view.x = x - (x - view.x) * factor;
    view.y = y - (y - view.y) * factor;
    view.width *= factor;
    view.height *= factor;
    apply();
  }

  // The full width, from the top: a deep model would be too small to read if it was shown in full.
  function fit(full = false) {
    const { clientWidth, clientHeight } = holder;
    const ratio = (clientHeight || 500) / (clientWidth || 800);
    let width = Math.max(size.width, full ? size.height / ratio : 0, 900);
    if (!full) width = Math.min(width, 1400);
    view.width = width;
    view.height = width * ratio;
    view.x = (size.width - width) / 2;
    view.y = full ? (size.height - view.height) / 2 : 0;
    apply();
  }

  const holder = el("div", { class: "canvas" }, canvas);
  let drag = null;
  const unit = () => view.width / (holder.clientWidth || 1);
  canvas.addEventListener("pointerdown", (event) => { drag = [event.clientX, event.clientY]; });
  window.addEventListener("pointerup", () => { drag = null; });
  canvas.addEventListener("pointermove", (event) => {
    if (!drag || !event.buttons) return;
    view.x -= (event.clientX - drag[0]) * unit();
    view.y -= (event.clientY - drag[1]) * unit();
    drag = [event.clientX, event.clientY];
    apply();
  });
  canvas.addEventListener("wheel", (event) => {
    event.preventDefault();
    const area = holder.getBoundingClientRect();
    scale(event.deltaY > 0 ? 1.15 : 1 / 1.15, view.x + (event.clientX - area.left) * unit(), view.y + (event.clientY - area.top) * unit());
  }, { passive: false });

  const used = new Set(data.passes.flatMap((item) => Object.values(item.formats).map((fmt) => fmt[0])).filter(Boolean));
  const button = (text, label, action) => el("button", { "aria-label": label, title: label, onclick: action }, text);
  draw();
  requestAnimationFrame(() => selected === null && fit());
  fit();
  return el(
    "div",
    {},
    el(
      "div",
      { class: "controls" },
      el("label", { class: "control" }, "After pass ", slider),
      passName,
      el("label", { class: "control" }, "Search ", search),
      matches,
      button("+", "zoom in", () => scale(1 / 1.3)),
      button("−", "zoom out", () => scale(1.3)),
      button("fit", "show the whole graph", () => fit(true)),
      button("close all", "close all modules", () => { open.clear(); draw(); fit(); }),
    ),
    formatLegend(report, used),
    passText,
    el("div", { class: "columns" }, holder, detail),
  );
}

// Modules with several operators; one with a single operator is shown as that operator.
function modulesOf(nodes) {
  const counts = new Map();
  for (const node of nodes) {
    const parts = node.module ? node.module.split(".") : [];
    node.path = parts.map((_, index) => parts.slice(0, index + 1).join("."));
    for (const path of node.path) counts.set(path, (counts.get(path) ?? 0) + 1);
  }
  return new Set([...counts].filter(([, count]) => count > 1).map(([path]) => path));
}

function initiallyOpen(nodes, modules) {
  let open = new Set();
  for (let depth = 1; ; depth += 1) {
    const next = new Set([...open, ...[...modules].filter((path) => path.split(".").length === depth)]);
    const count = new Set(nodes.map((node, index) => node.path.find((path) => modules.has(path) && !next.has(path)) ?? index)).size;
    if (count > MOST_VISIBLE || next.size === open.size) return open;
    open = next;
  }
}

function arrow() {
  return svg("defs", {}, svg("marker", { id: "arrow", viewBox: "0 0 8 8", refX: 7, refY: 4, markerWidth: 7, markerHeight: 7, orient: "auto" }, svg("path", { d: "M0 0 L8 4 L0 8 z", fill: "var(--muted)" })));
}

function drawEdge(points) {
  return svg("path", { class: "edge", d: points.map(({ x, y }, index) => `${index ? "L" : "M"}${x} ${y}`).join(" "), "marker-end": "url(#arrow)" });
}

function cut(text) {
  return text.length > LONGEST ? `…${text.slice(1 - LONGEST)}` : text;
}
