"""One call of ``generate``: from what Hugging Face prepared to a decoding job, and back to what it returns."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel
from transformers.generation import LogitsProcessorList, StoppingCriteriaList, StopStringCriteria

from specdiff.cache.passes import inner_model
from specdiff.cache.rope import turning_point, why_not
from specdiff.errors import InvalidInputError, UnsupportedError
from specdiff.fingerprint import fingerprint
from specdiff.loop import DEFAULT_CHUNK, Decoding, Job, Row, needs_step
from specdiff.settings import check_generation_config, check_model_kwargs
from specdiff.stats import GenerationStats, SpecDiffOutput
from specdiff.stopping import StopTests
from specdiff.streaming import Feed
from specdiff.verify import RULES
from specdiff.verify.noise import row_seeds
from specdiff.warp import BlockWarp

if TYPE_CHECKING:
    from specdiff.session import Session
    from specdiff.wrap import SpecDiff

OWN_ARGUMENTS = ("seed", "generator", "rule", "block_size")
"""What specdiff adds to the arguments of ``generate``."""


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
        feed: Feed | None = None,
    ) -> None:
        self.feed = feed
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
        block_size: int | str | None = None,
        **model_kwargs: Any,
    ) -> Tensor | SpecDiffOutput:
        """Decode; see :meth:`SpecDiff.__call__`."""
        owner = self.owner
        own = {"seed": seed, "generator": generator, "rule": rule, "block_size": block_size} | self.own
        if model is not owner.ar and model is not inner_model(owner.ar):
            raise UnsupportedError(
                "this SpecDiff wraps another model than the one generate was called on; make one for it"
            )
        notes = check_generation_config(generation_config, model=model)
        notes += check_model_kwargs(model_kwargs)
        job = self._job(input_ids, logits_processor, stopping_criteria, generation_config, own, model_kwargs, notes)
        with self.feed or Feed(self.streamer) as feed:
            feed.open(input_ids.shape[0], job.pad_token)
            if self.put_prompt:
                feed.prompt(input_ids)
            job.feed = feed
            rows = self._run(job, own["block_size"])
        return _outputs(job, rows, input_ids, generation_config)

    def _run(self, job: Job, block_size: int | str | None) -> list[Row]:
        owner = self.owner
        if owner.fast_target is not None or self.resume is not None:
            job.seen = fingerprint(owner.ar)  # once for all that ask in this call
        target, note = owner.target_for(job.capacity, job.seen)
        if note is not None:
            job.stats.notes.append(note)
        job.lengths = owner.lengths_for(target, job, block_size)
        if self.resume is not None:
            return self.resume.run(job, target)
        decoding = Decoding(job, target, owner.drafter)
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
        rule = _rule_for(checked_rule(own["rule"] or owner.rule), bool(config.do_sample))
        if rule == "block" and warp.kind == "stateful":
            rule = "token"
            stats.notes.append("rule block became token: a stateful logits processor is run slot by slot")
        wanted = own["block_size"]
        block = owner.block_size if wanted is None else owner.checked_block(wanted)
        stop_strings = self.stop_strings
        if stop_strings is not None:
            tokenizer = self.tokenizer if self.tokenizer is not None else owner.tokenizer
            if tokenizer is None:
                raise InvalidInputError("stop_strings need the tokenizer: pass tokenizer= here or to SpecDiff(...)")
            criteria = StoppingCriteriaList([*criteria, StopStringCriteria(tokenizer, stop_strings)])
        eos = config._eos_token_tensor
        pad = config._pad_token_tensor
        eos_ids = [] if eos is None else eos.reshape(-1).tolist()
        pad_token = int(pad) if pad is not None else (eos_ids[0] if eos_ids else 0)
        return_dict = bool(config.return_dict_in_generate)
        pads = _left_padding(model_kwargs.get("attention_mask"), input_ids)
        stops = StopTests(criteria, eos_token_ids=eos_ids)
        max_new = (config.max_length if stops.max_length == sys.maxsize else stops.max_length) - width
        prompts = [width - pad for pad in pads]
        why = why_not(owner.config, prompts, max_new)
        if why is not None:
            raise UnsupportedError(f"{type(owner.ar).__name__}: {why}")
        job = Job(
            ids=ids,
            pads=pads,
            max_new=max_new,
            pad_token=pad_token,
            rule=rule,
            block_size=block,
            warp=warp,
            stops=stops,
            seeds=_seeds(own["seed"], own["generator"], batch, rule),
            chunk=_chunk(config.prefill_chunk_size, owner.config, prompts),
            keep_scores=return_dict and bool(config.output_scores),
            keep_logits=return_dict and bool(config.output_logits),
            stats=stats,
        )
        why = needs_step(job)
        if batch > 1 and why is not None:
            stats.notes.append(f"no drafting: {why} over several rows needs all rows in step")
        return job


def _chunk(wanted: Any, config: PreTrainedConfig, prompts: Sequence[int]) -> int:
    """Prompt tokens per pass: as asked, or the default; whole prompts where rotary frequencies depend on a pass."""
    if wanted is not None and (isinstance(wanted, bool) or not isinstance(wanted, int) or wanted < 1):
        raise InvalidInputError(f"prefill_chunk_size counts prompt tokens and must be an int >= 1, got {wanted!r}")
    turn = turning_point(config)
    if turn is not None and max(prompts) > turn[1]:
        return max(prompts)
    return wanted or DEFAULT_CHUNK


def checked_rule(rule: str) -> str:
    """``rule`` if it is one that exists."""
    if rule not in ("auto", *RULES):
        raise InvalidInputError(f"rule must be one of auto, {', '.join(RULES)}; got {rule!r}")
    return rule


def _rule_for(rule: str, sampling: bool) -> str:
    """The rule in force; greedy decoding is every rule's limit, so it is used whenever nothing is sampled."""
    if rule == "greedy" and sampling:
        raise InvalidInputError(
            "rule='greedy' contradicts do_sample=True; use rule 'auto', 'token', 'block' or 'coupled'"
        )
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


def _left_padding(mask: Tensor | None, ids: Tensor) -> list[int]:
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
            raise UnsupportedError(
                "attention_mask has holes or right padding; pad prompts on the left (padding_side='left')"
            )
        if any(pad == width for pad in pads):
            raise InvalidInputError("a row of attention_mask is all zero: every prompt needs at least one token")
    return pads


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
        sequences=sequences,  # type: ignore[arg-type]
        scores=_by_step([row.scores for row in rows], longest) if job.keep_scores else None,  # type: ignore[arg-type]
        logits=_by_step([row.logits for row in rows], longest) if job.keep_logits else None,  # type: ignore[arg-type]
        stats=job.stats,
    )


def _by_step(rows: list[list[Tensor]], steps: int) -> tuple[Tensor, ...]:
    """One ``[B, V]`` per new token; rows that had ended hold zeros."""
    blank = torch.zeros_like(rows[0][0])
    return tuple(torch.stack([row[step] if step < len(row) else blank for row in rows]) for step in range(steps))
