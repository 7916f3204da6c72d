"""Where files of devices lie, and which there are.

A device is one file of TOML: in the catalog of the package, in a folder of $QSYNC_DEVICES, in the folder `devices` of the user's
configuration, or wherever a path says. A file of the user's goes before one of the package with the same name.

Invariant: a name is the name of a file, so that what there is can be told without reading it.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import platformdirs

from qsync_fx import environment
from qsync_fx.errors import DeviceError, nearest, shown

if TYPE_CHECKING:
    from qsync_fx.devices.device_model import Device

_CATALOG = Path(__file__).parent / "catalog"


def folders() -> list[Path]:
    """Returns where devices are looked for, in this order."""
    return [
        *environment.paths("QSYNC_DEVICES"),
        platformdirs.user_config_path("qsync_fx", appauthor=False) / "devices",
        _CATALOG,
    ]


def names() -> list[str]:
    """Returns the names of all devices, in order."""
    return sorted({path.stem for folder in folders() for path in folder.glob("*.toml")})


def get(name: str | os.PathLike[str]) -> Device:
    """Returns the device of a name, or of a file of TOML.

    Raises:
        DeviceError: there is none, or its file is not one of a device.
    """
    return _read(*_identity(_path(name)))


def check_exists(name: str | os.PathLike[str]) -> None:
    """Raise `DeviceError` if there is no file of this device; without reading it, and without importing torch."""
    _identity(_path(name))


def name_of(device: Device) -> str | None:
    """Returns the name that a device's file is found by; None where it takes its path, as another one has the name or none has."""
    path = Path(device.path)
    return path.stem if path.stem in names() and _path(path.stem) == path else None


def is_path(name: str) -> bool:
    """Whether a text is the path of a file of TOML, and no name."""
    return name.endswith(".toml") or os.sep in name


def _path(name: str | os.PathLike[str]) -> Path:
    if isinstance(name, os.PathLike) or is_path(name):
        return Path(name).expanduser()
    text = str(name)
    for folder in folders():
        if text and (result := folder / f"{text}.toml").is_file():
            return result
    raise DeviceError(
        f"there is no device {shown(text)}",
        where=", ".join(str(folder) for folder in folders()[:-1]) + " and the catalog of qsync_fx",
        do=f"{nearest(text[:40], names())}; or give the path of a file of TOML",
    )


def _identity(path: Path) -> tuple[Path, int, int]:
    try:
        result = path.stat()
    except (OSError, ValueError) as error:
        message = f"the device file cannot be read: {getattr(error, 'strerror', None) or error}"
        raise DeviceError(
            message, where=shown(str(path)), do="check the path and its permissions"
        ) from error
    return path, result.st_mtime_ns, result.st_size


@functools.lru_cache(maxsize=256)
def _read(path: Path, changed: int, size: int) -> Device:
    from qsync_fx.devices.device_model import read

    return read(path)


def gpus() -> Iterator[str]:
    """Yields the names of GPUs; a file that is no device is told where it is asked for."""
    for name in names():
        try:
            if get(name).kind != "gpu":
                continue
        except DeviceError:
            pass
        yield name
