"""The kernel of the last layer, and anchors that are chosen by it."""

from typing import Any

import pytest
import torch
from peak_bytes import PeakBytes
from torch import Tensor, nn
from torch.func import functional_call, jacrev

from evigrad import Evidence
from evigrad.blocks.anchors import Anchoring
from evigrad.blocks.anchors.choice import LastLayer, LastLayerKernel, watched
from evigrad.blocks.sources import as_source
from evigrad.invariances import AffineInvariance, Averaged
from evigrad.likelihoods import Bernoulli, Categorical
from evigrad.priors import GaussianPrior


def evidence_of(model: nn.Module, structure: str = "layerwise", **settings: Any) -> Evidence:
    return Evidence(
        model.double(),
        Categorical(),
        GaussianPrior(structure, precision=0.4),
        estimator="ntk-8-rows-anchored",
        num_data=12,
        generator=0,
        **settings,
    )


def net(*last: nn.Module) -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Flatten(), nn.Linear(16, 5), nn.Tanh(), nn.Linear(5, 3), *last)


def images(count: int) -> Tensor:
    return torch.randn(
        count, 1, 4, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64
    )


@pytest.fixture(autouse=True)
def _three_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("evigrad.blocks.anchors.choice.AT_ONCE", 3)


def kernel(evidence: Evidence, x: Tensor, data: Tensor, columns: Tensor, root: str) -> Any:
    source = as_source((x, torch.zeros(len(x), dtype=torch.int64)))
    ask = LastLayerKernel(evidence.problem.last_layer, evidence.likelihood, root, source, 3)
    rows = 3 * data + columns
    ask(rows[: len(rows) // 2])  # some data are known already when the others are asked for
    matrix = ask(rows)
    again = ask(rows)
    if matrix is None or again is None:
        return None
    assert torch.equal(again, matrix)  # nothing is looked at twice
    return matrix


@pytest.mark.parametrize("root", ["fisher", "eigen"])
@pytest.mark.parametrize("temperature", [1.0, 2.5])
def test_the_kernel_is_the_share_of_the_last_layer(root: str, temperature: float) -> None:
    model = net()
    evidence = evidence_of(model, root=root, temperature=temperature)
    with torch.no_grad():  # precisions that differ
        for number, precision in enumerate(evidence.prior.parameters()):
            precision += 0.1 * torch.arange(precision.numel()).reshape(precision.shape) + number
    x = images(5)
    data, columns = torch.tensor([0, 0, 3, 4, 1, 2]), torch.tensor([0, 1, 0, 1, 0, 1])
    actual = kernel(evidence, x, data, columns, root)
    weights = {n: w.detach() for n, w in evidence.weights().items()}
    f = model(x).detach()
    vectors = evidence.likelihood.root(f[data], columns[:, None], root).vectors[:, 0]
    expected = torch.zeros(6, 6, dtype=torch.float64)
    for name, precision in evidence.prior.precisions().items():
        if name.startswith("3."):
            j = jacrev(lambda w, n=name: functional_call(model, weights | {n: w}, (x,)))(
                weights[name]
            )
            rows = torch.einsum("rc,rcp->rp", vectors, j[data].flatten(2))
            expected += (rows @ rows.mT / precision).detach() / temperature
    torch.testing.assert_close(actual.double(), expected, rtol=1e-4, atol=1e-5)
    assert actual.device.type == "cpu"


def test_the_features_of_samples_are_averaged() -> None:
    invariance = AffineInvariance({"rotation": 0.0})
    averaged = evidence_of(Averaged(net(), invariance.requires_grad_(False), num_samples=3))
    data, columns = torch.arange(4), torch.zeros(4, dtype=torch.int64)
    mine = kernel(averaged, images(4), data, columns, "eigen")
    # Without any rotation every sample is the input itself.
    twin = kernel(evidence_of(net()), images(4), data, columns, "eigen")
    torch.testing.assert_close(mine, twin, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("structure", ["scalar", "diagonal"])
def test_precisions_of_all_kinds(structure: str) -> None:
    actual = kernel(
        evidence_of(net(), structure), images(3), torch.arange(3), torch.zeros(3).long(), "eigen"
    )
    layerwise = kernel(
        evidence_of(net()), images(3), torch.arange(3), torch.zeros(3).long(), "eigen"
    )
    torch.testing.assert_close(actual, layerwise)


def test_networks_whose_outputs_come_from_elsewhere() -> None:
    data, columns = torch.arange(3), torch.zeros(3, dtype=torch.int64)
    convolution = nn.Sequential(nn.Conv2d(1, 3, 4), nn.Flatten())
    assert kernel(evidence_of(convolution), images(3), data, columns, "eigen") is None
    narrow = net(nn.Linear(3, 2), nn.Unflatten(1, (2, 1)), nn.ConvTranspose1d(2, 3, 1))
    narrow.append(nn.Flatten())
    # The last linear layer has two outputs, the network three.
    assert kernel(evidence_of(narrow), images(3), data, columns, "eigen") is None


def test_nobody_watches_for_longer_than_asked() -> None:
    model = net()
    weights = dict(model.named_parameters())
    with pytest.raises(ValueError, match="on the way"), watched(model, weights) as call:
        model(images(2).float())
        assert call[0] is model[3]
        raise ValueError("on the way")
    assert all(not module._forward_hooks for module in model.modules())
    # Layers that are no weights of the evidence do not count.
    first = {name: weight for name, weight in weights.items() if name.startswith("1.")}
    with watched(model, first) as call:
        model(images(2).float())
    assert call[0] is model[1]


def test_greedy_anchors_hold_more_than_those_of_the_largest_scores() -> None:
    """Half of the data are copies of one that has the largest score: one of them is enough."""
    x = images(12)
    x[:6] = x[0]
    y = torch.zeros(12, dtype=torch.int64)
    model = net().double()
    last = model[3]
    assert isinstance(last, nn.Linear)
    with torch.no_grad():
        bias = torch.tensor([3.0, 0.0, 0.0], dtype=torch.float64)
        last.bias.copy_(bias)
        # The copies are what the network is least sure of.
        phi = model[:3](x[:1])[0]
        last.weight.mul_(0.05).add_(-torch.outer(bias, phi) / phi.square().sum())
    entropies = {}
    for choice in ("auto", "greedy", "score"):
        evidence = evidence_of(model, anchoring=Anchoring(0.5, choice))
        blocks = list(evidence.blocks((x, y)).epoch())
        entropies[choice] = evidence.estimate(blocks[0]).entropies[0]
    assert entropies["auto"] == entropies["greedy"] > 1.05 * entropies["score"]


def test_a_kernel_of_many_uncoupled_outputs_takes_the_columns_that_are_asked_for() -> None:
    outputs, x = 300, torch.randn(20, 4)

    def look(x: Any) -> tuple[Tensor, LastLayer]:
        return x.repeat(1, outputs // 4), LastLayer(x, 1.0, 1.0)

    source, likelihood = as_source((x, torch.zeros(20, outputs))), Bernoulli()
    ask = LastLayerKernel(look, likelihood, "eigen", source, outputs)
    data, columns = torch.arange(20), torch.arange(20) % 5
    with PeakBytes() as held:
        values = ask(data * outputs + columns)
    assert held.most < 4 * 20 * outputs**2 / 10
    vectors = likelihood.root(look(x)[0], columns[:, None], "eigen").scaled[:, 0]
    torch.testing.assert_close(values, LastLayer(x, 1.0, 1.0).kernel(vectors))
