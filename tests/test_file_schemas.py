"""JSON Schemas in docs/schemas against the files that qsync_fx writes and reads.

`QSYNC_UPDATE_DOCS=1 pytest tests/test_file_schemas.py` writes changed schemas.
"""

from __future__ import annotations

import json
import os
import tomllib
from pathlib import Path

import jsonschema
import pytest
import torch
from torch import nn

import qsync_fx
from tests.support.json_schemas import schemas

FOLDER = Path(__file__).resolve().parent.parent / "docs" / "schemas"


@pytest.mark.parametrize("name", ["plan", "cluster-plan", "cluster", "profile"])
def test_schema_equals_the_dataclass(name: str) -> None:
    path, text = FOLDER / f"{name}.schema.json", json.dumps(schemas()[name], indent=1) + "\n"
    if os.environ.get("QSYNC_UPDATE_DOCS"):
        path.write_text(text)
    jsonschema.Draft202012Validator.check_schema(json.loads(text))
    assert path.read_text() == text, (
        "the schema is out of date: QSYNC_UPDATE_DOCS=1 pytest tests/test_file_schemas.py"
    )


def validate(name: str, value: object) -> None:
    jsonschema.validate(value, schemas()[name], jsonschema.Draft202012Validator)


def test_written_files_follow_their_schemas(tmp_path: Path) -> None:
    plan = qsync_fx.Plan("int8", [("head", "fp32")], {"body/linear": "bf16"})
    plan.save(tmp_path / "plan.json")
    fleet = qsync_fx.ClusterPlan(
        {"t4": plan}, ranks=["t4"], batches={"t4": 8}, memory_budgets={"t4": 0.5}
    )
    fleet.save(tmp_path / "cluster-plan.json")
    model = nn.Linear(8, 4)
    qsync_fx.catalog_profile(
        "t4", model, lambda m, x: m(x).square().mean(), torch.randn(4, 8)
    ).save(tmp_path / "profile.json")
    for name in ("plan", "cluster-plan", "profile"):
        validate(name, json.loads((tmp_path / f"{name}.json").read_text()))


def test_cluster_file_follows_its_schema(tmp_path: Path) -> None:
    text = "[devices.t4]\ncount = 4\ndevice = 't4'\n[network]\nbandwidth = 1e9\n"
    (tmp_path / "cluster.toml").write_text(text)
    assert qsync_fx.Cluster.load(tmp_path / "cluster.toml").ranks == 4
    validate("cluster", tomllib.loads(text))


def test_wrong_files_violate_their_schemas() -> None:
    with pytest.raises(jsonschema.ValidationError):
        validate("plan", {"format": "qsync-plan", "version": 1, "defualt": "int8"})
    with pytest.raises(jsonschema.ValidationError):
        validate("cluster", {"devices": {"t4": {"cuont": 4}}})
