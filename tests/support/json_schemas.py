"""JSON Schemas of plan, cluster plan, cluster and profile files, from their dataclasses."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from qsync_fx.plan import plan as plans
from qsync_fx.predictor.replayer.cluster import CLUSTER
from qsync_fx.profiler.profile import PROFILE
from qsync_fx.serialization import Schema

_PLAIN = {int: "integer", float: "number", str: "string", bool: "boolean", NoneType: "null"}
_FORMATS = {"type": "object", "additionalProperties": {"type": "string"}}
_NOTES = {"type": "object"}
_PATTERNS = {
    "type": "array",
    "items": {"type": "array", "prefixItems": [{"type": "string"}, {"type": "string"}]},
}
_PLAN: dict[str, Any] = {
    "default": {"type": ["string", "null"], "description": "format of all other operators"},
    "patterns": _PATTERNS | {"description": "[pattern, format], the last match applies"},
    "operators": _FORMATS | {"description": "format by operator id"},
    "notes": _NOTES | {"description": "origin of the plan; ignored by comparisons"},
}
_CLUSTER_PLAN: dict[str, Any] = {
    "classes": {"type": "object", "additionalProperties": {"type": "object", "properties": _PLAN}},
    "devices": {"type": "object", "description": "device names by class"},
    "ranks": {"type": "array", "items": {"type": "string"}, "description": "class by rank"},
    "codecs": _FORMATS
    | {"description": 'gradient codec by parameter; "qsgd4/qsgd8": between nodes and inside them'},
    "batches": {
        "type": "object",
        "additionalProperties": {"type": "integer", "minimum": 1},
        "description": "samples per step of each rank, by class",
    },
    "memory_budgets": {
        "type": "object",
        "additionalProperties": {"type": "number", "minimum": 0, "maximum": 1},
        "description": "share of the activations that a rank may save for backward, by class",
    },
    "notes": _NOTES,
}


def schemas() -> dict[str, dict[str, Any]]:
    """Return the JSON Schema of each file by its name."""
    return {
        "plan": _with_header(plans.PLAN, _PLAN),
        "cluster-plan": _with_header(plans.CLUSTER_PLAN, _CLUSTER_PLAN),
        "cluster": _of_dataclass(CLUSTER),
        "profile": _of_dataclass(PROFILE),
    }


def _of_dataclass(schema: Schema[Any]) -> dict[str, Any]:
    types = _Types()
    types.of(schema.content)
    fields = types.definitions.pop(schema.content.__name__)
    definitions = {"$defs": dict(sorted(types.definitions.items()))}
    if schema.name is None:
        return {**_head(str(schema.noun)), **fields, **definitions}
    return {**_with_header(schema, fields["properties"], fields["required"]), **definitions}


def _head(name: str) -> dict[str, Any]:
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": f"qsync_fx {name}"}


def _with_header(
    schema: Schema[Any], properties: Mapping[str, Any], required: Sequence[str] = ()
) -> dict[str, Any]:
    header = {"format": {"const": schema.name}, "version": {"const": schema.version}}
    return {
        **_head(str(schema.noun)),
        "type": "object",
        "properties": {**header, **properties},
        "required": [*header, *required],
        "additionalProperties": False,
    }


class _Types:
    """Converter of type annotations to JSON Schemas, with dataclasses as definitions."""

    def __init__(self) -> None:
        self.definitions: dict[str, Any] = {}

    def of(self, annotation: Any) -> dict[str, Any]:
        if annotation in _PLAIN:
            return {"type": _PLAIN[annotation]}
        if dataclasses.is_dataclass(annotation) and isinstance(annotation, type):
            return self._dataclass(annotation)
        origin, arguments = get_origin(annotation), get_args(annotation)
        if origin in (Union, UnionType):
            return {"anyOf": [self.of(argument) for argument in arguments]}
        if origin is Literal:
            return {"enum": list(arguments)}
        if isinstance(origin, type) and issubclass(origin, Mapping):
            return {"type": "object", "additionalProperties": self.of(arguments[1])}
        if origin is tuple and arguments[-1] is not Ellipsis:
            return {"type": "array", "prefixItems": [self.of(argument) for argument in arguments]}
        if isinstance(origin, type) and issubclass(origin, Sequence):
            return {"type": "array", "items": self.of(arguments[0])}
        return {}

    def _dataclass(self, kind: type) -> dict[str, Any]:
        reference = {"$ref": f"#/$defs/{kind.__name__}"}
        if kind.__name__ in self.definitions:
            return reference
        self.definitions[kind.__name__] = {}
        hints = get_type_hints(kind)
        stored = [field for field in dataclasses.fields(kind) if field.init]
        # Members of a union have a class attribute "kind", stored as a tag.
        tag = {"kind": {"const": kind.kind}} if hasattr(kind, "kind") else {}
        self.definitions[kind.__name__] = {
            "type": "object",
            "properties": tag | {field.name: self.of(hints[field.name]) for field in stored},
            "required": [
                field.name
                for field in stored
                if field.default is dataclasses.MISSING
                and field.default_factory is dataclasses.MISSING
            ],
            "additionalProperties": False,
        }
        return reference
