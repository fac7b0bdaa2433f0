"""Where several draws share a pass over their anchors, and how much of it is at work at once."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from evigrad import Evidence, Memory
from evigrad.blocks.anchors import AnchoredStream, Anchoring
from evigrad.core.model import LinearizedModel
from evigrad.core.protocols import Purpose
from evigrad.errors import MemoryBudgetError
from evigrad.likelihoods import Categorical
from evigrad.priors import GaussianPrior
from evigrad.training.rounds import draws_at_once, shares_anchors

DATA = torch.randn(40, 3, generator=torch.Generator().manual_seed(0)), torch.arange(40) % 4


def evidence(
    estimator: str = "ntk-50-rows-anchored", prior: str = "layerwise", **options: Any
) -> Evidence:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 4))
    return Evidence(
        model,
        Categorical(),
        GaussianPrior(prior),
        estimator=estimator,
        num_data=40,
        generator=0,
        **options,
    )


def joint(anchored_evidence: Evidence, draws: int) -> Any:
    stream = anchored_evidence.blocks(DATA)
    assert isinstance(stream, AnchoredStream)
    (block,) = stream.drawn(draws).blocks(draws)
    return block


def test_anchors_are_shared_where_that_is_less_work(monkeypatch: pytest.MonkeyPatch) -> None:
    x = DATA[0]
    assert shares_anchors(evidence(), x, 10)
    assert not shares_anchors(evidence(), x, 1)
    assert not shares_anchors(evidence("ntk-50-rows"), x, 10)
    assert not shares_anchors(evidence(prior="diagonal"), x, 10)
    # Ten parts of half of the rows are more products than ten blocks; of a quarter, five are less.
    assert not shares_anchors(evidence(anchoring=Anchoring(share=0.5)), x, 10)
    assert not shares_anchors(evidence(anchoring=Anchoring(share=0.0)), x, 2)
    quarter = evidence("ntk-40-rows-anchored", anchoring=Anchoring(share=0.75))
    assert draws_at_once(quarter, x, 10) == 5
    assert draws_at_once(evidence(), x, 10) == 10
    assert draws_at_once(evidence(anchoring=Anchoring(share=0.5)), x, 10) == 1
    assert not shares_anchors(
        evidence(memory=Memory(memory_budget=1000, micro_batch="auto")), x, 10
    )
    monkeypatch.setattr("evigrad.core.curvature.ntk.GRAM_CACHE_BYTES", 4 * 95**2 * 4 - 1)
    assert not shares_anchors(evidence(), x, 10)  # four Grams of 45 + 10 x 5 rows
    assert shares_anchors(evidence(), x, 9)


def test_no_more_rows_are_formed_at_once_than_for_a_single_draw(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And the check of the memory knows of them beside all that are kept."""
    anchored_evidence = evidence("ntk-12-rows-anchored", anchoring=Anchoring(grouped=False))
    block = joint(anchored_evidence, 8)
    assert block.num_rows > 12
    sizes: list[int] = []
    cotangents = LinearizedModel.cotangents

    def counted(model: LinearizedModel[Any, Any], f: Tensor, batch: Any) -> Any:
        sizes.append(int((batch.columns >= 0).sum()))
        return cotangents(model, f, batch)

    monkeypatch.setattr(LinearizedModel, "cotangents", counted)
    kept = list(anchored_evidence.collect(block).draws())
    assert len(kept) == 8
    assert sum(sizes) == block.num_rows
    assert 0 < max(sizes) <= 12
    assert len(sizes) > 1
    # What is free holds all rows and products, but not those of a micro-batch too.
    structure = kept[0].curvature
    needed = structure.cost(block.num_rows, Purpose.STEPS).total
    monkeypatch.setattr("evigrad.passes.memory.SMALL_BYTES", 0)
    monkeypatch.setattr("evigrad.passes.memory._free_bytes", lambda _: needed)
    monkeypatch.setattr("evigrad.passes.memory.available_bytes", lambda _: needed)
    with pytest.raises(MemoryBudgetError):
        anchored_evidence.collect(block)
    assert torch.isfinite(torch.tensor(anchored_evidence.estimate_kept(kept[0]).log_det))
