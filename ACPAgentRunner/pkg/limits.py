"""Every bound and default of the core, with its unit and its reason. Nothing else in ``pkg`` writes such a number."""

from __future__ import annotations

from typing import Final

# ---- agent streams

AGENT_LINE_BYTES: Final = 64 * 1024 * 1024
"""Bytes of one line on an agent's stdout; agents embed whole files. (asyncio's own 64 KiB limit breaks real agents.)"""

STDERR_TAIL_BYTES: Final = 64 * 1024
"""Bytes of an agent's stderr kept for error messages; the rest is read and dropped so that it never blocks."""

EVENT_BUFFER_BYTES: Final = 1024 * 1024
"""Bytes of events a session holds for its consumer before it stops reading the agent's pipe."""

# ---- ending a process tree (seconds); together well inside the relay's 10 s

CANCEL_GRACE: Final = 3.0
"""Seconds an agent gets to answer a protocol-level cancel before its stdin is closed."""

EOF_GRACE: Final = 2.0
"""Seconds an agent gets to leave after its stdin was closed."""

TERM_GRACE: Final = 2.0
"""Seconds the tree gets after SIGTERM before SIGKILL."""

KILL_GRACE: Final = 2.0
"""Seconds the kernel gets to make a killed tree disappear before the cleanup counts as unconfirmed."""
