#!/usr/bin/env python3
"""Try one package's exact bytes over the SDK's real RPC: over stdio and WebSocket, in a dedicated worker and in the pool.

``python3 certification-tests/coding_artifact_rpc_probe.py PACKAGE``, with an extracted package's directory or a ``.lbpkg``
file, prints one JSON object: for each transport and shape the manifest that the worker registered with, the runner that the
runtime discovered, and how a run ended with an agent beside the worker and with one under the package's own daemon. Agents are
local protocol fixtures. It names no absolute path and no secret.

Exits with 0 when everything is as it must be, with 1 when it is not, and with 2 when ``PACKAGE`` is no package.
"""

from __future__ import annotations

import sys

if sys.version_info < (3, 11):  # noqa: UP036 - said readably where an older Python would stop at a syntax error
    sys.exit(f"This needs Python 3.11 or newer, {sys.executable} is {sys.version.split()[0]}. Try: python3.12 {sys.argv[0]}")

import argparse
import asyncio
import importlib.util
import json
import logging
import os
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
NAMES = ("ACPAgentRunner", "ClaudeCodeAgent", "CodexAgent")


def unpacked(given: Path, scratch: Path) -> Path:
    """The directory of the package's files: the one that was given, or the file's members. Raises ``ValueError``."""
    if given.is_dir():
        return given.resolve()
    target = scratch / "given"
    with zipfile.ZipFile(given) as archive:
        if any(Path(name).is_absolute() or ".." in Path(name).parts for name in archive.namelist()):
            raise ValueError("a member lies outside of the package")
        archive.extractall(target)
    return target


def name_of(extracted: Path) -> str:
    """The package's name by its manifest. Raises ``ValueError``."""
    import yaml

    name = yaml.safe_load((extracted / "manifest.yaml").read_text(encoding="utf-8"))["metadata"]["name"]
    if name not in NAMES:
        raise ValueError("no package of this repository")
    return str(name)


def main() -> int:
    """Try the package that the command line names."""
    parser = argparse.ArgumentParser(description="Try one package's exact bytes over the SDK's real RPC.")
    parser.add_argument("package", type=Path, help="an extracted package's directory, or a .lbpkg file")
    given: Path = parser.parse_args().package
    sys.path[:0] = [str(ROOT / "shared"), str(ROOT / "scripts")]
    if importlib.util.find_spec("langbot_plugin") is None:
        from tooling import venv

        venv.enter(__file__)
    logging.disable(logging.CRITICAL)
    with tempfile.TemporaryDirectory(prefix="probe-", ignore_cleanup_errors=True) as base:
        scratch = Path(base).resolve()
        try:
            extracted = unpacked(given, scratch)
            name = name_of(extracted)
        except (OSError, ValueError, KeyError, TypeError, zipfile.BadZipFile) as exc:
            print(f"{given.name}: no package ({type(exc).__name__})", file=sys.stderr)
            return 2
        os.environ["CODING_RUNNER_PACKAGE"] = name
        # Where the runtime that this process is keeps what it transfers: not where it happens to be started.
        os.environ["LANGBOT_PLUGIN_FILE_STORAGE_DIR"] = str(scratch / "rpc-transfer")
        sys.dont_write_bytecode = True
        sys.path.insert(0, str(extracted))

        try:
            from testkit import rpc_probe
        except Exception as exc:  # noqa: BLE001 - the package's own modules are imported
            print(json.dumps({"ok": False, "package": name, "error": f"cannot be imported: {type(exc).__name__}"}))
            return 1
        report = asyncio.run(rpc_probe.probe(given.resolve(), extracted, scratch))
    print(json.dumps(report, indent=2, sort_keys=True))
    return 0 if report["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
