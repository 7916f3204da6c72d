"""Data and digests of the demo: damaged MNIST files are errors, and a single changed bit changes
the digest.
"""

from __future__ import annotations

import gzip
import importlib
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from tests.support.processes.demo_runs import EXAMPLES


@pytest.fixture(scope="module")
def example() -> Iterator[Any]:
    """Import modules of the example, and unload them afterwards, as their names are too general."""
    before = set(sys.modules)
    sys.path.insert(0, str(EXAMPLES))

    def load(name: str) -> ModuleType:
        return importlib.import_module(name)

    yield load
    sys.path.remove(str(EXAMPLES))
    for path in EXAMPLES.glob("*.py"):
        if path.stem not in before:
            sys.modules.pop(path.stem, None)


def test_digest_detects_a_single_bit(example: Any) -> None:
    model = example("models").ResNet(10)
    digest = example("training").digest
    before = digest(model)
    assert digest(model) == before
    names = list(model.state_dict())
    for name in (names[0], names[-1], "norm.running_var", "norm.num_batches_tracked"):
        tensor = model.state_dict()[name].view(-1).view(torch.uint8)
        tensor[0] ^= 1
        assert digest(model) != before, name
        tensor[0] ^= 1
    assert digest(model) == before


def idx(values: np.ndarray[Any, Any]) -> bytes:
    return (
        bytes((0, 0, 8, values.ndim))
        + struct.pack(f">{values.ndim}I", *values.shape)
        + values.tobytes()
    )


def write(folder: Path, zipped: bool = False, **changed: bytes) -> dict[str, np.ndarray[Any, Any]]:
    """Write a data set of random images, with contents from `changed`; return its values."""
    random = np.random.default_rng()
    values: dict[str, np.ndarray[Any, Any]] = {}
    for part, count in (("train", 7), ("t10k", 3)):
        values[f"{part}-images-idx3-ubyte"] = random.integers(0, 256, (count, 9, 13), np.uint8)
        values[f"{part}-labels-idx1-ubyte"] = random.integers(0, 10, count, np.uint8)
    folder.mkdir(exist_ok=True)
    for name, value in values.items():
        content = changed.get(name.partition("-idx")[0].replace("-", "_"), idx(value))
        (folder / f"{name}.gz").unlink(missing_ok=True)
        if zipped:
            (folder / f"{name}.gz").write_bytes(gzip.compress(content))
        else:
            (folder / name).write_bytes(content)
    return values


@pytest.mark.parametrize("zipped", [False, True])
def test_files_of_mnists_format_are_read(zipped: bool, tmp_path: Path, example: Any) -> None:
    values = write(tmp_path, zipped)
    dataset = example("data").load(str(tmp_path))
    for part, (images, labels) in (("train", dataset.train), ("t10k", dataset.test)):
        assert np.array_equal(images.squeeze(1).numpy(), values[f"{part}-images-idx3-ubyte"])
        assert np.array_equal(labels.numpy(), values[f"{part}-labels-idx1-ubyte"])
    normal = dataset.normalized(dataset.train[0])
    assert abs(normal.mean()) < 1e-5 and abs(normal.std(correction=0) - 1) < 1e-5


IMAGES = idx(np.zeros((7, 9, 13), np.uint8))


@settings(max_examples=50)
@given(
    damaged=st.one_of(
        st.binary(max_size=40),
        st.integers(0, len(IMAGES) - 1).map(lambda end: IMAGES[:end]),
        st.binary(min_size=1, max_size=9).map(lambda more: IMAGES + more),
        st.lists(st.integers(0, 2**32 - 1), min_size=3, max_size=3).map(
            lambda sizes: b"\0\0\10\3" + struct.pack(">3I", *sizes) + IMAGES[16:]
        ),
    )
)
def test_damaged_images_are_named_and_never_half_read(
    damaged: bytes, tmp_path_factory: pytest.TempPathFactory, example: Any
) -> None:
    folder = tmp_path_factory.getbasetemp() / "damaged"
    write(folder, train_images=damaged)
    data = example("data")
    if len(damaged) == len(IMAGES) and struct.unpack(">3I", damaged[4:16]) == (7, 9, 13):
        return
    with pytest.raises(data.DataError, match="train-images-idx3-ubyte"):
        data.load(str(folder))


def test_a_zip_that_is_cut_off_and_labels_of_other_images_are_named(
    tmp_path: Path, example: Any
) -> None:
    data = example("data")
    write(tmp_path, zipped=True)
    path = tmp_path / "t10k-images-idx3-ubyte.gz"
    path.write_bytes(path.read_bytes()[:-12])
    with pytest.raises(data.DataError, match="t10k-images"):
        data.load(str(tmp_path))
    write(tmp_path, train_labels=idx(np.zeros(6, np.uint8)))
    with pytest.raises(data.DataError, match="7 images have 6 labels"):
        data.load(str(tmp_path))


def test_a_subset_is_drawn_by_the_seed(example: Any) -> None:
    digits = example("data").load("digits")
    first, again, other = digits.subset(100, 1), digits.subset(100, 1), digits.subset(100, 2)
    assert len(first.train[1]) == 100 and torch.equal(first.train[0], again.train[0])
    assert not torch.equal(first.train[0], other.train[0])
    assert torch.equal(first.test[1], digits.test[1])
