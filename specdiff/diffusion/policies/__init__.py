"""All policies by name."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from specdiff.diffusion.policies.ancestral import Ancestral, AnyOrder, FirstHitting, MaskPredict, ReMDM
from specdiff.diffusion.policies.assisted import AdaptiveParallel
from specdiff.diffusion.policies.base import Decision, Frame, Policy, View, committed
from specdiff.diffusion.policies.confidence import (
    Dream,
    Dynamic,
    Edit,
    EntropyBudget,
    Factor,
    Leading,
    Mixed,
    Quota,
    Sequential,
    StableSkip,
    Static,
    SubBlock,
    Threshold,
)
from specdiff.diffusion.policies.d3pm import UniformAncestral
from specdiff.diffusion.policies.uniform import EntropyBound
from specdiff.errors import InvalidInputError

POLICIES: dict[str, type[Policy]] = {
    policy.name: policy
    for policy in (
        Quota,
        Threshold,
        Leading,
        Factor,
        SubBlock,
        Dynamic,
        Static,
        Sequential,
        EntropyBudget,
        Dream,
        Edit,
        StableSkip,
        Mixed,
        Ancestral,
        FirstHitting,
        AnyOrder,
        MaskPredict,
        ReMDM,
        EntropyBound,
        UniformAncestral,
        AdaptiveParallel,
    )
}


def make_policy(policy: str | Policy, options: dict[str, Any]) -> Policy:
    """The policy of that name with these options; options it does not have are refused by name."""
    if isinstance(policy, Policy):
        if options:
            raise InvalidInputError(
                f"options {', '.join(sorted(options))} belong into the policy object that was given"
            )
        return policy
    if policy not in POLICIES:
        raise InvalidInputError(f"unknown policy {policy!r}; known: {', '.join(sorted(POLICIES))}")
    kind = POLICIES[policy]
    known = {f.name for f in fields(kind)}
    unknown = sorted(set(options) - known)
    if unknown:
        raise InvalidInputError(
            f"policy {policy!r} has no option {', '.join(unknown)}; it has {', '.join(sorted(known))}"
        )
    return kind(**options)


__all__ = ["POLICIES", "Decision", "Frame", "Policy", "View", "committed", "make_policy"]
