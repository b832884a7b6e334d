"""How many copied tokens prompt lookup has accepted, by length of its match and temperature of the text.

    python benchmarks/copy_promise.py CORPUS.npz [--documents 70]

On a text that a target wrote, what lookup would propose at every position is compared with what follows: greedy text is
the target's answer to every prefix, and sampled text agrees with a fixed proposal as often as the proposal is accepted.
``specdiff.drafters.combined.PROMISE`` was read off the greedy row of the corpora that the zoo's drafter was trained on.
"""

from __future__ import annotations

import argparse
from collections import Counter, defaultdict

from specdiff.drafters.combined import COPIES
from specdiff.drafters.lookup import NgramIndex, PromptLookup
from specdiff.drafters.train.corpus import Document, expand, read_shard

LONGEST = 12


def copies(document: Document, lookup: PromptLookup) -> list[tuple[int, int]]:
    """(match length, accepted tokens) at every position of the answer where there is a match."""
    index = NgramIndex(lookup.smallest, lookup.largest)
    ids = document.ids.tolist()
    index.extend(ids[: document.prompt_length])
    found = []
    for at in range(document.prompt_length, len(ids) - 1):
        length, proposed = index.match(ids[at], lookup.block_size)
        if length:
            right = [a == b for a, b in zip(proposed, ids[at + 1 :], strict=False)]
            found.append((min(length, LONGEST), [*right, False].index(False)))
        index.extend(ids[at : at + 1])
    return found


def main() -> None:
    """Print a row for every temperature."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("corpus", nargs="+", help="shards, folders or patterns")
    parser.add_argument("--documents", type=int, default=70, help="of each temperature (default %(default)s)")
    args = parser.parse_args()
    taken: Counter[float] = Counter()
    accepted: dict[tuple[float, int], list[int]] = defaultdict(list)
    for document in (d for path in expand(args.corpus) for d in read_shard(path)):
        heat = round(document.temperature, 2)
        taken[heat] += 1
        if taken[heat] <= args.documents:
            for length, count in copies(document, PromptLookup(block_size=COPIES)):
                accepted[heat, length].append(count)
    lengths = range(PromptLookup().smallest, LONGEST + 1)
    print("match      " + "".join(f"{n:>7}" for n in lengths))
    for heat in sorted(taken):
        means = [accepted[heat, n] for n in lengths]
        print(f"T = {heat:<7}" + "".join(f"{sum(m) / len(m):7.2f}" if m else "      -" for m in means))


if __name__ == "__main__":
    main()
