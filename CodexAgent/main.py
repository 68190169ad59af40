"""The plugin object: it holds nothing itself and ends what an installation has running when the host revokes it."""

from __future__ import annotations

from langbot_plugin.api.definition.plugin import BasePlugin
from langbot_plugin.entities.io.context import InstallationBinding

from pkg import installations


class CodingRunnerPlugin(BasePlugin):
    """One object for every installation of a shared worker."""

    async def on_installation_revoked(self, binding: InstallationBinding) -> None:
        """Cancel the installation's runs, close its sessions and drop its secrets; returns when that is done."""
        await installations.revoke(binding)
