"""Strict reading and writing of JSON and TOML files from untrusted sources.

The fields of a dataclass are its format, so no class lists them again in `to_dict` or `from_dict`.
A kind of file is a `Schema` (schema.py): start there. `reader` and `unstructured` convert a part of
a file, `cattrs.structure` and `dataclasses.asdict` messages between ranks, which are trusted.
`strict_json` parses text, and `atomic_files` replaces files.
"""

from qsync_fx.serialization.schema import Check, Path, Schema, reader, unstructured
from qsync_fx.serialization.strict_json import Malformed, Parsed, kind

__all__ = ["Check", "Malformed", "Parsed", "Path", "Schema", "kind", "reader", "unstructured"]
