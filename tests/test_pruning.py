"""Importances against dense matrices, and pruners of PyTorch and Torch-Pruning that take them."""

import copy

import pytest
import torch
from late import Late, needs
from posterior.cases import Case
from torch import Tensor, nn
from torch.nn.utils import prune

from evigrad import Evidence, reference
from evigrad.errors import ConfigurationError
from evigrad.likelihoods import Categorical, Gaussian
from evigrad.models import make_model
from evigrad.models.residual import Block, ResNet
from evigrad.priors import GaussianPrior
from evigrad.pruning import UnitImportance, importances

tp = Late("torch_pruning")
torch_pruning = needs("torch_pruning")


def small_case(temperature: float = 1.0) -> Case:
    """A convolutional classifier whose units have different precisions."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 3, 2), nn.ReLU(), nn.Flatten(), nn.Linear(12, 3)).double()
    prior = GaussianPrior({"first": {"0.weight": 0, "0.bias": 0}, "last": "3"})
    x, y = torch.randn(9, 1, 3, 3).double(), torch.arange(9) % 3
    evidence = Evidence(
        model, Categorical(), prior, estimator="diag-N-C", num_data=9, temperature=temperature
    )
    log_precision = prior.get_parameter("log_precision").data
    log_precision.copy_(torch.linspace(-2, 2, len(log_precision)))
    return Case(evidence, (x, y), x)


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_importances_are_those_of_dense_matrices(temperature):
    case = small_case(temperature)
    curvature, prior = case.hessian().diagonal(), case.precision()
    weights = reference.vector(case.weights, case.weights).detach()
    damage = importances(case.evidence, case.train)
    torch.testing.assert_close(
        reference.vector(damage, case.weights), (curvature + prior) * weights.square()
    )
    determined = importances(case.evidence, case.train, criterion="effective-parameters")
    torch.testing.assert_close(
        reference.vector(determined, case.weights), curvature / (curvature + prior)
    )
    with pytest.raises(ConfigurationError, match="criterion must be one of"):
        importances(case.evidence, case.train, criterion="magnitude")


def test_damage_is_the_loss_of_a_quadratic_log_joint_density():
    """Without a weight of a linear regression with orthogonal inputs, by the log densities."""
    x = 2 * torch.eye(4).double()
    y = torch.tensor([[1.0], [-2.0], [0.1], [3.0]]).double()
    model = nn.Linear(4, 1, bias=False).double()
    evidence = Evidence(
        model, Gaussian(0.5), GaussianPrior(precision=3.0), estimator="diag-N-C", num_data=4
    )
    precision = 4 / 0.25 + 3.0
    model.weight.data = (x.T @ y).T / 0.25 / precision  # the mode
    damage = importances(evidence, (x, y))["weight"]
    loss = evidence.map_loss(x, y).detach()
    for index in range(4):
        kept = model.weight.data.clone()
        model.weight.data[0, index] = 0.0
        lost = 4 * (evidence.map_loss(x, y).detach() - loss)
        torch.testing.assert_close(lost, 0.5 * damage[0, index])
        model.weight.data = kept


def test_pytorch_removes_the_least_important_weights_of_all_layers():
    case = small_case()
    model = case.evidence.model
    scores = importances(case.evidence, case.train)
    layers = {f"{name}.weight": (model.get_submodule(name), "weight") for name in "03"}
    prune.global_unstructured(
        list(layers.values()),
        pruning_method=prune.L1Unstructured,
        importance_scores={layer: scores[name] for name, layer in layers.items()},
        amount=20,
    )
    flat = torch.cat([scores[name].flatten() for name in layers])
    removed = torch.cat(
        [layer.get_buffer("weight_mask").flatten() == 0 for layer, _ in layers.values()]
    )
    assert removed.sum() == 20 and flat[removed].max() < flat[~removed].min()


def random_scores(model: nn.Module) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {n: torch.rand(w.shape, generator=generator) for n, w in model.named_parameters()}


def removed_by(model: nn.Module, x: Tensor, scores: dict[str, Tensor], ratio: float) -> nn.Module:
    pruned = copy.deepcopy(model).train()
    pruner = tp.BasePruner(
        pruned,
        x,
        importance=UnitImportance(pruned, scores),
        pruning_ratio=ratio,
        ignored_layers=[pruned.output],
    )
    pruner.step()
    return pruned


@torch_pruning
def test_torch_pruning_removes_the_least_important_units():
    model, x = make_model("mininet", (1, 28, 28), 10, seed=0), torch.randn(2, 1, 28, 28)
    scores = random_scores(model)
    pruned = removed_by(model, x, scores, 0.5)
    assert pruned(x).shape == (2, 10)
    inputs = torch.arange(1)
    for name in ("conv1", "conv2", "conv3"):
        units = scores[f"{name}.weight"].flatten(1).sum(1) + scores[f"{name}.bias"]
        kept = units.argsort()[len(units) // 2 :].sort().values
        weight = model.get_parameter(f"{name}.weight")
        assert torch.equal(pruned.get_parameter(f"{name}.weight"), weight[kept][:, inputs])
        inputs = kept
    with pytest.raises(ConfigurationError, match="'conv3.weight' must have the weight's shape"):
        removed_by(pruned, x, scores, 0.5)


@torch_pruning
@pytest.mark.filterwarnings("ignore:Unwrapped parameters")  # Fixup's scalars
def test_residual_layers_share_their_units():
    torch.manual_seed(0)
    model, x = ResNet(Block, (1, 1), 3, 5, 4, 4), torch.randn(2, 3, 8, 8)
    scores = random_scores(model)
    # Channel 2 of the residual stream is unimportant in all of its layers together.
    stream = ["conv1", "stages.0.0.branch.conv2", "stages.1.0.branch.conv2"]
    scores["conv1.weight"][2] += 5.0
    scores[f"{stream[1]}.weight"][2] -= 8.0
    pruned = removed_by(model, x, scores, 0.25)
    assert pruned(x).shape == (2, 5)
    kept = torch.tensor([0, 1, 3])
    assert torch.equal(pruned.get_parameter("conv1.weight"), model.conv1.weight[kept])
    widths = [len(pruned.get_parameter(f"{name}.weight")) for name in stream]
    assert widths == [3, 3, 7] and pruned.get_parameter("output.weight").shape[1] == 7


@torch_pruning
def test_units_of_transposed_layers_are_along_their_second_axis():
    model, x = (
        nn.Sequential(nn.ConvTranspose2d(2, 3, 2), nn.Conv2d(3, 1, 1)),
        torch.randn(1, 2, 4, 4),
    )
    graph = tp.DependencyGraph().build_dependency(model, example_inputs=x)
    group = graph.get_pruning_group(model[0], tp.prune_conv_out_channels, idxs=[0, 1, 2])
    scores = random_scores(model)
    expected = scores["0.weight"].sum((0, 2, 3)) + scores["0.bias"]
    torch.testing.assert_close(UnitImportance(model, scores)(group), expected)
    assert UnitImportance(model, {"1.weight": scores["1.weight"]})(group) is None
