"""LangBot as it is, except that its Telegram adapter talks to the Bot API named by ``FAKE_TELEGRAM``.

The adapter has no setting for the address, so the library's default is replaced. Run with the host's interpreter.
"""

from __future__ import annotations

import os

from langbot.__main__ import main  # type: ignore[import-not-found]
from telegram.ext import ApplicationBuilder  # type: ignore[import-not-found]

_plain = ApplicationBuilder.__init__


def _on_loopback(self: ApplicationBuilder) -> None:
    _plain(self)
    self._base_url = os.environ["FAKE_TELEGRAM"] + "/bot"
    self._base_file_url = os.environ["FAKE_TELEGRAM"] + "/file/bot"


if __name__ == "__main__":
    ApplicationBuilder.__init__ = _on_loopback
    main()
