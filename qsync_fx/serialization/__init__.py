"""Strict reading and writing of JSON and TOML files from untrusted sources.

`Schema` is a kind of file (schema.py): start there. `converter` and `structured` convert between
parsed trees and dataclasses, `strict_json` parses text, and `atomic_files` replaces files.
"""

from qsync_fx.serialization.schema import Check, Path, Schema, converter, structured
from qsync_fx.serialization.strict_json import Malformed, Parsed, kind

__all__ = ["Check", "Malformed", "Parsed", "Path", "Schema", "converter", "kind", "structured"]
