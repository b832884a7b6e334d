"""``SpecDiff``: wrap any Hugging Face causal LM, keep its ``generate``."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any, Self

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel
from transformers.generation import LogitsProcessorList, StoppingCriteriaList

from specdiff.drafters.base import Drafter, DraftSession
from specdiff.errors import InvalidInputError, UnsupportedError
from specdiff.loop import DEFAULT_CHUNK, Decoding, Job, Row, needs_step
from specdiff.settings import check_generation_config, check_model_kwargs
from specdiff.stats import GenerationStats, SpecDiffOutput
from specdiff.stopping import StopTests
from specdiff.target import Target, TargetState
from specdiff.verify import RULES
from specdiff.verify.noise import row_seeds
from specdiff.warp import BlockWarp

OWN_ARGUMENTS = ("seed", "generator", "rule", "block_size")


class SpecDiff:
    """Lossless speculative decoding for a Hugging Face causal LM.

    Args:
        ar: the target: any decoder-only causal LM, loaded as its owner likes. It is never altered.
        drafter: an object that follows :class:`specdiff.drafters.base.Drafter`, a path or zoo name (loaded and bound to
            the target), ``"lookup"`` for prompt lookup, or None for plain autoregressive decoding through the same loop.
        tokenizer: the target's tokenizer; needed for stop strings unless each call brings one.
        rule: ``auto`` (greedy when not sampling, else block), ``greedy``, ``token``, ``block`` or ``coupled``.
        block_size: largest number of drafted tokens per round; the drafter's own when None.
        fast: ``auto`` takes the fast path where target and request allow it, ``off`` never does, ``on`` insists.

    Raises:
        UnsupportedError: the target, or this drafter for it, cannot be served right.
    """

    def __init__(
        self,
        ar: PreTrainedModel,
        drafter: Drafter | str | None = None,
        *,
        tokenizer: Any = None,
        rule: str = "auto",
        block_size: int | None = None,
        fast: str = "auto",
    ) -> None:
        if fast not in ("auto", "on", "off"):
            raise InvalidInputError(f"fast must be 'auto', 'on' or 'off', not {fast!r}")
        self.ar = ar
        self.tokenizer = tokenizer
        self.rule = _checked_rule(rule)
        self.fast = fast
        self.target: Target = Target(ar)
        self.notes: list[str] = []
        if isinstance(drafter, (str, bytes)) or hasattr(drafter, "__fspath__"):
            from specdiff.hub import load_drafter

            drafter = load_drafter(drafter, target=ar)
        if drafter is not None and not isinstance(drafter, Drafter):
            raise InvalidInputError(
                f"{type(drafter).__name__} is no drafter: it needs block_size, taps and start(request); "
                "a transformers model can draft through specdiff.drafters.block_lm or after training a drafter for it"
            )
        self.drafter: Drafter | None = drafter
        self.block_size = self._checked_block(block_size)

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
        move = getattr(self.drafter, "to", None)
        if move is not None:
            move(*args, **kwargs)
        self.__init__(  # type: ignore[misc]
            self.ar, self.drafter, tokenizer=self.tokenizer, rule=self.rule, block_size=self.block_size, fast=self.fast
        )
        return self

    def can_generate(self) -> bool:
        """True: it has ``generate``."""
        return True

    # -- generation --------------------------------------------------------------------------------------------------

    def generate(self, inputs: Tensor | None = None, **kwargs: Any) -> Tensor | SpecDiffOutput:
        """Generate with the arguments and returns of ``ar.generate``.

        Args:
            inputs: prompt ids ``Long[B, P]``, left-padded; or pass ``input_ids=``.
            **kwargs: what ``transformers`` takes, and ``seed`` (int, or one int per returned row), ``generator``
                (a ``torch.Generator`` to draw the seed from), ``block_size`` and ``rule`` for this call.

        Returns:
            ``Long[B, P + n]``, or with ``return_dict_in_generate=True`` a :class:`SpecDiffOutput` with ``stats``.

        Raises:
            UnsupportedError: an argument that specdiff does not serve, by name.
            NumericalError: the target gave NaN, +inf or no finite logit.
        """
        return self._generate(inputs, kwargs)

    def _generate(self, inputs: Tensor | None, kwargs: dict[str, Any], resume: Session | None = None) -> Any:
        if kwargs.pop("custom_generate", None) is not None:
            raise UnsupportedError("custom_generate is how ar.generate calls specdiff; leave it out of SpecDiff.generate")
        for name in ("assistant_model", "assistant_tokenizer", "synced_gpus", "negative_prompt_ids"):
            if kwargs.get(name) is not None:
                raise UnsupportedError(f"{name} is not supported by SpecDiff.generate; drafting is the drafter's work")
            kwargs.pop(name, None)
        stop_strings = kwargs.pop("stop_strings", None)
        config = kwargs.get("generation_config")
        if stop_strings is None and config is not None and config.stop_strings is not None:
            stop_strings = config.stop_strings
            kwargs["generation_config"] = config = _without_stop_strings(config)
        callee = Bound(
            self,
            streamer=kwargs.pop("streamer", None),
            tokenizer=kwargs.pop("tokenizer", None),
            stop_strings=stop_strings,
            own={name: kwargs.pop(name) for name in OWN_ARGUMENTS if name in kwargs},
            put_prompt=True,
            resume=resume,
        )
        return self.ar.generate(inputs, custom_generate=callee, **kwargs)

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
        block_size: int | None = None,
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

    # -- checks ------------------------------------------------------------------------------------------------------

    def _checked_block(self, block_size: int | None) -> int:
        largest = self.drafter.block_size if self.drafter is not None else 0
        if block_size is None:
            return largest
        if not isinstance(block_size, int) or block_size < 0:
            raise InvalidInputError(f"block_size counts drafted tokens and must be an int >= 0, got {block_size!r}")
        if self.drafter is None and block_size:
            raise InvalidInputError("block_size needs a drafter; without one specdiff decodes one token per pass")
        if block_size > largest:
            raise InvalidInputError(f"block_size {block_size} is more than this drafter's {largest}")
        return block_size


class Bound:
    """One callee for ``custom_generate`` together with what Hugging Face does not hand to callees."""

    def __init__(
        self,
        owner: SpecDiff,
        *,
        streamer: Any = None,
        tokenizer: Any = None,
        stop_strings: Any = None,
        own: dict[str, Any] | None = None,
        put_prompt: bool = False,
        resume: Session | None = None,
    ) -> None:
        self.owner, self.streamer, self.tokenizer, self.stop_strings = owner, streamer, tokenizer, stop_strings
        self.own, self.put_prompt, self.resume = own or {}, put_prompt, resume

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
        block_size: int | None = None,
        **model_kwargs: Any,
    ) -> Tensor | SpecDiffOutput:
        """Decode; see :meth:`SpecDiff.__call__`."""
        owner = self.owner
        own = {"seed": seed, "generator": generator, "rule": rule, "block_size": block_size} | self.own
        if model is not owner.ar:
            raise UnsupportedError("this SpecDiff wraps another model than the one generate was called on; make one for it")
        notes = check_generation_config(generation_config, model=model)
        check_model_kwargs(model_kwargs)
        job = self._job(input_ids, logits_processor, stopping_criteria, generation_config, own, model_kwargs, notes)
        try:
            if self.streamer is not None and self.put_prompt:
                self.streamer.put(input_ids.cpu())
            rows = self._run(job)
        finally:
            if self.streamer is not None:
                self.streamer.end()
        return _outputs(job, rows, input_ids, generation_config)

    def _run(self, job: Job) -> list[Row]:
        owner = self.owner
        if self.resume is not None:
            return self.resume.run(job)
        decoding = Decoding(job, owner.target, owner.drafter)
        try:
            return decoding.run()
        finally:
            decoding.close()

    def _job(
        self,
        input_ids: Tensor,
        processors: LogitsProcessorList,
        criteria: StoppingCriteriaList,
        config: GenerationConfig,
        own: dict[str, Any],
        model_kwargs: dict[str, Any],
        notes: list[str],
    ) -> Job:
        owner = self.owner
        batch, width = input_ids.shape
        ids = input_ids.to(owner.device)
        stats = GenerationStats(notes=[*owner.notes, *notes])
        warp = BlockWarp(processors, batch_size=batch)
        rule = _rule_for(_checked_rule(own["rule"] or owner.rule), bool(config.do_sample))
        if rule == "block" and warp.kind == "stateful":
            rule = "token"
            stats.notes.append("rule block became token: a stateful logits processor is run slot by slot")
        wanted = own["block_size"]
        block = owner.block_size if wanted is None else owner._checked_block(wanted)
        stop_strings = self.stop_strings
        if stop_strings is not None:
            tokenizer = self.tokenizer if self.tokenizer is not None else owner.tokenizer
            if tokenizer is None:
                raise InvalidInputError("stop_strings need the tokenizer: pass tokenizer= here or to SpecDiff(...)")
            from transformers.generation import StopStringCriteria

            criteria = StoppingCriteriaList([*criteria, StopStringCriteria(tokenizer, stop_strings)])
        eos = config._eos_token_tensor
        pad = config._pad_token_tensor
        eos_ids = [] if eos is None else eos.reshape(-1).tolist()
        pad_token = int(pad) if pad is not None else (eos_ids[0] if eos_ids else 0)
        return_dict = bool(config.return_dict_in_generate)
        job = Job(
            ids=ids,
            pads=_left_padding(model_kwargs.get("attention_mask"), model_kwargs.get("position_ids"), input_ids),
            max_new=config.max_length - width,
            pad_token=pad_token,
            rule=rule,
            block_size=block,
            warp=warp,
            stops=StopTests(criteria, eos_token_ids=eos_ids),
            seeds=_seeds(own["seed"], own["generator"], batch, rule),
            chunk=config.prefill_chunk_size or DEFAULT_CHUNK,
            emit=None if self.streamer is None else self.streamer.put,
            keep_scores=return_dict and bool(config.output_scores),
            keep_logits=return_dict and bool(config.output_logits),
            stats=stats,
        )
        why = needs_step(job)
        if batch > 1 and why is not None:
            stats.notes.append(f"no drafting: {why} over several rows needs all rows in step")
        return job


class Session:
    """``generate`` for a conversation: the common prefix with what was last seen stays in both caches.

    One row per call. An edited history is rolled back to where it differs.
    """

    def __init__(self, owner: SpecDiff) -> None:
        self.owner = owner
        self.cached: list[int] = []
        self.state: TargetState | None = None
        self.draft: DraftSession | None = None

    def generate(self, inputs: Tensor | None = None, **kwargs: Any) -> Tensor | SpecDiffOutput:
        """As :meth:`SpecDiff.generate`, for one row."""
        return self.owner._generate(inputs, kwargs, resume=self)

    def run(self, job: Job) -> list[Row]:
        """Decode one prepared job on top of what is cached."""
        if len(job.pads) != 1:
            raise UnsupportedError("a session holds one row per call; use SpecDiff.generate for batches")
        prompt = job.ids[0, job.pads[0] :].tolist()
        same = 0
        for old, new in zip(self.cached, prompt[:-1], strict=False):
            if old != new:
                break
            same += 1
        if self.state is not None:
            self.state.rollback([same])
            if self.draft is not None:
                self.draft.rollback(torch.tensor([same], device=self.owner.device))
        decoding = Decoding(job, self.owner.target, self.owner.drafter, self.state, self.draft, keep_rows=True)
        try:
            rows = decoding.run()
        except BaseException:
            decoding.close()
            self.state = self.draft = None
            self.cached = []
            raise
        self.state, self.draft = decoding.state, decoding.session
        assert self.state is not None
        self.cached = (prompt + rows[0].new)[: self.state.lengths[0]]
        return rows

    def close(self) -> None:
        """Release both caches."""
        for held in (self.state, self.draft):
            if held is not None:
                held.close()
        self.state = self.draft = None
        self.cached = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _checked_rule(rule: str) -> str:
    if rule not in ("auto", *RULES):
        raise InvalidInputError(f"rule must be one of auto, {', '.join(RULES)}; got {rule!r}")
    return rule


def _rule_for(rule: str, sampling: bool) -> str:
    """The rule in force; greedy decoding is every rule's limit, so it is used whenever nothing is sampled."""
    if rule == "greedy" and sampling:
        raise InvalidInputError("rule='greedy' contradicts do_sample=True; use rule 'auto', 'token', 'block' or 'coupled'")
    if not sampling:
        return "greedy"
    return "block" if rule == "auto" else rule


def _seeds(seed: Any, generator: torch.Generator | None, batch: int, rule: str) -> Tensor:
    """``Long[B]`` row seeds; nothing is drawn from a generator when a seed is given or nothing is sampled."""
    if seed is not None and generator is not None:
        raise InvalidInputError("give either seed or generator, not both")
    if isinstance(seed, Tensor):
        seed = seed.tolist()
    if isinstance(seed, (list, tuple)):
        if len(seed) != batch:
            raise InvalidInputError(f"{len(seed)} seeds for {batch} rows; give one per returned row, or a single int")
        return torch.tensor([_checked_seed(value) for value in seed], dtype=torch.long)
    if seed is None:
        if rule == "greedy":
            return torch.zeros(batch, dtype=torch.long)
        device = generator.device if generator is not None else torch.device("cpu")
        seed = int(torch.randint(2**63 - 1, (), generator=generator, device=device))
    return row_seeds(_checked_seed(seed), batch)


def _checked_seed(seed: Any) -> int:
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**63:
        raise InvalidInputError(f"a seed is an int in [0, 2**63), got {seed!r}")
    return seed


def _left_padding(mask: Tensor | None, position_ids: Tensor | None, ids: Tensor) -> list[int]:
    """Number of padding tokens before each prompt; anything but left padding is refused."""
    batch, width = ids.shape
    if mask is None:
        pads = [0] * batch
    else:
        if mask.shape != ids.shape:
            raise InvalidInputError(f"attention_mask has shape {tuple(mask.shape)}, input_ids {tuple(ids.shape)}")
        real = mask.bool().cpu()
        pads = [width - int(row.sum()) for row in real]
        expected = torch.arange(width) >= torch.tensor(pads)[:, None]
        if not torch.equal(real, expected):
            raise UnsupportedError("attention_mask has holes or right padding; pad prompts on the left (padding_side='left')")
        if any(pad == width for pad in pads):
            raise InvalidInputError("a row of attention_mask is all zero: every prompt needs at least one token")
    if position_ids is not None:
        logical = torch.arange(width) - torch.tensor(pads)[:, None]
        given = position_ids.cpu().expand(batch, -1)
        real_slots = logical >= 0
        if given.shape != logical.shape or not torch.equal(given[real_slots], logical[real_slots]):
            raise UnsupportedError("position_ids other than 0, 1, 2, ... per prompt are not supported; leave them out")
    return pads


def _without_stop_strings(config: GenerationConfig) -> GenerationConfig:
    copy = GenerationConfig.from_dict(config.to_dict())
    copy.stop_strings = None
    return copy


def _outputs(job: Job, rows: list[Row], input_ids: Tensor, config: GenerationConfig) -> Tensor | SpecDiffOutput:
    """What plain ``generate`` returns: rows that ended early are filled with padding."""
    counts = job.stats.new_tokens
    longest = max(counts)
    new = torch.full((len(rows), longest), job.pad_token, dtype=torch.long)
    for row, count in zip(rows, counts, strict=True):
        new[row.index, :count] = torch.tensor(row.new[:count])
    sequences = torch.cat([input_ids, new.to(input_ids.device)], dim=1)
    if not config.return_dict_in_generate:
        return sequences
    return SpecDiffOutput(
        sequences=sequences,
        scores=_by_step([row.scores for row in rows], longest) if job.keep_scores else None,
        logits=_by_step([row.logits for row in rows], longest) if job.keep_logits else None,
        stats=job.stats,
    )


def _by_step(rows: list[list[Tensor]], steps: int) -> tuple[Tensor, ...]:
    """One ``[B, V]`` per new token; rows that had ended hold zeros."""
    blank = torch.zeros_like(rows[0][0])
    return tuple(torch.stack([row[step] if step < len(row) else blank for row in rows]) for step in range(steps))


assert set(OWN_ARGUMENTS) <= set(inspect.signature(Bound.__call__).parameters)
