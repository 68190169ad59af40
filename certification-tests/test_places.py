"""Where an agent lives: what of the form makes the way there another one."""

from __future__ import annotations

from typing import Any

import pytest

from pkg.agent_api import SessionSpec
from pkg.held_session import fingerprint
from pkg.identity import Authority
from pkg.places import place_of
from pkg.settings import PluginSettings, RunnerSettings, parse

KEY = "-----BEGIN OPENSSH PRIVATE KEY-----\n{}\n-----END OPENSSH PRIVATE KEY-----\n"
HOST_KEY = "host ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAI{}"


def opened_with(key: str = "b25l", **fields: Any) -> str:
    """What a session of this form is remembered by."""
    form = {"location": "remote-ssh", "ssh-target": "ann@host", "ssh-known-hosts": HOST_KEY.format("A"), **fields}
    stored = {"ssh-private-key-secret": KEY.format(key)}
    place = place_of(parse(RunnerSettings, form), parse(PluginSettings, stored), stored, Authority(None), "agent")
    return fingerprint(SessionSpec(("agent",), place.workspace), place, assets=True)


@pytest.mark.parametrize(
    "changed",
    [
        {"key": "dHdv"},
        {"ssh-port": 2222},
        {"ssh-known-hosts": HOST_KEY.format("B")},
        {"ssh-extra-options": "-C"},
        {"ssh-identity-file": "/etc/hostname"},
        {"ssh-connect-timeout": 7},
    ],
)
def test_another_way_to_the_machine_is_another_session(changed: dict[str, Any]) -> None:
    """Authority table: a kept process ends with a reconfiguration; another key or host key is one, on the same machine too."""
    assert opened_with() == opened_with()
    assert opened_with(**changed) != opened_with()
    assert "b25l" not in opened_with()
