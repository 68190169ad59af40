"""The scripted ACP agent (local protocol fixture) with the steps that benchmarks need.

Run as ``python -I -S agent.py CONFIG``, as :mod:`testkit.scripted_acp_agent`.
"""

from __future__ import annotations

import json
import os
import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from testkit.scripted_acp_agent import Agent
else:
    sys.path.insert(0, os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "testkit"))  # noqa: PTH100, PTH118, PTH120
    from scripted_acp_agent import Agent


class BenchAgent(Agent):
    """An agent that numbers what it says and measures its own writing."""

    def do_pause(self, seconds: str) -> None:
        """Think for a while."""
        time.sleep(float(seconds))

    def do_numbered(self, count: str) -> None:
        """Chunks ``0 `` to ``COUNT-1 ``, one write each; before every tenth a tool call of that number, from start to end."""
        for number in range(int(count)):
            if number % 10 == 0:
                call = {"toolCallId": f"t{number}", "title": f"step {number}", "kind": "read", "rawInput": {"number": number}}
                self.update(self.session, {"sessionUpdate": "tool_call", "status": "in_progress", **call})
                self.update(
                    self.session, {"sessionUpdate": "tool_call_update", "toolCallId": f"t{number}", "status": "completed"}
                )
            self.chunk(self.session, f"{number} ")

    def do_answer(self, argument: str) -> None:
        """``CHUNKS RATE FILE``: chunks of 20 characters, one write each, at most RATE per second (0: as fast as it can).

        FILE then holds the seconds spent writing (``total``, ``longest`` single write), and ``span`` from first to last.
        """
        count, rate, path = argument.split(" ", 2)
        interval = 1 / float(rate) if float(rate) else 0.0
        head, tail = (
            json.dumps(
                {
                    "jsonrpc": "2.0",
                    "method": "session/update",
                    "params": {
                        "sessionId": self.session,
                        "update": {"sessionUpdate": "agent_message_chunk", "content": {"type": "text", "text": "%"}},
                    },
                }
            )
            + "\n"
        ).split("%")
        total = longest = 0.0
        began = time.perf_counter()
        for number in range(int(count)):
            if interval:
                ahead = began + number * interval - time.perf_counter()
                if ahead > 0:
                    time.sleep(ahead)
            line = f"{head}{number:019d} {tail}".encode()
            start = time.perf_counter()
            os.write(1, line)
            took = time.perf_counter() - start
            total += took
            longest = max(longest, took)
        with open(path, "w") as file:  # noqa: PTH123
            json.dump({"total": total, "longest": longest, "span": time.perf_counter() - began}, file)


if __name__ == "__main__":
    try:
        BenchAgent(json.loads(sys.argv[1]) if len(sys.argv) > 1 else {}).serve()
    except (BrokenPipeError, KeyboardInterrupt):
        sys.exit(0)
