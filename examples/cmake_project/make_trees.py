"""Makes trees.txt: short sentences of a small grammar, with a sentiment (0 to 4) at every node.

Usage: python make_trees.py > trees.txt
"""

import random

NOUNS = ["film", "plot", "cast", "score", "ending", "story", "script", "pace"]
GOOD = ["fine", "brilliant", "moving", "funny", "clever"]
BAD = ["dull", "weak", "silly", "slow", "empty"]


def node(label: int, *parts: str) -> str:
    return f"({label} {' '.join(parts)})"


def adjective(rng: random.Random, depth: int = 0) -> tuple[int, str]:
    """Returns a label and a tree: an adjective, "very" or "not" with it, or two adjectives."""
    kind = rng.random()
    if kind < 0.25 and depth < 3:
        label, tree = adjective(rng, depth + 1)
        return 4 - label, node(4 - label, node(2, "not"), tree)
    if kind < 0.5 and depth < 3:
        label, tree = adjective(rng, depth + 1)
        stronger = 4 if label > 2 else 0
        return stronger, node(stronger, node(2, "very"), tree)
    if kind < 0.6 and depth < 2:
        (a, left), (b, right) = adjective(rng, depth + 1), adjective(rng, depth + 1)
        label = (a + b) // 2
        return label, node(label, left, node(b, node(2, "and"), right))
    good = rng.random() < 0.5
    return (3, node(3, rng.choice(GOOD))) if good else (1, node(1, rng.choice(BAD)))


def sentence(rng: random.Random) -> tuple[int, str]:
    label, said = adjective(rng)
    subject = node(2, node(2, "the"), node(2, rng.choice(NOUNS)))
    tree = node(label, subject, node(label, node(2, "is"), said))
    if rng.random() < 0.3:
        other, more = sentence(rng)
        label = (label + 2 * other) // 3
        return label, node(label, tree, node(other, node(2, "but"), more))
    return label, tree


def main() -> None:
    rng = random.Random(1)
    for _ in range(48):
        print(sentence(rng)[1])


if __name__ == "__main__":
    main()
