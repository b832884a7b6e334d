"""The shared set-up of the cases from public reports: target T, reference REF, drafters, block sizes, exact laws."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, LogitsProcessorList, PreTrainedTokenizerFast

from specdiff import SpecDiff
from specdiff.drafters.base import DraftRequest, as_limits
from specdiff.testing import RandomDrafter, ReplayDrafter
from specdiff.verify import Coupled, Delta, Proposal, Purpose, Sampled

VOCAB = 101
BLOCKS = (2, 4, 8, 16)
KINDS = ("Drand", "Dself", "Dmix")
PROMPT = torch.tensor([[5, 17, 42, 8]])
NEAR_TIE = 1e-4


def both_paths(first: str) -> Any:
    """An autouse fixture: every test takes the path ``first`` ("auto" or "off"), in slow runs the other one, too."""
    other = "off" if first == "auto" else "auto"

    @pytest.fixture(autouse=True, params=[first, pytest.param(other, marks=pytest.mark.slow)])
    def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(SpecDiff.__init__.__kwdefaults__, "fast", request.param)

    return path


def build(
    seed: int = 0, *, vocab: int = VOCAB, spread: float = 0.4, layers: int = 3, hidden: int = 64, **config: Any
) -> LlamaForCausalLM:
    """A tiny random Llama whose weights are spread wide, so that logits lie well apart. No EOS of its own."""
    torch.manual_seed(seed)
    options = {
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "initializer_range": spread,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": None,
    }
    return LlamaForCausalLM(LlamaConfig(**(options | config))).eval()


@functools.cache
def target() -> LlamaForCausalLM:
    """T. Tests must not alter it; at least 10 distinct tokens in 50 (checked)."""
    model = build()
    text = reference(model, PROMPT, max_new_tokens=50)[0]
    assert len(set(text.tolist())) >= 10
    return model


def reference(model: LlamaForCausalLM, ids: Tensor, mask: Tensor | None = None, **arguments: Any) -> Tensor:
    """REF: the new tokens of plain generate."""
    arguments.setdefault("do_sample", False)
    with torch.no_grad():
        out = model.generate(ids, attention_mask=torch.ones_like(ids) if mask is None else mask, **arguments)
    return out[:, ids.shape[1] :]


@functools.cache
def greedy_text(length: int = 60) -> Tensor:
    """T's greedy continuation of PROMPT."""
    return reference(target(), PROMPT, max_new_tokens=length)


def drafter(kind: str, text: Tensor, block: int, wrong_at: Sequence[int] = (1,), vocab: int = VOCAB) -> Any:
    """Drand (nearly all rejected), Dself (all accepted) or Dmix (wrong at the given offsets of each block)."""
    if kind == "Drand":
        return RandomDrafter(vocab, block)
    if kind == "Dself":
        return ReplayDrafter(text, block)
    return ReplayDrafter(text, block, [w for w in wrong_at if w < block] or [block - 1])


def run(sd: SpecDiff, ids: Tensor = PROMPT, mask: Tensor | None = None, **arguments: Any) -> Any:
    """``sd.generate`` with stats."""
    arguments.setdefault("do_sample", False)
    return sd.generate(
        ids,
        attention_mask=torch.ones_like(ids) if mask is None else mask,
        return_dict_in_generate=True,
        **arguments,
    )


def first_occurrences(text: Sequence[int]) -> list[int]:
    """Offsets at which a token appears for the first time."""
    return [i for i, token in enumerate(text) if token not in text[:i]]


def left_padded(rows: Sequence[Sequence[int]], pad: int = 0) -> tuple[Tensor, Tensor]:
    """Ids and mask of prompts of unequal length."""
    width = max(map(len, rows))
    ids = torch.tensor([[pad] * (width - len(row)) + list(row) for row in rows])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
    return ids, mask


def random_prompt(length: int, seed: int = 0, vocab: int = VOCAB) -> list[int]:
    """``length`` ids, none of them special."""
    return torch.randint(3, vocab, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def margin(model: LlamaForCausalLM, prefix: Tensor) -> float:
    """Top-1/top-2 margin of the stock model after ``prefix``: ``Long[L]``, in one uncached pass."""
    with torch.no_grad():
        top = model(prefix[None]).logits[0, -1].float().topk(2).values
    return float(top[0] - top[1])


def assert_same_text(model: LlamaForCausalLM, prompt: Tensor, got: Sequence[int], want: Sequence[int]) -> None:
    """Equal, or first different where the stock model's margin is a near-tie."""
    for i, (a, b) in enumerate(itertools.zip_longest(got, want)):
        if a != b:
            gap = margin(model, torch.cat([prompt, torch.tensor(list(want[:i]), dtype=torch.long)]))
            assert gap <= NEAR_TIE, f"token {i}: {a} instead of {b}, margin {gap}; {list(got)} for {list(want)}"
            return


class Recorder:
    """A streamer that keeps what it is given."""

    def __init__(self) -> None:
        self.puts: list[Any] = []
        self.ended = 0

    def put(self, value: Tensor) -> None:
        self.puts.append(value.tolist())

    def end(self) -> None:
        self.ended += 1

    @property
    def tokens(self) -> list[int]:
        """New tokens of a single row (the first put is the prompt)."""
        return [token for put in self.puts[1:] for token in put]


@functools.cache
def characters(size: int = VOCAB) -> PreTrainedTokenizerFast:
    """A tokenizer with one printable character per id."""
    vocab = {chr(0x21 + i if i < 94 else 0x100 + i): i for i in range(size)}
    inner = Tokenizer(models.WordLevel(vocab, unk_token="!"))
    inner.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    inner.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=inner)


# -- laws ------------------------------------------------------------------------------------------------------------


class TableDrafter:
    """A one-step block drafter without a network: the law of slot i depends on the anchor and i alone.

    Args:
        vocab: width of its own logits.
        block_size: K.
        sharpness: how peaked its laws are.
        seed: which table.
        change: applied to the warped logits before drawing; makes the drafter lie about its law (negative controls).
        poison: slots whose logits are NaN.
    """

    taps: Sequence[int] = ()

    def __init__(
        self,
        vocab: int,
        block_size: int,
        *,
        sharpness: float = 1.0,
        seed: int = 0,
        change: Callable[[Tensor], Tensor] | None = None,
        poison: Sequence[int] = (),
    ) -> None:
        self.block_size = block_size
        self.vocab = vocab
        self.change = change
        generator = torch.Generator().manual_seed(seed)
        self.table = torch.randn(512, block_size, vocab, generator=generator) * sharpness
        self.table[:, list(poison)] = float("nan")

    def start(self, request: DraftRequest) -> TableSession:
        return TableSession(self, request)


class TableSession:
    def __init__(self, owner: TableDrafter, request: DraftRequest) -> None:
        self.owner, self.request = owner, request
        self.draft_ids = torch.arange(owner.vocab) if owner.vocab != request.vocab_size else None

    def propose(self, anchor: Tensor, limits: Tensor, noise: Any) -> Proposal:
        owner, rule = self.owner, self.request.rule
        logits = self.request.warp(owner.table[anchor])
        lengths = as_limits(limits, owner.block_size)
        if rule == "greedy":
            return Proposal(logits.nan_to_num().argmax(-1), lengths, Delta())
        drawn = logits if owner.change is None else owner.change(logits)
        ids = torch.arange(owner.vocab)
        if rule == "coupled":
            exponential = noise.coupled(owner.block_size, ids)
        else:
            exponential = noise.exponential(Purpose.DRAFT, owner.block_size, ids)
        tokens = (drawn.nan_to_num().softmax(-1) / exponential).argmax(-1)
        if rule == "coupled":
            return Proposal(tokens, lengths, Coupled())
        return Proposal(tokens, lengths, Sampled(), logits=logits, draft_ids=self.draft_ids)

    def commit(self, tokens: Tensor, counts: Tensor, taps: Tensor | None) -> None:
        """Nothing to learn."""

    def select(self, rows: Tensor) -> None:
        """Stateless."""

    def rollback(self, lengths: Tensor) -> None:
        """Stateless."""

    def close(self) -> None:
        """Nothing to release."""


@functools.cache
def law_target(vocab: int) -> LlamaForCausalLM:
    """A small target for laws: one narrow layer, every token likely enough to be counted."""
    return build(5, vocab=vocab, spread=0.15, layers=1, hidden=32)


@torch.no_grad()
def exact_law(model: LlamaForCausalLM, prompt: Tensor, steps: int, processors: LogitsProcessorList) -> np.ndarray:
    """Probability of every continuation of ``steps`` tokens, ``[V] * steps``, by direct uncached passes in float64."""
    vocab = model.config.vocab_size
    prefixes = prompt[None]
    law = torch.ones(1, dtype=torch.float64)
    for _ in range(steps):
        logits = model(prefixes).logits[:, -1].float()
        step = processors(prefixes, logits).double().softmax(-1)
        law = (law[:, None] * step).reshape(-1)
        prefixes = torch.cat(
            [prefixes.repeat_interleave(vocab, 0), torch.arange(vocab).repeat(len(prefixes))[:, None]], 1
        )
    return law.reshape([vocab] * steps).numpy()


def cells(law: np.ndarray, count: int, least: float = 8.0) -> np.ndarray:
    """Group outcomes so that each group expects at least ``least`` of ``count``: the group of every outcome."""
    flat = law.reshape(-1)
    order = np.argsort(-flat, kind="stable")
    group = np.zeros(flat.size, dtype=np.int64)
    at, mass = 0, 0.0
    rest = float(flat.sum())
    for outcome in order:
        group[outcome] = at
        mass += flat[outcome]
        rest -= flat[outcome]
        if mass * count >= least and rest * count >= least:
            at, mass = at + 1, 0.0
    return group


def chi_square(law: np.ndarray, tokens: np.ndarray) -> float:
    """p-value of samples ``[N, steps]`` under ``law``; an outcome of probability 0 gives 0."""
    index = np.ravel_multi_index(tokens.T, law.shape)
    flat = law.reshape(-1)
    if (flat[index] < 1e-12).any():
        return 0.0
    group = cells(law, len(index))
    expected = np.bincount(group, flat) * len(index)
    seen = np.bincount(group[index], minlength=len(expected))
    if len(expected) < 2:
        return 1.0
    expected *= seen.sum() / expected.sum()
    return chi_square_tail(len(expected) - 1, float(((seen - expected) ** 2 / expected).sum()))


def chi_square_tail(free: int, value: float) -> float:
    """Upper tail of the chi-square distribution with ``free`` degrees of freedom."""
    return float(torch.special.gammaincc(torch.tensor(free / 2.0).double(), torch.tensor(value / 2.0).double()))


def power(law: np.ndarray, other: np.ndarray, count: int, level: float = 0.001) -> float:
    """Chance that ``count`` samples of ``other`` are told from ``law`` at ``level`` (noncentral chi-square)."""
    group = cells(law, count)
    p, q = np.bincount(group, law.reshape(-1)), np.bincount(group, other.reshape(-1))
    free = len(p) - 1
    distance = float(count * ((q - p) ** 2 / p).sum())
    low, high = 0.0, 100.0 * (free + 10)
    for _ in range(100):  # the critical value, by bisection
        middle = (low + high) / 2
        low, high = (middle, high) if chi_square_tail(free, middle) > level else (low, middle)
    half = torch.tensor(distance / 2).double()
    terms = torch.arange(int(half + 20 * half.sqrt() + 50)).double()  # noncentral = Poisson mixture of central ones
    weights = torch.exp(terms * half.clamp(min=1e-300).log() - half - torch.lgamma(terms + 1))
    tails = torch.special.gammaincc(free / 2 + terms, torch.tensor(high / 2).double())
    return float((weights * tails).sum())


def flash(model: LlamaForCausalLM, block: int = 4, mask_token_id: int = 3, seed: int = 0) -> Any:
    """A tiny DFlash drafter with random weights, bound to ``model``; it reads two of its layers."""
    from specdiff.drafters.config import DFlashConfig
    from specdiff.drafters.dflash import DFlashDrafter, DFlashModel

    torch.manual_seed(seed)
    config = DFlashConfig(
        hidden_size=model.config.hidden_size,
        intermediate_size=64,
        num_layers=1,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        vocab_size=model.config.vocab_size,
        num_target_layers=model.config.num_hidden_layers,
        target_layer_ids=(0, 2),
        block_size=block,
        mask_token_id=mask_token_id,
    )
    return DFlashDrafter(DFlashModel(config)).bind(model).eval()


class Watched:
    """A drafter that notes what another one proposes: per round and row the proposed ids."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.block_size, self.taps = inner.block_size, inner.taps
        self.rounds: list[list[list[int]]] = []

    def start(self, request: DraftRequest) -> Any:
        session = self.inner.start(request)
        propose, rounds = session.propose, self.rounds

        def watched(anchor: Tensor, limits: Tensor, noise: Any) -> Proposal:
            proposal = propose(anchor, limits, noise)
            ends = proposal.lengths.tolist()
            rounds.append([row[:end] for row, end in zip(proposal.tokens.tolist(), ends, strict=True)])
            return proposal

        session.propose = watched
        return session
