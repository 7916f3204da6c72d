"""One codec for files of JSON that anyone may have written.

`schema` is a kind of file, `structure` takes values from the tree of a text and gives them back, `text` reads the tree.
"""

from qsync_fx.serialization.convert import Check, converter, structured
from qsync_fx.serialization.schema import Path, Schema
from qsync_fx.serialization.strict_json import Malformed, Parsed, kind

__all__ = ["Check", "Malformed", "Parsed", "Path", "Schema", "converter", "kind", "structured"]
