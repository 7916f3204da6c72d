// Page of a report: reads the document, and shows one tab for each part that it has.
import { el } from "./dom.js";
import { summary } from "./summary.js";
import { graph } from "./graph.js";
import { plan } from "./plan.js";
import { timeline } from "./timeline.js";
import { tradeoff } from "./tradeoff.js";
import { trust } from "./trust.js";
import { sensitivity } from "./sensitivity.js";
import { memory } from "./memory.js";

const FORMAT = "qsync-report";
const VERSION = 1;
const TABS = { summary, graph, plan, timeline, tradeoff, trust, sensitivity, memory };
const TITLES = { tradeoff: "trade-off" };

function start() {
  const report = JSON.parse(document.getElementById(FORMAT).textContent);
  const root = document.getElementById("report");
  if (report.format !== FORMAT || report.version !== VERSION) {
    root.append(el("p", { role: "alert" }, `This page shows ${FORMAT} version ${VERSION}, not ${report.format} version ${report.version}.`));
    return;
  }
  const names = Object.keys(report.tabs).filter((name) => name in TABS);
  const buttons = new Map();
  const panels = new Map();
  const rendered = new Set();

  function show(name, focus = false) {
    for (const other of names) {
      const active = other === name;
      buttons.get(other).setAttribute("aria-selected", String(active));
      buttons.get(other).tabIndex = active ? 0 : -1;
      panels.get(other).hidden = !active;
    }
    if (!rendered.has(name)) {
      rendered.add(name);
      panels.get(name).append(TABS[name](report.tabs[name], report));
    }
    if (focus) buttons.get(name).focus();
    if (location.hash !== `#${name}`) history.replaceState(null, "", `#${name}`);
  }

  function move(event) {
    const index = names.indexOf(event.currentTarget.dataset.tab);
    const last = names.length - 1;
    const target = {
      ArrowRight: index === last ? 0 : index + 1,
      ArrowLeft: index === 0 ? last : index - 1,
      Home: 0,
      End: last,
    }[event.key];
    if (target === undefined) return;
    event.preventDefault();
    show(names[target], true);
  }

  for (const name of names) {
    buttons.set(
      name,
      el(
        "button",
        { role: "tab", id: `tab-${name}`, "aria-controls": `panel-${name}`, "data-tab": name, onclick: () => show(name), onkeydown: move },
        TITLES[name] ?? name,
      ),
    );
    panels.set(name, el("section", { role: "tabpanel", id: `panel-${name}`, "aria-labelledby": `tab-${name}`, tabindex: 0, hidden: true }));
  }
  root.append(
    el("header", {}, el("h1", {}, report.title), el("nav", { role: "tablist", "aria-label": "Parts of the report" }, [...buttons.values()])),
    el("main", {}, [...panels.values()]),
  );
  const wanted = location.hash.slice(1);
  show(names.includes(wanted) ? wanted : names[0]);
  window.addEventListener("hashchange", () => {
    if (names.includes(location.hash.slice(1))) show(location.hash.slice(1));
  });
}

start();
