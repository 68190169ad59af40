"""A bill of materials of a prepared environment, as CycloneDX 1.5 JSON.

Source of the shape: the CycloneDX 1.5 JSON schema; the optional serial number and time are left out, so that the same
environment has the same bytes.
"""

from __future__ import annotations

import importlib.metadata
from pathlib import Path
from typing import Any

from evidence import recheck


def bill(name: str, version: str, site_packages: Path, sdk: tuple[str, str]) -> dict[str, Any]:
    """The bill of one package: ``sdk`` is name and version of what the runtime brings and nobody installs."""
    components = [_component(each) for each in importlib.metadata.distributions(path=[str(site_packages)])]
    runtime = {**_named(*sdk), "scope": "excluded", "description": "provided by the runtime, never installed"}
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.5",
        "version": 1,
        "metadata": {"component": {"type": "application", "bom-ref": name, "name": name, "version": version}},
        "components": sorted([*components, runtime], key=lambda each: str(each["bom-ref"])),
    }


def _component(distribution: importlib.metadata.Distribution) -> dict[str, Any]:
    component = _named(distribution.metadata["Name"], distribution.version)
    expression = (distribution.metadata.get_all("License-Expression") or [""])[0]
    if expression:
        component["licenses"] = [{"expression": expression}]
    return component


def _named(name: str, version: str) -> dict[str, Any]:
    purl = recheck.purl(name, version)
    return {"type": "library", "bom-ref": purl, "name": name, "version": version, "purl": purl}
