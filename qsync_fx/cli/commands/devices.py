"""`qsync devices`: list the device catalog, and propose a device file for a GPU of this machine."""

from __future__ import annotations

import argparse
import dataclasses

from qsync_fx.cli import output
from qsync_fx.cli.command import Command, add_options
from qsync_fx.errors import DeviceError
from qsync_fx.serialization.atomic_files import write_text


def _list_arguments(parser: argparse.ArgumentParser) -> None:
    add_options(parser, "--json  print all constants of each device as one JSON list")


def _list(arguments: argparse.Namespace) -> None:
    from qsync_fx.devices import get, names

    devices = [get(name) for name in names()]
    if arguments.json:
        output.as_json([dataclasses.asdict(device) for device in devices])
        return
    rows = []
    for device in devices:
        version = ".".join(map(str, device.capability or ()))
        memory = f"{device.memory.bytes / 2**30:.0f} GiB"
        fitted = "own" if device.products else device.calibrated_as or "usual"
        rows.append((device.name, device.title, version, memory, " ".join(device.units), fitted))
    columns = ("name", "device", "capability", "memory", "units", "efficiencies")
    output.show(output.table(columns, rows, right=("memory",)))


def _propose_arguments(parser: argparse.ArgumentParser) -> None:
    add_options(
        parser,
        """
        --index N      number of the GPU; by default 0
        --output FILE  TOML file for the proposal; by default it is printed
        """,
        {"index": int, "output": output.to_write},
    )


def _propose(arguments: argparse.Namespace) -> None:
    import torch

    from qsync_fx.devices.device_proposal import propose

    index = arguments.index or 0
    if not 0 <= index < torch.cuda.device_count():
        raise DeviceError(
            f"this machine has no GPU {index}: torch sees {torch.cuda.device_count()}",
            where="--index" if arguments.index is not None else "qsync devices propose",
            do="run the command on a machine with the GPU, or write a device file by hand: "
            "qsync docs howto-device",
        )
    text = propose(torch.cuda.get_device_properties(index))
    if arguments.output is None:
        print(text, end="")
        return
    write_text(arguments.output, text)
    output.wrote(arguments.output)


LIST = Command(
    "list the device catalog", _list, _list_arguments, "Lists the devices of the catalog."
)
PROPOSE = Command(
    "propose a device file for a GPU of this machine",
    _propose,
    _propose_arguments,
    """\
Proposes a device file for a GPU that the catalog lacks, from the properties
that torch reports. Check its peaks against the data sheet.""",
)

_EXAMPLES = """\
examples:
  qsync devices list
  qsync devices propose --output ~/.config/qsync_fx/devices/rtx-3050.toml
      afterwards rtx-3050 is a name like those of the catalog"""

COMMAND = Command(
    "list the device catalog, propose an entry",
    about="Lists the devices that plans and predictions may name, and proposes new ones.",
    examples=_EXAMPLES,
    actions={"list": LIST, "propose": PROPOSE},
)
