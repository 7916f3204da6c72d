"""Catalog of device files.

A device is a TOML file in the package's catalog, in a folder of $QSYNC_DEVICES, in the folder
`devices` of the user's configuration, or at an explicit path. Its name is its file name; other
spellings of the name find it as well (`canonical`). User files have precedence over package files
of the same name.
"""

from __future__ import annotations

import functools
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

import platformdirs

from qsync_fx import environment
from qsync_fx.errors import DeviceError, nearest, shown

if TYPE_CHECKING:
    from qsync_fx.devices.device_model import Device

_CATALOG = Path(__file__).parent / "catalog"


def folders() -> list[Path]:
    """Return the folders that are searched for devices, in order of precedence."""
    return [
        *environment.paths("QSYNC_DEVICES"),
        platformdirs.user_config_path("qsync_fx", appauthor=False) / "devices",
        _CATALOG,
    ]


def names() -> list[str]:
    """Return the names of all devices, sorted."""
    return sorted({path.stem for folder in folders() for path in folder.glob("*.toml")})


def shipped() -> list[Path]:
    """Return the device files of the package, sorted."""
    return sorted(_CATALOG.glob("*.toml"))


def canonical(name: str) -> str | None:
    """Return the catalog name of a device in any spelling; None if there is no such device.

    Case, spaces and hyphens do not count, nor do the words NVIDIA, GeForce, Tesla and RTX: "RTX
    3090", "rtx3090", "3090" and torch's "NVIDIA GeForce RTX 3090" are all rtx-3090.
    """
    available = names()
    if name in available:
        return name
    return next((item for item in available if _key(item) and _key(item) == _key(name)), None)


def _key(name: str) -> str:
    return re.sub(r"nvidia|geforce|tesla|rtx|[\s_-]", "", name.casefold())


def get(name: str | os.PathLike[str]) -> Device:
    """Return the device with a name, or from a TOML file; raise `DeviceError` if invalid."""
    return _read(*_identity(_path(name)))


def check_exists(name: str | os.PathLike[str]) -> None:
    """Raise `DeviceError` if a device has no file, without reading it or importing torch."""
    _identity(_path(name))


def name_of(device: Device) -> str | None:
    """Return the name that finds a device's file; None if only its path finds it."""
    path = Path(device.path)
    if path.stem in names() and _path(path.stem) == path:
        return path.stem
    return None


def device_called(name: str, capability: tuple[int, int]) -> Device | None:
    """Return the GPU whose name consists of words of a driver's name, such as "NVIDIA H200"."""
    words = set(re.findall(r"[a-z0-9]+", name.lower()))
    matching = [stem for stem in names() if set(stem.split("-")) <= words]
    for stem in sorted(matching, key=len, reverse=True):
        if (device := get(stem)).capability == capability:
            return device
    return None


def is_path(name: str) -> bool:
    """Return whether a text is the path of a TOML file rather than a name."""
    return name.endswith(".toml") or os.sep in name


def _path(name: str | os.PathLike[str]) -> Path:
    if isinstance(name, os.PathLike) or is_path(name):
        return Path(name).expanduser()
    text = str(name)
    if (stem := canonical(text)) is not None:
        return next(path for folder in folders() if (path := folder / f"{stem}.toml").is_file())
    raise DeviceError(
        f"unknown device {shown(text)}",
        where=", ".join(str(folder) for folder in folders()[:-1]) + " and the catalog of qsync_fx",
        do=f"{nearest(text[:40], names())}; or use the path of a TOML device file, which "
        "'qsync devices propose' writes on a machine with the GPU",
    )


def _identity(path: Path) -> tuple[Path, int, int]:
    try:
        result = path.stat()
    except (OSError, ValueError) as error:
        message = f"the device file cannot be read: {getattr(error, 'strerror', None) or error}"
        do = "check the path and its permissions"
        raise DeviceError(message, where=shown(str(path)), do=do) from error
    return path, result.st_mtime_ns, result.st_size


@functools.lru_cache(maxsize=256)
def _read(path: Path, changed: int, size: int) -> Device:
    from qsync_fx.devices.device_model import read

    return read(path)
