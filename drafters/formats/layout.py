"""What a checkpoint layout is to specdiff, and what layouts disagree about: taps, block sizes, nested values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from specdiff.drafters.config import DFlashConfig
from specdiff.errors import FormatError, InvalidInputError


@dataclass(frozen=True)
class TargetShape:
    """What a layout may need to know about the target, or say about it.

    Attributes:
        layers: its depth.
        vocab: rows of its head.
        name: path or hub id.
        architecture: its class.
        positions: longest text, None if it does not say.
    """

    layers: int
    vocab: int
    name: str = ""
    architecture: str = ""
    positions: int | None = None


def shape_of(target: Any) -> TargetShape:
    """The shape of a Hugging Face causal LM."""
    text = target.config.get_text_config()
    return TargetShape(
        text.num_hidden_layers,
        text.vocab_size,
        getattr(target.config, "_name_or_path", "") or "",
        type(target).__name__,
        getattr(text, "max_position_embeddings", None),
    )


@dataclass(frozen=True)
class Layout:
    """One way of writing a drafter down.

    Attributes:
        name: for ``specdiff export --to``.
        recognises: whether a ``config.json`` is of this layout.
        settings: settings from it; the target's shape is needed where the layout does not hold it.
        values: ``config.json`` for settings. What the layout cannot hold is left out: the caller compares what
            ``settings`` reads back.
        renames: (name on disk, ours) of parameters, by prefix.
        aliases: the same, for names that are read but not written.
        own_weights: the layout may bring an embedding, a head, and the maps ``t2d``, ``d2t`` of a pruned vocabulary.
    """

    name: str
    recognises: Callable[[dict[str, Any]], bool]
    settings: Callable[[dict[str, Any], TargetShape | None], DFlashConfig]
    values: Callable[[DFlashConfig, TargetShape], dict[str, Any]]
    renames: tuple[tuple[str, str], ...] = ()
    aliases: tuple[tuple[str, str], ...] = ()
    own_weights: bool = False

    def ours(self, name: str) -> str:
        """A parameter's name in :class:`~specdiff.drafters.dflash.DFlashModel`."""
        return _renamed(name, self.renames + self.aliases)

    def theirs(self, name: str) -> str:
        """A parameter's name on disk."""
        return _renamed(name, [(ours, theirs) for theirs, ours in self.renames])


def _renamed(name: str, pairs: Sequence[tuple[str, str]]) -> str:
    for old, new in pairs:
        if name.startswith(old):
            return new + name.removeprefix(old)
    return name


class Values:
    """A ``config.json`` whose values may be nested: looked up in each place in turn.

    Args:
        places: dictionaries, first come first served; None counts as absent.
    """

    def __init__(self, *places: dict[str, Any] | None) -> None:
        self.places = [place or {} for place in places]

    def get(self, name: str, *fallback: Any) -> Any:
        """The first value of this name.

        Raises:
            FormatError: there is none, and no fallback.
        """
        for place in self.places:
            if place.get(name) is not None:
                return place[name]
        if fallback:
            return fallback[0]
        raise FormatError(f"config.json has no {name}, neither nested nor at the top")


def taps_after(ids: Sequence[int]) -> tuple[int, ...]:
    """Taps of specdiff (the state *after* a layer) from ids that count states, 0 being the embedding (-1).

    Raises:
        FormatError: the embedding itself is tapped.
    """
    if any(i < 1 for i in ids):
        raise FormatError(f"layer ids {list(ids)} tap the embedding output (id 0), which specdiff does not read")
    return tuple(i - 1 for i in ids)


def states_of(taps: Sequence[int]) -> list[int]:
    """The inverse of :func:`taps_after` (+1)."""
    return [i + 1 for i in taps]


def drafted(block_size: int, anchor_counted: bool) -> int:
    """K, from a ``block_size`` that may count the anchor.

    Raises:
        FormatError: nothing would be drafted.
    """
    count = int(block_size) - int(anchor_counted)
    if count < 1:
        counted = ", which counts the anchor," if anchor_counted else ""
        raise FormatError(f"block_size {block_size}{counted} leaves no token to draft")
    return count


def build(**settings: Any) -> DFlashConfig:
    """Settings as a checkpoint gives them: nonsense is the checkpoint's fault.

    Raises:
        FormatError: values that contradict each other or lie outside their range.
    """
    try:
        return DFlashConfig(**settings)
    except (InvalidInputError, TypeError, ValueError) as error:
        raise FormatError(f"config.json: {error}") from error


def depth(layout: str, target: TargetShape | None) -> TargetShape:
    """The target's shape, for layouts that do not say how deep it is.

    Raises:
        FormatError: there is no target.
    """
    if target is None:
        raise FormatError(f"the {layout} layout does not say how deep its target is: pass target= when loading it")
    return target


def check_rope(rope: dict[str, Any]) -> None:
    """Refuse scaled rotary positions.

    Raises:
        FormatError: they are scaled.
    """
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind != "default":
        raise FormatError(f"rope_type {kind!r} is not supported for drafters")


def refuse(values: Values, **wanted: Any) -> None:
    """Refuse settings that no drafter of specdiff has, by name; ``wanted`` gives the value that is fine.

    Raises:
        FormatError: one of them is set otherwise.
    """
    for name, fine in wanted.items():
        if values.get(name, fine) != fine:
            raise FormatError(f"{name} {values.get(name)!r} is not supported for drafters, only {fine!r}")


def windows(kinds: Sequence[str] | None, size: int | None) -> tuple[int, ...]:
    """Windows by layer from ``layer_types`` and ``sliding_window``.

    Raises:
        FormatError: an unknown kind, or a sliding layer without a window size.
    """
    if unknown := set(kinds or ()) - {"full_attention", "sliding_attention"}:
        raise FormatError(f"layer_types {sorted(unknown)} are not supported for drafters")
    if "sliding_attention" not in (kinds or ()):
        return ()
    if not size:
        raise FormatError("layers with sliding attention need a sliding_window")
    return tuple(size if kind == "sliding_attention" else 0 for kind in kinds or ())


def layer_types(config: DFlashConfig) -> list[str]:
    """The inverse of :func:`windows`."""
    kinds = config.windows or (0,) * config.num_layers
    return ["sliding_attention" if window else "full_attention" for window in kinds]
