"""Stop tests, one row and one token at a time, so that a stop inside an accepted block ends the row there."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import StoppingCriteriaList

Reason = Literal["eos", "stop", "length"]

_MODULE = "transformers.generation.stopping_criteria"
_ROWWISE = frozenset({"MaxLengthCriteria", "MaxTimeCriteria", "StopStringCriteria", "EosTokenCriteria"})


class StopTests:
    """The stopping criteria of one request.

    Args:
        criteria: the list that Hugging Face's ``generate`` built. Only the criteria in it stop a row.
        eos_token_ids: ids that count as end of sequence when naming the reason, besides those of ``EosTokenCriteria``.

    Attributes:
        eos: ids that end a row (from ``EosTokenCriteria``).
        max_length: largest number of ids of a row, prompt and left padding included (from ``MaxLengthCriteria``;
            ``sys.maxsize`` without one).
        quick: True if nothing but ``eos`` and ``max_length`` can stop a row, so that plain integers decide.
        rowwise: True if every criterion is a stock one that judges each row alone. Otherwise a batch of several rows
            has to be decoded in lockstep with :meth:`check_batch`, as custom criteria may look at the whole batch.
    """

    def __init__(
        self, criteria: StoppingCriteriaList | None, *, eos_token_ids: Iterable[int] | Tensor | int | None = None
    ) -> None:
        eos: set[int] = set()
        self.max_length = sys.maxsize
        self._others: list[Any] = []
        self.rowwise = True
        for criterion in criteria or []:
            name = _stock_name(criterion)
            if name == "EosTokenCriteria":
                eos |= _as_ids(criterion.eos_token_id)
            elif name == "MaxLengthCriteria":
                self.max_length = min(self.max_length, criterion.max_length)
            else:
                self._others.append(criterion)
                self.rowwise &= name in _ROWWISE
        self.eos = frozenset(eos)
        self.quick = not self._others
        self._eos_names = self.eos | _as_ids(eos_token_ids)

    def quick_check(self, token: int, length: int) -> Reason | None:
        """Why a row ends after ``token``, its ``length``-th id; only EOS and length are looked at."""
        if token in self.eos:
            return "eos"
        return "length" if length >= self.max_length else None

    def check(self, ids: Tensor, scores: Sequence[Tensor] | None = None) -> Reason | None:
        """Why the row ends after its last token, or None.

        Args:
            ids: ``Long[1, L]`` all ids of the row as plain decoding would hold them, the new token last.
            scores: processed scores so far, one ``[1, V]`` per new token, or None (as in ``generate``).

        Returns:
            "eos" and "stop" win over "length" when several hold.
        """
        token, length = int(ids[0, -1]), ids.shape[1]
        stopped = token in self.eos
        for criterion in self._others:  # every criterion sees every token, as in plain decoding
            stopped |= bool(torch.as_tensor(criterion(ids, scores)).any())
        return self._name(token, stopped, length)

    def check_batch(self, ids: Tensor, scores: Sequence[Tensor] | None = None) -> list[Reason | None]:
        """The call of plain decoding: all rows of the request after one more token each.

        Args:
            ids: ``Long[B, L]``; finished rows hold padding, and what is said about them is to be ignored.
            scores: processed scores so far, one ``[B, V]`` per step, or None.
        """
        batch, length = ids.shape
        last = ids[:, -1].tolist()
        stopped = [token in self.eos for token in last]
        for criterion in self._others:
            verdict = torch.as_tensor(criterion(ids, scores)).reshape(-1).expand(batch).tolist()
            stopped = [a or bool(b) for a, b in zip(stopped, verdict, strict=True)]
        return [self._name(token, stop, length) for token, stop in zip(last, stopped, strict=True)]

    def _name(self, token: int, stopped: bool, length: int) -> Reason | None:
        if stopped:
            return "eos" if token in self._eos_names else "stop"
        return "length" if length >= self.max_length else None


def _stock_name(criterion: object) -> str:
    """Class name of an exact stock criterion, "" for anything else."""
    cls = type(criterion)
    return cls.__name__ if cls.__module__ == _MODULE else ""


def _as_ids(value: Iterable[int] | Tensor | int | None) -> set[int]:
    if value is None:
        return set()
    if isinstance(value, Tensor):
        return set(value.reshape(-1).tolist())
    if isinstance(value, int):
        return {value}
    return {int(v) for v in value}
