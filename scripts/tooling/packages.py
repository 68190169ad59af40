"""Plugin packages, built by the SDK's own builder from a clean export of the working copy.

A package holds the files of its directory that git tracks, as they are in the working copy, with the shared core taken from
where it is edited. What git does not track (a forgotten note, an ``.env``) never gets in; new files that look like sources are
named so that none is forgotten.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from tooling import ROOT, SetupError, steps

SOURCE = "ACPAgentRunner"
NAMES = (SOURCE, "ClaudeCodeAgent", "CodexAgent")
SHARED = ("pkg", "daemon.py")

FIRST_TIME = (1980, 1, 1, 0, 0, 0)
"""The earliest time that a ZIP archive can hold."""
UNIX = 3
MEMBER_MODE = 0o100644

_BUILD = """
import sys
from langbot_plugin.cli.commands.buildplugin import build_plugin_process
path = build_plugin_process(sys.argv[1])
sys.exit(0 if path else "the builder made no package")
"""


def sources(name: str) -> dict[str, Path]:
    """What goes into package ``name``: path inside the package to file in the working copy, in order."""
    own = {path: ROOT / name / path for path in _tracked(name) if not _is_shared(path)}
    core = {path: ROOT / SOURCE / path for path in _tracked(SOURCE) if _is_shared(path)}
    return dict(sorted({**own, **core}.items()))


def forgotten(name: str) -> list[str]:
    """Files of the package that git neither tracks nor ignores, relative to the repository."""
    directories = [name] if name == SOURCE else [name, *(f"{SOURCE}/{path}" for path in SHARED)]
    return [path for path in _git("ls-files", "-z", "--others", "--exclude-standard", "--", *directories).split("\0") if path]


def export(name: str, target: Path) -> frozenset[str]:
    """Write the package's files into the new directory ``target``; their paths in it.

    A file that somebody removes meanwhile is left out, as if it had been removed before.
    """
    written = set()
    for path, source in sources(name).items():
        copy = target / path
        copy.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileNotFoundError):
            shutil.copyfile(source, copy)
            written.add(path)
    return frozenset(written)


def build(name: str, output: Path, *, reproducible: bool = False) -> Path:
    """Build the package ``name`` into the directory ``output`` and return the file. Raises :class:`tooling.SetupError`.

    Must run under the development interpreter. The SDK's builder writes the time and the order in which it finds files into a
    package; ``reproducible`` leaves the same members without either, so that the same sources make the same bytes.
    """
    if left_out := forgotten(name):
        steps.say(f"{name}: not in the package because git does not know them: {', '.join(left_out)}")
    with tempfile.TemporaryDirectory(prefix="package-") as base:
        staging = Path(base, name)
        export(name, staging)
        return built_from(staging, output, reproducible=reproducible)


def built_from(staging: Path, output: Path, *, reproducible: bool = False) -> Path:
    """Build the package whose files are in ``staging``, as :func:`build` does."""
    output.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="built-") as built:
        steps.run([sys.executable, "-c", _BUILD, built], cwd=staging)
        packages = list(Path(built).glob("*.lbpkg"))
        if len(packages) != 1:
            raise SetupError(f"{staging.name}: the builder made no package")
        target = output / packages[0].name
        if reproducible:
            normalise(packages[0], target)
        else:
            shutil.move(packages[0], target)
        return target


def normalise(package: Path, target: Path) -> None:
    """Write the members of a package in the order of their names, with one time, one mode and no compression."""
    with zipfile.ZipFile(package) as made, zipfile.ZipFile(target, "w", zipfile.ZIP_STORED) as fixed:
        for name in sorted(each.filename for each in made.infolist() if not each.is_dir()):
            member = zipfile.ZipInfo(name, FIRST_TIME)
            member.create_system = UNIX
            member.external_attr = MEMBER_MODE << 16
            fixed.writestr(member, made.read(name))


def _is_shared(path: str) -> bool:
    return path.split("/", 1)[0] in SHARED


def _tracked(name: str) -> list[str]:
    listed = _git("ls-files", "-z", "--cached", "--", name)
    paths = [path.removeprefix(f"{name}/") for path in listed.split("\0") if path]
    return [path for path in paths if (ROOT / name / path).is_file()]


def _git(*arguments: str) -> str:
    try:
        # Only files are listed, so it does not matter to whom the working copy belongs (git refuses others' by default).
        command = ["git", "-c", f"safe.directory={ROOT}", "-C", str(ROOT), *arguments]
        # A git that started this (a hook's) names its own repository in the environment.
        environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    except FileNotFoundError:
        raise SetupError("git is not installed") from None
    if done.returncode != 0:
        advice = "" if (ROOT / ".git").exists() else "\nA package holds what git tracks: use a git clone instead of this copy."
        raise SetupError(f"git cannot list the files of {ROOT}: {done.stderr.strip()}{advice}")
    return done.stdout
