"""Reports: a single file without external resources, whose tabs render without errors."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import qsync_fx
from qsync_fx.cli import main
from qsync_fx.errors import OptionError, QSyncError
from qsync_fx.predictor.indicator.sensitivity_map import Sensitivity
from qsync_fx.report import Report, document
from tests.report.browser import needs_chromium, rendered, result_of, with_script
from tests.report.conftest import Fleet, bert_of, even_sensitivity, planned
from tests.support import tiers

MARKS = {
    "summary": ("facts", "sentences"),
    "graph": ('class="node"', 'class="edge"', 'type="range"'),
    "plan": ('class="heat"', 'class="cell"'),
    "timeline": ("<figure", 'aria-label="bar"'),
    "tradeoff": ('aria-label="dot"', 'aria-pressed="true"'),
    "trust": ('aria-label="dot"', "Predictions differ"),
    "sensitivity": ('aria-label="dot"', "Show as a table"),
    "memory": ('aria-label="area"', "peak of"),
}
"""Parts that the HTML of a rendered tab has."""


def whole_report(fleet: Fleet) -> Report:
    values = (fleet.answer, fleet.front, fleet.profiles, fleet.explanation)
    return Report(*values, title="BERT on a fleet")


def data_of(page: str) -> Any:
    match = re.search(r'<script type="application/json" id="qsync-report">(.*?)</script>', page)
    assert match is not None
    return json.loads(match[1])


def panel(dom: str, tab: str) -> str:
    """Return the HTML of a tab's panel."""
    return dom.split(f'id="panel-{tab}"')[1].split('role="tabpanel"')[0]


def check_page(path: Path, tabs: list[str]) -> None:
    """Check that each tab of a page renders its parts, and that the console has no message."""
    for tab in tabs:
        dom, messages = rendered(path, f"#{tab}")
        assert not messages, (tab, messages)
        for mark in MARKS[tab]:
            assert mark in panel(dom, tab), (tab, mark)


def test_the_document_has_a_tab_for_each_kind_of_data(fleet: Fleet) -> None:
    report = whole_report(fleet)
    data = data_of(report.html())
    assert (data["format"], data["version"]) == (document.FORMAT, document.VERSION)
    # Profiles of the catalog were not measured, so no prediction can be compared.
    assert list(data["tabs"]) == [tab for tab in document.ORDER if tab != "trust"]
    plan = data["tabs"]["plan"]
    assert [item["name"] for item in plan["devices"]] == ["v100", "t4"]
    part = fleet.answer.problem.classes["t4"]
    for layer in plan["layers"]:
        planned_format = fleet.answer.plans["t4"][layer["id"]]
        assert layer["cells"][1][0] == part.runs(layer["id"], planned_format)
    variants = data["tabs"]["timeline"]["variants"]
    assert variants[0]["seconds"] == pytest.approx(fleet.answer.evaluation.seconds, rel=1e-4)
    names = [entry["name"] for entry in data["tabs"]["graph"]["passes"]]
    assert names == fleet.explanation.passes
    for item in data["tabs"]["memory"]["devices"]:
        peak = max(sum(sizes) for _, _, sizes in item["moments"])
        assert peak == fleet.answer.evaluation.classes[item["name"]].peak_bytes


def test_the_graph_has_the_formats_after_each_pass(fleet: Fleet) -> None:
    graph = Report(fleet.explanation).document["tabs"]["graph"]
    passes = {entry["name"]: entry for entry in graph["passes"]}
    last = passes["lower"]["formats"]
    wanted = {str(op.id): str(op.precision) for op in fleet.explanation.operators}
    for index, node in enumerate(graph["nodes"]):
        precision = last[index][0]
        assert str(precision) == wanted[node["id"]]
        assert node["reason"]
    assert not any(fmt for fmt, _ in passes["normalize"]["formats"].values())
    assert not passes["cascade"]["casts"]
    casts = passes["insert_casts"]["casts"]
    assert casts
    # Operands and a bias: a cast counts once, regardless of its number of nodes.
    assert all(len(formats) <= 3 for formats in casts.values())
    assert any(line.startswith("+") for line in passes["insert_casts"]["diff"])


@needs_chromium
def test_each_tab_renders(fleet: Fleet, tmp_path: Path) -> None:
    report = whole_report(fleet)
    path = report.save(tmp_path / "report.html")
    assert path.stat().st_size < 2e6
    check_page(path, list(report.document["tabs"]))


@tiers.ALL
@needs_chromium
@pytest.mark.timeout(900)
def test_each_tab_of_bert_base_renders(tmp_path: Path) -> None:
    report = whole_report(planned(*bert_of({"vocab_size": 30522})))
    path = report.save(tmp_path / "report.html")
    assert path.stat().st_size < 2e6
    check_page(path, list(report.document["tabs"]))


@tiers.ALL
@needs_chromium
@pytest.mark.timeout(900)
def test_each_tab_of_a_resnet_renders(tmp_path: Path) -> None:
    from transformers import ResNetConfig, ResNetForImageClassification

    config = ResNetConfig(depths=[3, 4, 6, 3], layer_type="bottleneck", num_labels=10)
    model = ResNetForImageClassification(config).train()
    batch = {"pixel_values": torch.randn(8, 3, 64, 64), "labels": torch.zeros(8).long()}
    report = whole_report(planned(model, batch))
    path = report.save(tmp_path / "report.html")
    assert path.stat().st_size < 2e6
    check_page(path, list(report.document["tabs"]))


@needs_chromium
def test_a_console_message_is_detected(tmp_path: Path) -> None:
    path = Report(qsync_fx.Plan.uniform("int8")).save(tmp_path / "report.html")
    _, messages = rendered(with_script(path, "return missing.name;"))
    assert any("missing is not defined" in line for line in messages)


def test_the_bundle_is_built_from_the_sources() -> None:
    """`make report-bundle` rebuilds both files after a change of web/."""
    folder = Path(document.__file__).parent
    sources = [folder / "web/package-lock.json", *sorted((folder / "web/src").iterdir())]
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()
    assert (folder / "bundle.js").read_text().splitlines()[-1] == f"// sources {digest}"


def test_a_page_loads_no_other_file(fleet: Fleet) -> None:
    page = whole_report(fleet).html()
    markup = re.sub(r"<script.*?</script>", "", page, flags=re.DOTALL)
    assert not re.search(r"<(link|img|script|iframe)\b", markup)
    assert not re.search(r"<script[^>]*\bsrc=", page)
    assert "@import" not in page
    assert "default-src 'none'" in markup


@needs_chromium
def test_keys_move_between_tabs_and_operators(fleet: Fleet, tmp_path: Path) -> None:
    path = whole_report(fleet).save(tmp_path / "report.html")
    script = """
      const press = (element, key) =>
        element.dispatchEvent(new KeyboardEvent("keydown", {key, bubbles: true}));
      const selected = () => document.querySelector('[role=tab][aria-selected=true]').dataset.tab;
      const seen = [selected()];
      for (const key of ["ArrowRight", "End", "ArrowRight", "ArrowLeft", "Home", "ArrowRight"]) {
        press(document.activeElement.dataset.tab ? document.activeElement
          : document.querySelector('[role=tab][aria-selected=true]'), key);
        seen.push(selected());
      }
      const node = document.querySelector("#panel-graph .node");
      node.focus();
      press(node, "ArrowDown");
      seen.push(document.activeElement !== node && document.activeElement.matches(".node"));
      const search = document.querySelector("#panel-graph input[type=search]");
      search.value = "query";
      search.dispatchEvent(new Event("input"));
      press(search, "Enter");
      seen.push(document.querySelector("#panel-graph .detail strong").textContent);
      const slider = document.querySelector("#panel-graph input[type=range]");
      slider.value = 0;
      slider.dispatchEvent(new Event("input"));
      seen.push(document.querySelector("#panel-graph .controls strong").textContent);
      return seen.join(" ");
    """
    dom, messages = rendered(with_script(path, script))
    assert not messages
    tabs = "summary graph memory summary memory summary graph"
    operator = "bert.encoder.layer.0.attention.self.query/linear"
    assert result_of(dom) == f"{tabs} true {operator} normalize (1 of 8)"


@needs_chromium
def test_names_of_the_model_are_text(tmp_path: Path) -> None:
    operator = "a</script><script>missing.name</script>/linear"
    sensitivity = Sensitivity("second_order", "<b>Net</b>", {operator: {"int8": 1.0}})
    path = Report(sensitivity, title="<i>title</i>").save(tmp_path / "report.html")
    dom, messages = rendered(path, "#sensitivity")
    assert not messages
    assert "<b>Net" not in dom
    assert "&lt;i&gt;title" in dom


def small_model() -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    layers = [nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 8)]
    return nn.Sequential(*layers), torch.randn(4, 32)


@needs_chromium
def test_values_save_their_own_reports(tmp_path: Path) -> None:
    model, x = small_model()
    profile = qsync_fx.measure(
        model,
        lambda model, x: model(x).square().mean(),
        [x],
        precisions=["fp32", "int8"],
        optimizer=torch.optim.SGD(model.parameters(), 1e-2),
    )
    plan = qsync_fx.Plan.uniform("int8").with_precision("2", "fp32")
    explanation = qsync_fx.explain(model, x, options={"plan": plan})
    fast = torch.compile(model, backend="qsync", options={"plan": plan})
    fast(x).square().mean().backward()
    values = {
        "plan": (plan, ["summary"]),
        "explanation": (explanation, ["summary", "graph", "plan"]),
        "profile": (profile, ["summary", "timeline", "trust", "sensitivity", "memory"]),
        "timeline": (qsync_fx.replay(plan, profile), ["summary", "timeline"]),
        "coverage": (qsync_fx.plan_coverage(model), ["summary", "plan"]),
        "cluster plan": (qsync_fx.ClusterPlan({"cpu": plan}), ["summary"]),
    }
    for name, (value, tabs) in values.items():
        path = value.save_html(tmp_path / f"{name}.html")
        available = list(data_of(path.read_text())["tabs"])
        if name == "profile" and profile.sensitivity is None:
            tabs = [tab for tab in tabs if tab != "sensitivity"]
        assert available == tabs, name
        dom, messages = rendered(path)
        assert not messages, name
        assert panel(dom, "summary").count("<li>") >= 1, name
        assert value._repr_html_().startswith("<iframe srcdoc=")
    check_page(tmp_path / "profile.html", ["timeline", "trust", "memory"])


def test_other_values_are_errors(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="a value of type int has no report"):
        Report(3)
    with pytest.raises(OptionError, match="at least one value"):
        qsync_fx.save_report(tmp_path / "report.html")
    with pytest.raises(QSyncError, match="cannot be written"):
        qsync_fx.Plan.uniform("int8").save_html(tmp_path / "missing" / "report.html")


def test_the_verb_writes_the_tabs_of_its_files(
    fleet: Fleet,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, profile in fleet.profiles.items():
        profile.save(f"{name}.json")
    fleet.sensitivity.save("sensitivity.json")
    fleet.answer.save("plan.json")
    Path("cluster.toml").write_text(
        "[devices.v100]\ncount = 8\nbatch = 8\n\n[devices.t4]\ncount = 8\nbatch = 8\n\n"
        "[network]\nbandwidth = 1.25e10\nlatency = 3e-5\n"
    )
    files = ["--profile", "v100=v100.json", "--profile", "t4=t4.json", "--cluster", "cluster.toml"]
    assert main(["report", *files, "--sensitivity", "sensitivity.json", "--points", "3"]) == 0
    tabs = ["summary", "plan", "timeline", "tradeoff", "sensitivity", "memory"]
    assert list(data_of(Path("report.html").read_text())["tabs"]) == tabs
    assert main(["report", *files, "--plan", "plan.json", "-o", "replayed.html"]) == 0
    tabs = ["summary", "plan", "timeline", "memory"]
    assert list(data_of(Path("replayed.html").read_text())["tabs"]) == tabs
    assert main(["report", *files]) == 0
    assert "no plan is computed" in capsys.readouterr().err
    assert main(["report"]) == 2
    assert "nothing to report on" in capsys.readouterr().err


def test_the_verb_explains_a_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("nets_of_report.py").write_text(
        "import torch\n"
        "def small():\n"
        "    return torch.nn.Sequential(torch.nn.Linear(8, 8)), (torch.randn(2, 8),)\n"
    )
    assert main(["report", "nets_of_report:small", "--precision", "int8", "--json"]) == 0
    assert list(json.loads(capsys.readouterr().out)["tabs"]) == ["summary", "graph", "plan"]


def test_the_graph_of_a_profiled_model_is_that_of_the_computed_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("nets_to_plan.py").write_text(
        "import torch\n"
        "def small():\n"
        "    layers = torch.nn.Linear(256, 512), torch.nn.ReLU(), torch.nn.Linear(512, 256)\n"
        "    return torch.nn.Sequential(*layers), (torch.randn(256, 256),)\n"
    )
    model, batch = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 256)), [1.0]

    def step(model: nn.Module, _: object) -> torch.Tensor:
        result: torch.Tensor = model(torch.randn(256, 256)).square().mean()
        return result

    profile = qsync_fx.catalog_profile("t4", model, step, batch, ["fp32", "int8"])
    sensitivity = even_sensitivity(profile)
    plan = qsync_fx.find_plan(profile, sensitivity=sensitivity).plan()
    profile.save("t4.json")
    sensitivity.save("sensitivity.json")
    files = ["--profile", "t4.json", "--sensitivity", "sensitivity.json"]
    assert main(["report", "nets_to_plan:small", *files, "--points", "0"]) == 0
    graph = data_of(Path("report.html").read_text())["tabs"]["graph"]
    formats = graph["passes"][-1]["formats"]
    shown = {node["id"]: formats[str(index)][0] for index, node in enumerate(graph["nodes"])}
    assert {str(op): fmt.name for op, fmt in plan.operators.items()}.items() <= shown.items()
