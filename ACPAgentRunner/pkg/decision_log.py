from dataclasses import dataclass
from typing import Any


@dataclass
class DecisionLine:
    conversation: str
    actor: str
    kind: str
    what: str
    digest: str
    machine: str
    directory: str
    decision: str
    by: str


class DecisionLog:
    @classmethod
    def for_worker(cls, authority: Any) -> "DecisionLog":
        return cls()

    def write(self, line: DecisionLine) -> None:
        pass
