"""LangBot's plugin runtime (``lbp rt``) as it is, except that both of its listeners bind 127.0.0.1.

The stock runtime binds every interface and has no setting for it. Run with the host's interpreter; arguments go to ``lbp rt``.
"""

from __future__ import annotations

import sys
from typing import Any

from langbot_plugin.cli import main
from langbot_plugin.runtime.io.controllers.ws.server import WebSocketServerController

_plain = WebSocketServerController.__init__


def _on_loopback(self: WebSocketServerController, port: int, **options: Any) -> None:
    _plain(self, port, **{**options, "host": "127.0.0.1"})


if __name__ == "__main__":
    WebSocketServerController.__init__ = _on_loopback  # type: ignore[method-assign]
    sys.argv = ["lbp", "rt", *sys.argv[1:]]
    main()  # type: ignore[no-untyped-call]
