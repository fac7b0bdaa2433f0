"""Data that lie spread over all inputs."""

from itertools import combinations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from evigrad import Evidence
from evigrad.blocks.anchors import Anchoring, Centres
from evigrad.blocks.sources import as_source
from evigrad.likelihoods import Gaussian
from evigrad.priors import GaussianPrior


def first(x: torch.Tensor, count: int) -> torch.Tensor | None:
    return Centres().first(as_source((x, torch.zeros(len(x), 1))), count)


def radius(x: torch.Tensor, centres: torch.Tensor) -> float:
    return float(torch.cdist(x, x[centres]).min(1).values.max())


@given(st.integers(0, 1000), st.integers(3, 9), st.integers(1, 3))
def test_no_datum_is_further_than_twice_the_smallest_radius(seed: int, n: int, k: int):
    x = torch.randn(n, 2, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    chosen = first(x, k)
    assert chosen is not None and len(set(chosen.tolist())) == k
    best = min(radius(x, torch.tensor(each)) for each in combinations(range(n), k))
    assert radius(x, chosen) <= 2 * best + 1e-6


def test_all_data_are_centres_in_the_end_equal_ones_too():
    x = torch.tensor([[0.0], [0.0], [1.0], [1.0], [5.0]])
    chosen = first(x, 9)
    assert chosen is not None and sorted(chosen.tolist()) == [0, 1, 2, 3, 4]
    assert set(x[chosen[:3]].flatten().tolist()) == {0.0, 1.0, 5.0}


def test_more_centres_go_on_where_fewer_ended():
    x = torch.randn(30, 4, generator=torch.Generator().manual_seed(0))
    source, centres = as_source((x, torch.zeros(30, 1))), Centres()
    few, many = centres.first(source, 4), centres.first(source, 9)
    assert few is not None and many is not None and many[:4].equal(few)
    again = Centres().first(source, 9)
    assert again is not None and again.equal(many)


def test_images_are_compared_by_a_projection():
    # Three far groups of images: each has one of the first three centres.
    own = torch.Generator().manual_seed(0)
    x = (
        0.1 * torch.randn(60, 1, 28, 28, generator=own)
        + torch.arange(3).repeat(20)[:, None, None, None]
    )
    chosen = first(x, 3)
    assert chosen is not None and sorted((chosen % 3).tolist()) == [0, 1, 2]


def test_tokens_have_no_distances():
    assert first(torch.randint(9, (10, 4)), 3) is None


@pytest.mark.parametrize("num_outputs", [1, 2])
def test_anchors_of_a_regression(num_outputs: int):
    x = torch.randn(30, 3, generator=torch.Generator().manual_seed(0))
    y = torch.zeros(30, num_outputs)
    evidence = Evidence(
        nn.Linear(3, num_outputs),
        Gaussian(),
        GaussianPrior(),
        estimator="ntk-16-rows-anchored",
        num_data=30,
        anchoring=Anchoring(share=0.75),
        generator=0,
    )
    (block,) = evidence.blocks((x, y)).take(1)
    assert block.parts is not None
    anchored = block.indices[(block.parts == 0).any(1)]
    chosen = first(x, 12 // num_outputs)
    assert chosen is not None and sorted(anchored.tolist()) == sorted(chosen.tolist())
