"""A small JSON Schema validator, enough for what a vendor's program generates of itself (draft 7, as schemars writes it).

Known: type, enum, const, properties, required, additionalProperties, items, anyOf, oneOf, allOf, $ref, minimum. Anything else
that would restrict a value fails the test that meets it instead of being ignored.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

_TYPES: Final[Mapping[str, tuple[type, ...]]] = {
    "object": (dict,),
    "array": (list,),
    "string": (str,),
    "boolean": (bool,),
    "null": (type(None),),
    "number": (int, float),
    "integer": (int,),
}
_IGNORED: Final = frozenset({"title", "description", "default", "format", "definitions", "$schema", "examples", "$comment"})
_KNOWN: Final = frozenset(
    {"type", "enum", "const", "properties", "required", "additionalProperties", "items", "anyOf", "oneOf", "allOf", "$ref"}
    | {"minimum"}
)


def problems(value: Any, schema: Any, root: Mapping[str, Any], where: str = "$") -> Iterator[str]:
    """What about ``value`` the schema does not allow, each with its place."""
    if schema is True or schema is None:
        return
    if schema is False:
        yield f"{where}: nothing is allowed here"
        return
    if unknown := set(schema) - _KNOWN - _IGNORED:
        raise AssertionError(f"the validator does not know {sorted(unknown)}")
    if "$ref" in schema:
        yield from problems(value, _resolved(schema["$ref"], root), root, where)
    if "type" in schema:
        names = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
        if not any(_is(value, name) for name in names):
            yield f"{where}: {type(value).__name__} is not {' or '.join(names)}"
            return
    if "enum" in schema and value not in schema["enum"]:
        yield f"{where}: {value!r} is none of {schema['enum']}"
    if "const" in schema and value != schema["const"]:
        yield f"{where}: {value!r} is not {schema['const']!r}"
    if "minimum" in schema and isinstance(value, int | float) and value < schema["minimum"]:
        yield f"{where}: {value} is too small"
    for part in schema.get("allOf", ()):
        yield from problems(value, part, root, where)
    for key in ("anyOf", "oneOf"):
        if key in schema:
            found = [list(problems(value, part, root, where)) for part in schema[key]]
            if all(found):
                nearest = min(found, key=len)
                yield f"{where}: fits none of {len(found)} alternatives, the nearest: {'; '.join(nearest[:3])}"
    if isinstance(value, dict):
        yield from _object(value, schema, root, where)
    if isinstance(value, list) and "items" in schema:
        for index, item in enumerate(value):
            yield from problems(item, schema["items"], root, f"{where}[{index}]")


def _object(value: dict[str, Any], schema: Mapping[str, Any], root: Mapping[str, Any], where: str) -> Iterator[str]:
    for name in schema.get("required", ()):
        if name not in value:
            yield f"{where}: {name} is missing"
    known = schema.get("properties", {})
    for name, item in value.items():
        if name in known:
            yield from problems(item, known[name], root, f"{where}.{name}")
        elif "additionalProperties" in schema:
            yield from problems(item, schema["additionalProperties"], root, f"{where}.{name}")


def unknown_fields(value: Any, schema: Any, root: Mapping[str, Any], where: str = "$") -> Iterator[str]:
    """Fields of ``value`` that the schema does not name although it allows them: a misspelt one is silently ignored."""
    schemas = list(_objects(schema, root))
    if not isinstance(value, dict) or not schemas or any("additionalProperties" in each for each in schemas):
        return
    known: dict[str, Any] = {}
    for each in schemas:
        known.update(each.get("properties", {}))
    for name, item in value.items():
        if name not in known:
            yield f"{where}.{name}"
        else:
            yield from unknown_fields(item, known[name], root, f"{where}.{name}")


def _objects(schema: Any, root: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    if not isinstance(schema, dict):
        return
    if "$ref" in schema:
        yield from _objects(_resolved(schema["$ref"], root), root)
    for key in ("allOf", "anyOf", "oneOf"):
        for part in schema.get(key, ()):
            yield from _objects(part, root)
    if "properties" in schema:
        yield schema


def _is(value: Any, name: str) -> bool:
    if isinstance(value, bool):
        return name == "boolean"
    if name == "integer" and isinstance(value, float):
        return value.is_integer()
    return isinstance(value, _TYPES[name])


def _resolved(reference: str, root: Mapping[str, Any]) -> Any:
    found: Any = root
    for part in reference.removeprefix("#/").split("/"):
        found = found[part]
    return found
