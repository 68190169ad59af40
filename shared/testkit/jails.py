"""Plugin workers in real nsjail, started by the SDK's own launcher, and what can be seen of such a jail.

The worker's Python, its SDK and its other packages are those of the environment that :mod:`tooling.jail` prepares from the
system's Python, whatever this process runs on: a jail shows no other.

:class:`Jail` looks at one from outside, by ``/proc``, and from inside, by a Python that enters the worker's own namespaces and
root (``nsenter``) and so has its files, processes and network, though neither its limits nor its memory.

``CODING_TOPOLOGY_FILE`` (an absolute path) asks for a record of both shapes as they really were, see :func:`record`.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import types
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Final

from langbot_plugin.runtime.plugin.worker_launcher import PluginWorkerLauncher

from testkit import hostile_trees
from tooling import jail, steps

TOPOLOGY_FILE: Final = "CODING_TOPOLOGY_FILE"
SCHEMA: Final = "jailed-worker-topology-v1"
CAPABILITY: Final = "LANGBOT_PLUGIN_REGISTRATION_CAPABILITY"
PYTHON: Final = ("/usr/bin/python3", "-I", "-S")
"""The Python that a jail shows, for scripted agents."""
INSIDE_WITHIN: Final = 30.0
"""Seconds a program that looks around in a jail may take."""


class Launcher(PluginWorkerLauncher):
    """The SDK's launcher of the shared profile with the prepared environment."""

    def __init__(self) -> None:
        """Raises :class:`tooling.SetupError` when the environment is not prepared."""
        super().__init__(
            nsjail_path=str(jail.nsjail()),
            python_executable=str(jail.directory() / "bin" / "python"),
            python_prefix=str(jail.directory()),
            runtime_import_root=str(jail.site_packages()),
        )

    instead: ClassVar[Mapping[str, str]] = types.MappingProxyType({})
    """Files of this machine that a jail shows in the place of others, as on a machine that is set up differently."""

    def build_nsjail_args(self, launch_spec: Any, *, execution_mode: str = "dedicated") -> list[str]:
        """The SDK's own, with :attr:`instead`."""
        arguments = super().build_nsjail_args(launch_spec, execution_mode=execution_mode)
        mounts = {f"{os.path.realpath(shown)}:{shown}": f"{source}:{shown}" for shown, source in self.instead.items()}
        return [mounts.get(word, word) for word in arguments]


@dataclass(frozen=True, slots=True)
class Mount:
    """One mount as the worker has it."""

    point: str
    writable: bool
    kind: str
    options: str


@dataclass(frozen=True, slots=True)
class Jail:
    """One nsjail and the worker in it, by the pids that this machine has for them."""

    nsjail: int
    worker: int

    @classmethod
    def of(cls, nsjail: int) -> Jail:
        """The jail that this nsjail process keeps."""
        (worker,) = map(int, Path(f"/proc/{nsjail}/task/{nsjail}/children").read_text().split())
        return cls(nsjail, worker)

    # ---- from outside

    @property
    def processes(self) -> dict[int, str]:
        """Everything that is alive in the jail, and nsjail: pid to start time."""
        own = Path(f"/proc/{self.worker}/ns/pid").readlink()
        found = {self.nsjail: hostile_trees.start_time(self.nsjail)}
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                if (entry / "ns" / "pid").readlink() == own and (start := hostile_trees.start_time(int(entry.name))):
                    found[int(entry.name)] = start
            except OSError:
                continue
        return found

    @property
    def zombies(self) -> list[int]:
        """What has ended below the worker and nobody has reaped."""
        listed = Path(f"/proc/{self.worker}/task/{self.worker}/children").read_text().split()
        return [int(pid) for pid in listed if not hostile_trees.start_time(int(pid))]

    @property
    def inner_pid(self) -> int:
        """The worker's pid as the jail counts."""
        return int(self._status("NSpid").split()[-1])

    @property
    def shares_network(self) -> bool:
        """Whether it has this process's network."""
        return Path(f"/proc/{self.worker}/ns/net").readlink() == Path("/proc/self/ns/net").readlink()

    @property
    def argv(self) -> list[str]:
        """What nsjail was started with."""
        return Path(f"/proc/{self.nsjail}/cmdline").read_bytes().decode().split("\0")[:-1]

    @property
    def environment(self) -> dict[str, str]:
        """What the worker was started with."""
        entries = Path(f"/proc/{self.worker}/environ").read_bytes().decode().split("\0")[:-1]
        return dict(entry.split("=", 1) for entry in entries)

    @property
    def limits(self) -> dict[str, tuple[str, str]]:
        """The limits in force: name to soft and hard, in the kernel's units."""
        found = {}
        for line in Path(f"/proc/{self.worker}/limits").read_text().splitlines()[1:]:
            soft, hard = line[26:].split()[:2]
            found[line[:26].strip()] = (soft, hard)
        return found

    @property
    def mounts(self) -> list[Mount]:
        """What is mounted, in order; of several at one point the last is what the worker sees."""
        found = []
        for line in Path(f"/proc/{self.worker}/mountinfo").read_text().splitlines():
            own, _, filesystem = line.partition(" - ")
            point, options = own.split()[4:6]
            kind, _, above = filesystem.split()[:3]
            found.append(Mount(point, "rw" in options.split(","), kind, above))
        return found

    def _status(self, name: str) -> str:
        lines = Path(f"/proc/{self.worker}/status").read_text().splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith(f"{name}:"))

    def _inner_id(self, which: str) -> int:
        """The one account or group that the jail has, by the number it has there."""
        (line,) = Path(f"/proc/{self.worker}/{which}_map").read_text().splitlines()
        return int(line.split()[0])

    # ---- from inside

    async def run(self, *command: str) -> tuple[int, str, str]:
        """A program to its end in the worker's own namespaces and with its environment: exit code, stdout, stderr."""
        program = shutil.which("nsenter")
        assert program, "nsenter not found; on Debian: apt-get install util-linux"
        # Its network is this process's own, which only root could enter again.
        assert self.shares_network
        entered = ["--user", "--preserve-credentials", "--mount", "--pid", "--ipc", "--uts", "--root", "--wd"]
        done = await asyncio.to_thread(
            subprocess.run,
            [program, "--target", str(self.worker), *entered, "--", *command],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            env=self.environment,
            timeout=INSIDE_WITHIN,
            check=False,
        )
        return done.returncode, done.stdout, done.stderr

    async def look(self, code: str, *arguments: str) -> Any:
        """What a Python program prints there as JSON. Raises :class:`AssertionError` with what it said when it fails."""
        status, said, complaint = await self.run(*PYTHON, "-c", code, *arguments)
        assert status == 0, complaint[-2000:]
        return json.loads(said)


# ------------------------------------------------------------------ the record of a topology


def record(shape: str, seen: Jail, runtime: Path) -> dict[str, Any]:
    """What one shape of worker has, as values that name no place of this machine and hold no secret.

    Keys: ``argv`` (of nsjail), ``mounts`` (``point``, ``access``, ``kind``, in order), ``environment`` (names), ``limits``
    (name to soft and hard), ``uid``, ``gid`` and ``pid`` as the jail counts them, ``network`` (``shared`` or ``own``). With
    :data:`TOPOLOGY_FILE` set it is also put there, below ``shapes`` and the shape's name, beside what is there already.
    """
    names = {str(jail.directory()): "<python>", str(runtime): "<runtime>", seen.environment[CAPABILITY]: "<capability>"}
    found: dict[str, Any] = {
        "argv": [_renamed(word, names) for word in seen.argv],
        "mounts": [
            {"point": _renamed(each.point, names), "access": "rw" if each.writable else "ro", "kind": each.kind}
            for each in seen.mounts
        ],
        "environment": sorted(seen.environment),
        "limits": {name: list(values) for name, values in seen.limits.items()},
        "uid": seen._inner_id("uid"),
        "gid": seen._inner_id("gid"),
        "pid": seen.inner_pid,
        "network": "shared" if seen.shares_network else "own",
    }
    if target := os.environ.get(TOPOLOGY_FILE, ""):
        _keep(Path(target), shape, found)
    return found


def _renamed(text: str, names: Mapping[str, str]) -> str:
    for place, name in names.items():
        text = text.replace(place, name)
    return text


def _keep(target: Path, shape: str, found: dict[str, Any]) -> None:
    if not target.is_absolute():
        raise ValueError(f"{TOPOLOGY_FILE} must be an absolute path")
    kept: dict[str, Any] = {"schema": SCHEMA, "shapes": {}}
    if target.exists():
        kept = json.loads(target.read_text(encoding="utf-8"))
    kept["shapes"][shape] = found
    steps.write_atomically(target, json.dumps(kept, indent=2, sort_keys=True) + "\n")
