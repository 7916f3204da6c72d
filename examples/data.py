"""Images for the demo: files in MNIST's format, or the digits of scikit-learn.

Invariant: an unusable file raises an error that names it, before any process starts.
"""

from __future__ import annotations

import functools
import gzip
import math
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from qsync_fx.errors import QSyncError

FASHION_MNIST = Path("/usr/share/datasets/fashion-mnist")
"""Folder of Debian's package dataset-fashion-mnist."""

_FILES = (
    "train-images-idx3-ubyte",
    "train-labels-idx1-ubyte",
    "t10k-images-idx3-ubyte",
    "t10k-labels-idx1-ubyte",
)
_SMALLEST, _LARGEST = 8, 128


class DataError(QSyncError):
    """Missing, damaged or unsupported file or folder of images."""


@dataclass(frozen=True)
class Data:
    """Images and labels.

    Attributes:
        name: description for reports.
        train, test: images, uint8 of shape (number, 1, height, width), and labels, int64 of shape
            (number,).
        epochs, batch, samples: default number of epochs, batch size of rank 0, and training images.
    """

    name: str
    train: tuple[torch.Tensor, torch.Tensor]
    test: tuple[torch.Tensor, torch.Tensor]
    epochs: int
    batch: int
    samples: int

    @property
    def classes(self) -> int:
        return int(max(self.train[1].max(), self.test[1].max())) + 1

    def normalized(self, images: torch.Tensor) -> torch.Tensor:
        """Return float32 images, channels-last, normalized by the training images' statistics."""
        mean, deviation = self._statistics
        return (
            images.float().sub_(mean).div_(deviation).contiguous(memory_format=torch.channels_last)
        )

    @functools.cached_property
    def _statistics(self) -> tuple[float, float]:
        counts = torch.bincount(self.train[0].flatten(), minlength=256).double()
        levels = torch.arange(256, dtype=torch.float64)
        mean = float((counts * levels).sum() / counts.sum())
        variance = float((counts * (levels - mean) ** 2).sum() / counts.sum())
        return mean, max(math.sqrt(variance), 1.0)

    def subset(self, samples: int, seed: int) -> Data:
        """Return the data with a random subset of `samples` training images."""
        chosen = torch.randperm(len(self.train[1]), generator=torch.Generator().manual_seed(seed))[
            :samples
        ]
        return Data(
            self.name,
            (self.train[0][chosen], self.train[1][chosen]),
            self.test,
            self.epochs,
            self.batch,
            samples,
        )


def load(source: str | None) -> Data:
    """Return the images and labels.

    Args:
        source: folder with the four files of MNIST's format, plain or .gz; "digits"; None for
            Fashion-MNIST if it is installed, else the digits.

    Raises:
        DataError: the data do not exist or cannot be read.
    """
    if source == "digits" or (source is None and not FASHION_MNIST.is_dir()):
        return _digits()
    folder = Path(source or FASHION_MNIST)
    files = _idx_files(folder)
    train, test = _pair(files[0], files[1]), _pair(files[2], files[3])
    if train[0].shape[1:] != test[0].shape[1:]:
        raise DataError(
            "training and test images are of different sizes",
            where=str(folder),
            do="use the files of one data set",
        )
    name = "Fashion-MNIST" if folder.name.lower() == "fashion-mnist" else folder.resolve().name
    return Data(name, train, test, epochs=3, batch=96, samples=20_000)


def _digits() -> Data:
    try:
        from sklearn.datasets import load_digits
    except ModuleNotFoundError as error:
        raise DataError(
            "neither Fashion-MNIST nor scikit-learn is installed",
            where=str(FASHION_MNIST),
            do="apt-get install dataset-fashion-mnist, or make setup, or give --data PATH",
        ) from error
    digits = load_digits()
    images = torch.from_numpy((digits.images * (255 / 16)).astype(np.uint8)).unsqueeze(1)
    labels = torch.from_numpy(digits.target.astype(np.int64))
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    train, test = order[len(order) // 5 :], order[: len(order) // 5]
    name = "scikit-learn's digits"
    return Data(
        name,
        (images[train], labels[train]),
        (images[test], labels[test]),
        epochs=10,
        batch=24,
        samples=len(train),
    )


def _idx_files(folder: Path) -> list[Path]:
    if not folder.is_dir():
        raise DataError(
            "there is no such folder", where=str(folder), do="give a folder, or --data digits"
        )
    files: list[Path] = []
    for name in _FILES:
        either = [path for path in (folder / name, folder / f"{name}.gz") if path.is_file()]
        if not either:
            raise DataError(
                f"the folder has no {name}[.gz]",
                where=str(folder),
                do=f"give a folder with the four files of MNIST's format: {', '.join(_FILES)}",
            )
        files.append(either[0])
    return files


def _pair(images_file: Path, labels_file: Path) -> tuple[torch.Tensor, torch.Tensor]:
    images, labels = _idx(images_file, 3), _idx(labels_file, 1)
    if len(images) != len(labels) or not len(labels):
        raise DataError(
            f"{len(images)} images have {len(labels)} labels",
            where=f"{images_file}, {labels_file.name}",
            do="take both files from one set",
        )
    if not all(_SMALLEST <= size <= _LARGEST for size in images.shape[1:]):
        raise DataError(
            f"the images are {images.shape[1]} x {images.shape[2]}",
            where=str(images_file),
            do=f"give images of {_SMALLEST} to {_LARGEST} pixels a side",
        )
    return torch.from_numpy(images).unsqueeze(1), torch.from_numpy(labels.astype(np.int64))


def _idx(path: Path, dimensions: int) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
    """Return the array in an IDX file of bytes.

    The format is two zero bytes, the type 8, the number of dimensions, big-endian sizes, and
    values.
    """
    try:
        content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(
            f"the file cannot be read: {error}", where=str(path), do="fetch it again"
        ) from error
    start = 4 + 4 * dimensions
    if content[:4] != bytes((0, 0, 8, dimensions)) or len(content) < start:
        raise DataError(
            f"the file is not in MNIST's format with {dimensions} dimensions of bytes",
            where=str(path),
            do="fetch it again, or give another folder",
        )
    sizes = [int(size) for size in np.frombuffer(content, ">u4", dimensions, 4)]
    if len(content) - start != math.prod(sizes):
        raise DataError(
            f"the file has {len(content) - start} values, but its header says {math.prod(sizes)}",
            where=str(path),
            do="fetch it again: it is cut off or damaged",
        )
    return np.frombuffer(content, np.uint8, offset=start).reshape(sizes).copy()
