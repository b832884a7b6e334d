"""The counter noise: bits, law, and independence of whatever must be independent."""

from __future__ import annotations

import math

import numpy
import pytest
import torch
from chisquare import chi_square

from specdiff.verify import Noise, Purpose, mix_seed, row_seeds
from specdiff.verify.noise import _absorb, _fmix

IDS = torch.arange(50)


def murmur_finaliser(x: int) -> int:
    """MurmurHash3's fmix32 in plain Python integers, as published."""
    x ^= x >> 16
    x = x * 0x85EBCA6B % 2**32
    x ^= x >> 13
    x = x * 0xC2B2AE35 % 2**32
    return x ^ (x >> 16)


def absorb(state: int, word: int) -> int:
    return murmur_finaliser(((state ^ (word * 0x9E3779B1 % 2**32)) + 0x6A09E667) % 2**32)


def round_noise(seeds: list[int], lengths: list[int]):
    return Noise(torch.tensor(seeds)).round(torch.tensor(lengths))


def test_hash_equals_plain_integers():
    words = [0, 1, 2, 49151, 2**31 - 1, 2**31, 2**32 - 1]
    assert _fmix(torch.tensor(words)).tolist() == [murmur_finaliser(w) for w in words]
    for state in words:
        assert _absorb(torch.tensor([state]), 12345).item() == absorb(state, 12345)


@pytest.mark.parametrize("seed", [0, 7, 2**40 + 3, -5])
def test_exponentials_equal_plain_integers(seed):
    """The int32 path against the definition, keyed by seed halves, purpose, round, slot and id."""
    noise = round_noise([seed], [11])
    got = noise.exponential(Purpose.BONUS, 3, IDS)[0]
    state = absorb(absorb(absorb(absorb(0, seed % 2**32), (seed >> 32) % 2**32), int(Purpose.BONUS)), 11)
    for slot in range(3):
        for v in (0, 1, 49):
            u = float(numpy.float32(numpy.float32(absorb(absorb(state, slot), v)) + numpy.float32(0.5))) * 2.0**-32
            assert got[slot, v].item() == pytest.approx(-math.log1p(-min(u, 1 - 2.0**-24)), rel=1e-6)


def test_coupled_is_keyed_by_position_alone():
    early, late = round_noise([3], [10]), round_noise([3], [14])
    assert torch.equal(early.coupled(6, IDS)[:, 4:], late.coupled(2, IDS))
    same = early.exponential(Purpose.RESIDUAL, 6, IDS)[:, 4:] == late.exponential(Purpose.RESIDUAL, 2, IDS)
    assert not same.any()
    assert not (early.exponential(Purpose.DRAFT, 6, IDS) == early.coupled(6, IDS)).any()


def test_rows_do_not_depend_on_their_neighbours():
    many = round_noise([5, 6, 7], [4, 9, 1])
    alone = round_noise([6], [9])
    assert torch.equal(many.exponential(Purpose.DRAFT, 4, IDS)[1], alone.exponential(Purpose.DRAFT, 4, IDS)[0])
    assert torch.equal(many.uniform(Purpose.ACCEPT, 4)[1], alone.uniform(Purpose.ACCEPT, 4)[0])
    picked = Noise(torch.tensor([5, 6, 7])).select(torch.tensor([2, 1])).round(torch.tensor([1, 9]))
    assert torch.equal(picked.coupled(3, IDS), many.coupled(3, IDS)[[2, 1]])


def test_noise_is_keyed_by_id_not_by_column():
    noise = round_noise([1], [1])
    some = torch.tensor([40, 3, 3, 17])
    assert torch.equal(noise.exponential(Purpose.DRAFT, 2, some), noise.exponential(Purpose.DRAFT, 2, IDS)[..., some])
    assert torch.equal(noise.exponential(Purpose.DRAFT, 1, IDS), noise.exponential(Purpose.DRAFT, 5, IDS)[:, :1])


def test_row_seeds():
    assert mix_seed(42, 0) == 42
    assert row_seeds(42, 3).tolist() == [42, mix_seed(42, 1), mix_seed(42, 2)]
    assert len({mix_seed(s, r) for s in range(50) for r in range(50)}) == 2500
    assert all(0 <= mix_seed(-1, r) < 2**63 for r in range(1, 10))


def test_uniforms_are_in_range_and_uniform():
    u = Noise(row_seeds(0, 2000)).round(torch.full((2000,), 5)).uniform(Purpose.ACCEPT, 16)
    assert u.dtype == torch.float64
    assert ((u >= 0) & (u < 1)).all()
    counts = torch.bincount((u * 64).long().flatten(), minlength=64)
    assert chi_square(counts, torch.ones(64)) > 1e-4


def test_exponentials_are_positive_finite_and_exponential():
    e = Noise(row_seeds(1, 200)).round(torch.full((200,), 5)).exponential(Purpose.RESIDUAL, 4, torch.arange(2000))
    assert ((e > 0) & torch.isfinite(e)).all()
    cells = (torch.exp(-e.double()) * 128).long().clamp(max=127)
    assert chi_square(torch.bincount(cells.flatten(), minlength=128), torch.ones(128)) > 1e-4
    # the small ones, which win races, keep their relative precision
    small = e[e < 0.01]
    assert small.unique().numel() > 0.999 * small.numel()


PAIRS = {
    "purpose": lambda n: (n(5).exponential(Purpose.DRAFT, 1, IDS), n(5).exponential(Purpose.RESIDUAL, 1, IDS)),
    "accept and residual": lambda n: (
        n(5).uniform(Purpose.ACCEPT, 1)[..., None],
        n(5).exponential(Purpose.RESIDUAL, 1, IDS[:1]),
    ),
    "slot": lambda n: (
        n(5).exponential(Purpose.DRAFT, 2, IDS)[:, :1],
        n(5).exponential(Purpose.DRAFT, 2, IDS)[:, 1:],
    ),
    "round": lambda n: (n(5).exponential(Purpose.DRAFT, 1, IDS), n(6).exponential(Purpose.DRAFT, 1, IDS)),
    "slot against round": lambda n: (
        n(5).exponential(Purpose.DRAFT, 2, IDS)[:, 1:],
        n(6).exponential(Purpose.DRAFT, 1, IDS),
    ),
    "coupled against draft": lambda n: (n(5).coupled(1, IDS), n(5).exponential(Purpose.DRAFT, 1, IDS)),
    "coupled position": lambda n: (n(5).coupled(1, IDS), n(6).coupled(1, IDS)),
    "id": lambda n: (n(5).exponential(Purpose.DRAFT, 1, IDS), n(5).exponential(Purpose.DRAFT, 1, IDS + 1)),
}


@pytest.mark.parametrize("name", PAIRS)
def test_pairs_are_independent(name):
    """Cells of the two marginals' ranks fill a table evenly."""
    rows = 5000
    noise = Noise(row_seeds(9, rows))
    first, second = PAIRS[name](lambda length: noise.round(torch.full((rows,), length)))
    assert independence(first, second) > 1e-4


def test_rows_of_one_seed_and_nearby_seeds_are_independent():
    rows = 2000
    lengths = torch.full((rows,), 3)
    first = Noise(row_seeds(1, rows)).round(lengths).exponential(Purpose.DRAFT, 1, IDS)
    assert independence(first[:-1], first[1:]) > 1e-4
    nearby = Noise(torch.arange(rows)).round(lengths).exponential(Purpose.DRAFT, 1, IDS)
    assert independence(nearby[:-1], nearby[1:]) > 1e-4


def independence(first: torch.Tensor, second: torch.Tensor, cells: int = 8) -> float:
    """p-value of a table of the two values' eighths against even filling."""

    def eighth(x: torch.Tensor) -> torch.Tensor:
        x = x.double()
        u = x if x.max() < 1 else 1 - torch.exp(-x)
        return (u * cells).long().clamp(max=cells - 1)

    counts = torch.bincount((eighth(first) * cells + eighth(second)).flatten(), minlength=cells * cells)
    return chi_square(counts, torch.ones(cells * cells))
