"""Numbers on the command line: argparse types that say what is wrong."""

from __future__ import annotations

import argparse
import math
from typing import Any


def at_least(bound: float, kind: type = int, *, above: bool = False) -> Any:
    """An argparse type: a finite number of ``kind`` that is at least (``above``: more than) ``bound``."""

    def parse(text: str) -> Any:
        value = kind(text)
        if not (value > bound if above else value >= bound) or value == math.inf:
            raise argparse.ArgumentTypeError(f"must be {'more than' if above else 'at least'} {bound}, got {text}")
        return value

    parse.__name__ = "number"
    return parse


def share(text: str) -> float:
    """An argparse type: a number in (0, 1]."""
    value = float(text)
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"must be above 0 and at most 1, got {text}")
    return value


def fraction(text: str) -> float:
    """An argparse type: a number in [0, 1]."""
    value = float(text)
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"must be between 0 and 1, got {text}")
    return value
