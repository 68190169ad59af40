"""Looks at one package from the inside, in a process of its own: ``python package_probe.py`` in the package's directory.

Prints one JSON object: what the package's two form models define, and what its modules export. The names ``pkg`` and ``agent``
are the same in every package, so that one process can only ever load one.
"""

from __future__ import annotations

import importlib
import json
import sys
import types
import typing
from collections.abc import Mapping
from typing import Any

import yaml


def kind_of(annotation: Any) -> str:
    """What a model's field holds, in the words of the form."""
    origin = typing.get_origin(annotation)
    if origin is typing.Literal:
        return "select"
    if origin is tuple:
        inner = typing.get_args(annotation)[0]
        return "list" if inner is str else "object"
    if origin is not None:
        return "object"
    named = {bool: "boolean", int: "number", float: "number", str: "text"}
    return named.get(annotation, "secret" if annotation.__name__ == "SecretStr" else "object")


def described(model: Any, form: list[dict[str, Any]], parse: Any) -> dict[str, Any]:
    """Every field of a model's form by its form name, and whether the form's default means the model's."""
    defaults = parse(model, {})
    out: dict[str, Any] = {}
    for name, field in model.model_fields.items():
        if name in model.former:
            continue
        form_name = name.replace("_", "-")
        stored = {each["name"]: each["default"] for each in form if each["name"] == form_name}
        options = [str(each) for each in typing.get_args(field.annotation)] if kind_of(field.annotation) == "select" else []
        out[form_name] = {
            "kind": kind_of(field.annotation),
            "options": options,
            "default_agrees": bool(stored) and getattr(parse(model, stored), name) == getattr(defaults, name),
        }
    return out


def main() -> None:
    """Import the package as a worker does and print what is in it."""
    sys.path.insert(0, ".")
    settings = importlib.import_module("pkg.settings")
    form = vars(importlib.import_module("agent.form")).values()
    models = [each for each in form if isinstance(each, type)]
    (runner_model,) = (
        each for each in models if issubclass(each, settings.RunnerSettings) and each is not settings.RunnerSettings
    )
    (plugin_model,) = (
        each for each in models if issubclass(each, settings.PluginSettings) and each is not settings.PluginSettings
    )
    drivers: Mapping[str, Any] = importlib.import_module("agent").DRIVERS
    plugin = importlib.import_module("main")
    runner = importlib.import_module("components.runner.default")
    with open("components/runner/default.yaml", encoding="utf-8") as file:  # noqa: PTH123 - a probe of the plain file
        runner_form = yaml.safe_load(file)["spec"]["config"]
    with open("manifest.yaml", encoding="utf-8") as file:  # noqa: PTH123
        plugin_form = yaml.safe_load(file)["spec"]["config"]
    presets: types.ModuleType | None = sys.modules.get("agent.presets")
    report = {
        "runner": described(runner_model, runner_form, settings.parse),
        "plugin": described(plugin_model, plugin_form, settings.parse),
        "exported_policies": list(importlib.import_module("agent").POLICIES),
        "policies": list(getattr(runner_model, "policies", ())),
        "drivers": {name: driver.name for name, driver in drivers.items()},
        "plugin_class": plugin.CodingRunnerPlugin.__name__,
        "runner_class": runner.DefaultRunner.__name__,
        "presets": list(presets.known()) if presets is not None else [],
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main()
