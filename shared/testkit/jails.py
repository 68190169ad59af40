"""Plugin workers in real nsjail, started by the SDK's own launcher, and what can be seen of a jail from outside.

The worker's Python, its SDK and its other packages are those of the environment that :mod:`tooling.jail` prepares from the
system's Python, whatever this process runs on: a jail shows no other.
"""

from __future__ import annotations

from langbot_plugin.runtime.plugin.worker_launcher import PluginWorkerLauncher

from tooling import jail


class Launcher(PluginWorkerLauncher):
    """The SDK's launcher of the shared profile, unchanged, with the prepared environment."""

    def __init__(self) -> None:
        """Raises :class:`tooling.SetupError` when the environment is not prepared."""
        super().__init__(
            nsjail_path=str(jail.nsjail()),
            python_executable=str(jail.directory() / "bin" / "python"),
            python_prefix=str(jail.directory()),
            runtime_import_root=str(jail.site_packages()),
        )
