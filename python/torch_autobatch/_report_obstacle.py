"""An obstacle: a cause that prevents ops from running together, with its cost.

Obstacles are found separately for each block, and then added. A merged report is not used to find
them, because differences between blocks do not prevent batching.
"""

import dataclasses
from collections.abc import Callable, Iterable


@dataclasses.dataclass(frozen=True)
class Obstacle:
    """A cause at one source line, and its cost.

    Attributes:
        what: the cause: "float()", "weights of matmul".
        remedy: what to do about the cause.
        site: the source line.
        says: formats the obstacle as a sentence.
        detail: a detail of the first occurrence: "(16)".
        count: number of occurrences: flushes, calls or ops.
        launches: estimated number of additional launches due to the obstacle.
        ran: number of launches or calls made, if the sentence states this number; else 0.
        cause: a key for the cause, if ``what`` does not identify it. Obstacles of one line with the
            same key are added.
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
    """Adds the obstacles with the same cause and line. Sorts them by launches, descending."""
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
