"""`qsync comm`: how fast codecs are on this processor."""

from __future__ import annotations

import json

import pytest

from qsync_fx.cli import main


def test_bench_says_how_fast_codecs_are_against_memcpy(capsys: pytest.CaptureFixture[str]) -> None:
    how = ["comm", "bench", "--megabytes", "0.5", "--repeats", "2", "--codec", "qsgd8", "--codec", "1bit*"]
    assert main(how) == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed[0].split()[:1] == ["codec"]
    assert [line.split()[:2] for line in printed[1:]] == [["qsgd8", "8.062"], ["1bit*", "2.000"]]
    assert main([*how, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [row["codec"] for row in found] == ["qsgd8", "1bit*"]
    assert all(row[kind] > 0 for row in found for kind in ("encode", "decode", "copy", "encode_to_copy"))


def test_what_bench_cannot_take_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["comm", "bench", "--codec", "qsgd9"]) == 2
    assert "did you mean 'qsgd" in capsys.readouterr().err
    assert main(["comm", "bench", "--repeats", "0"]) == 2
    assert "repeats is 0" in capsys.readouterr().err
