"""This package as the run loop sees it."""

from __future__ import annotations

from typing import Final

from agent import DRIVERS
from agent.driver import NAME, unavailable
from agent.form import CodexPluginSettings, CodexSettings
from pkg.agent_api import SessionSpec
from pkg.run_loop import Product, SpecInputs


def spec(settings: CodexSettings, inputs: SpecInputs) -> SessionSpec:
    """Raises :class:`pkg.errors.Refused` (``coding.driver_not_available``) before anything is started."""
    raise unavailable()


PRODUCT: Final = Product(
    name=NAME,
    driver=DRIVERS[NAME],
    settings=CodexSettings,
    plugin_settings=CodexPluginSettings,
    spec=spec,
)
