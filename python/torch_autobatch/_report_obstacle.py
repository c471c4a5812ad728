"""An obstacle: something that keeps ops from running together, with what it costs.

Obstacles of several blocks are those of each, added: what differs from block to block keeps
nothing apart.
"""

import dataclasses
from collections.abc import Callable, Iterable


@dataclasses.dataclass(frozen=True)
class Obstacle:
    """What kind it is, and how often it was met.

    Attributes:
        what: the cause: "float()", "weights of matmul".
        remedy: what to do about it.
        site: the line of the program.
        says: makes a sentence of it.
        detail: of the first that was met: "(16)".
        count: how often: flushes, calls, ops.
        launches: an estimate of how many calls it costs.
        ran: launches made, where the sentence has them.
        cause: what it has in common with others of its line, if that is not ``what``.
    """

    what: str
    remedy: str
    site: str
    says: Callable[["Obstacle"], str]
    detail: str = ""
    count: int = 0
    launches: int = 0
    ran: int = 0
    cause: str = ""

    def __str__(self) -> str:
        return self.says(self)


def added(obstacles: Iterable[Obstacle]) -> list[Obstacle]:
    """One for each cause and line, those that cost the most launches first."""
    found: dict[tuple[object, ...], Obstacle] = {}
    for one in obstacles:
        key = (one.says, one.what, one.remedy, one.site)
        if (before := found.get(key)) is None:
            found[key] = one
        else:
            found[key] = dataclasses.replace(
                before,
                count=before.count + one.count,
                launches=before.launches + one.launches,
                ran=before.ran + one.ran,
            )
    return sorted(found.values(), key=lambda obstacle: -obstacle.launches)
