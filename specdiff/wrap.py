"""``SpecDiff``: wrap any Hugging Face causal LM, keep its ``generate``."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, Self

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel
from transformers.generation import LogitsProcessorList, StoppingCriteriaList

from specdiff.call import OWN_ARGUMENTS, Bound, checked_rule
from specdiff.drafters.base import Drafter, move_drafter, rebind
from specdiff.errors import InvalidInputError, UnsupportedError
from specdiff.fast.choose import fast_path
from specdiff.fingerprint import Fingerprint
from specdiff.loop import Job, needs_step
from specdiff.session import Session
from specdiff.settings import check_call
from specdiff.stats import SpecDiffOutput
from specdiff.streaming import Feed
from specdiff.target import Target
from specdiff.tuning.curve import CostCurve
from specdiff.tuning.lengths import AdaptiveLengths, FixedLengths, Lengths
from specdiff.tuning.measure import Judge
from specdiff.tuning.store import curve_for

ADAPT_FROM = 16_000_000
"""Parameters from which block lengths adapt by default. Below, a pass is Python overhead, whatever it is given."""


class SpecDiff:
    """Lossless speculative decoding for a Hugging Face causal LM.

    Args:
        ar: the target: any decoder-only causal LM, loaded as its owner likes. It is never altered.
        drafter: an object that follows :class:`specdiff.drafters.base.Drafter`, a path or zoo name (loaded and bound to
            the target), ``"lookup"`` for prompt lookup, or None: plain autoregressive decoding through the same loop.
        tokenizer: the target's tokenizer; needed for stop strings unless each call brings one.
        rule: ``auto`` (greedy when not sampling, else block), ``greedy``, ``token``, ``block`` or ``coupled``.
        block_size: drafted tokens per round. An int fixes the largest number. ``"auto"`` adapts it, up to the drafter's
            own, to measured costs and running acceptance (:mod:`specdiff.tuning`). None is ``"auto"`` for targets of
            at least 16 million parameters; below that, passes are too short to be worth measuring, and it is the
            drafter's own.
        fast: ``auto`` takes the fast path where target and request allow it, ``off`` never does, ``on`` insists. On
            CPUs it is packed kernels (:mod:`specdiff.fast.target`), on CUDA devices recorded passes
            (:mod:`specdiff.fast.graphs`), which ``auto`` leaves alone.

    Raises:
        UnsupportedError: the target, or this drafter for it, cannot be served right.
    """

    def __init__(
        self,
        ar: PreTrainedModel,
        drafter: Drafter | str | os.PathLike[str] | None = None,
        *,
        tokenizer: Any = None,
        rule: str = "auto",
        block_size: int | str | None = None,
        fast: str = "auto",
    ) -> None:
        if fast not in ("auto", "on", "off"):
            raise InvalidInputError(f"fast must be 'auto', 'on' or 'off', not {fast!r}")
        self.ar = ar
        self.tokenizer = tokenizer
        self.rule = checked_rule(rule)
        self.fast = fast
        self.target: Target = Target(ar)
        self.notes: list[str] = [note] if (note := self.target.serving.note) else []
        self.fast_target, why = fast_path(ar, fast, self.target.device)
        self.notes += [why] if why else []
        if isinstance(drafter, (str, os.PathLike)):
            from specdiff.hub import load_drafter

            drafter = load_drafter(drafter, target=ar)
        if drafter is not None and not isinstance(drafter, Drafter):
            raise InvalidInputError(
                f"{type(drafter).__name__} is no drafter: it needs block_size, taps and start(request); "
                "a transformers model can draft through specdiff.drafters.block_lm or after training a drafter for it"
            )
        self.drafter: Drafter | None = drafter
        self.curves: dict[str, CostCurve] = {}  # of a drafter that does not say what its cost depends on
        self.set_block(block_size)

    # -- what a transformers model also has --------------------------------------------------------------------------

    @property
    def config(self) -> Any:
        """The target's configuration."""
        return self.ar.config

    @property
    def generation_config(self) -> GenerationConfig:
        """The target's generation configuration."""
        return self.ar.generation_config

    @property
    def device(self) -> torch.device:
        """Where inputs go."""
        return self.target.device

    @property
    def dtype(self) -> torch.dtype:
        """The target's dtype."""
        return self.target.dtype

    def to(self, *args: Any, **kwargs: Any) -> Self:
        """Move target and drafter, as ``Module.to`` does."""
        self.ar.to(*args, **kwargs)
        move_drafter(self.drafter, *args, **kwargs)
        rebind(self.drafter, self.ar)
        self.__init__(  # type: ignore[misc]
            self.ar, self.drafter, tokenizer=self.tokenizer, rule=self.rule, block_size=self.asked_block, fast=self.fast
        )
        return self

    def can_generate(self) -> bool:
        """True: it has ``generate``."""
        return True

    # -- generation --------------------------------------------------------------------------------------------------

    def generate(
        self, inputs: Tensor | None = None, generation_config: GenerationConfig | None = None, **kwargs: Any
    ) -> Tensor | SpecDiffOutput:
        """Generate with the arguments and returns of ``ar.generate``.

        Args:
            inputs: prompt ids ``Long[B, P]``, left-padded; or pass ``input_ids=``.
            generation_config: as for transformers.
            **kwargs: what ``transformers`` takes, and ``seed`` (int, or one int per returned row), ``generator``
                (a ``torch.Generator`` to draw the seed from), ``block_size`` and ``rule`` for this call.

        Returns:
            ``Long[B, P + n]``, or with ``return_dict_in_generate=True`` a :class:`SpecDiffOutput` with ``stats``.

        Raises:
            UnsupportedError: an argument that specdiff does not serve, by name.
            NumericalError: the target gave NaN, +inf or no finite logit.
        """
        return self.run_call(inputs, {"generation_config": generation_config, **kwargs})

    def run_call(self, inputs: Tensor | None, kwargs: dict[str, Any], resume: Session | None = None) -> Any:
        """``generate`` on behalf of this object or of one of its sessions."""
        with Feed(kwargs.pop("streamer", None)) as feed:  # whatever fails, a reader must not wait for ever
            check_call(kwargs)
            stop_strings = kwargs.pop("stop_strings", None)
            config = kwargs.get("generation_config")
            if config is not None and config.stop_strings is not None:
                stop_strings = config.stop_strings if stop_strings is None else stop_strings
                kwargs["generation_config"] = _without_stop_strings(config)
            if self.ar.generation_config.stop_strings is not None:
                stop_strings = stop_strings or self.ar.generation_config.stop_strings
                kwargs["stop_strings"] = None  # what the model's own configuration says must not reach transformers
            neutral = ("assistant_model", "assistant_tokenizer", "synced_gpus", "custom_generate")
            kwargs = {name: value for name, value in kwargs.items() if name not in neutral}
            callee = Bound(
                self,
                feed=feed,
                tokenizer=kwargs.pop("tokenizer", None),
                stop_strings=stop_strings,
                own={name: kwargs.pop(name) for name in OWN_ARGUMENTS if name in kwargs},
                put_prompt=True,
                resume=resume,
            )
            return self.ar.generate(inputs, custom_generate=callee, **kwargs)  # type: ignore[operator]

    def __call__(
        self,
        model: PreTrainedModel,
        input_ids: Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        seed: int | Sequence[int] | None = None,
        generator: torch.Generator | None = None,
        rule: str | None = None,
        block_size: int | str | None = None,
        **model_kwargs: Any,
    ) -> Tensor | SpecDiffOutput:
        """The callee of ``ar.generate(custom_generate=sd)``; Hugging Face has prepared all arguments.

        A streamer, tokenizer or stop strings do not reach a callee: give them to :meth:`bind`.
        """
        return Bound(self)(
            model,
            input_ids,
            logits_processor,
            stopping_criteria,
            generation_config,
            seed=seed,
            generator=generator,
            rule=rule,
            block_size=block_size,
            **model_kwargs,
        )

    def bind(self, *, streamer: Any = None, tokenizer: Any = None, stop_strings: Any = None) -> Bound:
        """A callee for ``ar.generate(custom_generate=...)`` that carries what generate would not pass on."""
        return Bound(self, streamer=streamer, tokenizer=tokenizer, stop_strings=stop_strings, put_prompt=True)

    def session(self) -> Session:
        """An object with the same ``generate`` that keeps both caches between calls (one row)."""
        return Session(self)

    def set_block(self, block_size: int | str | None) -> None:
        """Take ``block_size`` as the constructor does."""
        self.block_size = self.checked_block(block_size)
        self.asked_block = block_size
        self.adapts = self.drafter is not None and self._adaptive(block_size)

    # -- checks ------------------------------------------------------------------------------------------------------

    def target_for(self, capacity: int, seen: Fingerprint | None = None) -> tuple[Target, str | None]:
        """The target path for a request of ``capacity`` columns per row, and why it is not the fast one, if not.

        ``seen`` as in :meth:`specdiff.target.Target.open`.

        Raises:
            UnsupportedError: ``fast="on"`` and the request does not fit the fast path.
        """
        if self.fast_target is None:
            return self.target, None  # said once in self.notes, or switched off
        why = self.fast_target.refuses(capacity, seen)
        if why is None:
            return self.fast_target, None
        if self.fast == "on":
            raise UnsupportedError(f"fast='on', but {why}; use fast='auto' or fast='off'")
        return self.target, f"general path: {why}"

    def lengths_for(self, target: Target, job: Job, block_size: int | str | None) -> Lengths:
        """How block lengths are chosen for ``job``; ``block_size`` is the call's own, None for this object's.

        Costs that are not known yet are measured (some seconds, once per machine and pair).
        """
        adapts = self.adapts if block_size is None else self._adaptive(block_size)
        if self.drafter is None or not adapts or not job.block_size or (needs_step(job) and len(job.pads) > 1):
            return FixedLengths()
        curve, note = curve_for(self, target, len(job.pads), Judge(job.rule, job.warp))
        job.stats.notes += [note] if note else []
        return AdaptiveLengths(curve)

    def _adaptive(self, block_size: int | str | None) -> bool:
        if block_size is None:
            return sum(p.numel() for p in self.ar.parameters()) >= ADAPT_FROM
        return block_size == "auto"

    def checked_block(self, block_size: int | str | None) -> int:
        """``block_size`` if this drafter can serve it; the drafter's own for None and ``"auto"``."""
        largest = self.drafter.block_size if self.drafter is not None else 0
        if block_size is None or block_size == "auto":
            return largest
        if isinstance(block_size, bool) or not isinstance(block_size, int) or block_size < 0:
            raise InvalidInputError(
                f"block_size counts drafted tokens and must be an int >= 0, 'auto' or None, got {block_size!r}"
            )
        if self.drafter is None and block_size:
            raise InvalidInputError("block_size needs a drafter; without one specdiff decodes one token per pass")
        if block_size > largest:
            raise InvalidInputError(f"block_size {block_size} is more than this drafter's {largest}")
        return block_size


def _without_stop_strings(config: GenerationConfig) -> GenerationConfig:
    copy = GenerationConfig.from_dict(config.to_dict())
    copy.stop_strings = None
    return copy
