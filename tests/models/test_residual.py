"""Residual networks with Fixup: sizes, how they start, what their blocks compute, their plans."""

from collections import Counter
from math import prod, sqrt

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from evigrad import Evidence
from evigrad.likelihoods import Categorical
from evigrad.models import fixup_scalars, make_model
from evigrad.models.residual import Block, Bottleneck, WideBlock
from evigrad.priors import GaussianPrior

NETWORKS = {
    "resnet18": {},
    "resnet50": {},
    "wrn16-4": {},
}


def num_parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def stirred(module: nn.Module, seed: int = 0) -> nn.Module:
    """Double precision and no parameter at its start, where much is zero."""
    generator = torch.Generator().manual_seed(seed)
    module.double()
    with torch.no_grad():
        for parameter in module.parameters():
            fan = prod(parameter.shape[1:])
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.add_(noise / sqrt(2 * fan))
    return module


def images(count: int, *shape: int, seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, *shape, generator=generator, dtype=torch.float64)


# ---------------------------------------------------------------------------- sizes


def test_parameter_counts() -> None:
    for name, shape, outputs, settings, count in [
        # Without normalisation: its 23,508,032 (ImageNet's ResNet-50 less the head) less 53,120 of
        # batch normalisation and 7,680 of the first layer, and 114 scalars, 409,800 of the head.
        ("resnet50", (3, 64, 64), 200, {"width": 64}, 23_508_032 - 53_120 - 7_680 + 114 + 409_800),
        ("resnet50", (3, 64, 64), 200, {"width": 16}, 1_568_490),
        ("resnet18", (3, 32, 32), 10, {}, 688_356),
        ("resnet18", (1, 28, 28), 10, {}, 688_356 - 2 * 16 * 9),
        # 11,173,962 (ResNet-18 for CIFAR) less 9,600 of batch normalisation and 172,032 of
        # shortcuts, and 42 scalars.
        ("resnet18", (3, 32, 32), 10, {"width": 64}, 11_173_962 - 9_600 - 172_032 + 42),
        # 2,748,890 with batch normalisation, less its 3,616, and 32 scalars.
        ("wrn16-4", (3, 32, 32), 10, {}, 2_748_890 - 3_616 + 32),
        ("wrn16-4", (3, 32, 32), 100, {}, 2_748_890 - 3_616 + 32 + 90 * 257),
    ]:
        with torch.device("meta"):
            model = make_model(name, shape, outputs, **settings)
        assert num_parameters(model) == count


def test_wide_resnet_takes_depth_and_width() -> None:
    model = make_model("wide_resnet", (3, 8, 8), 10, depth=10, widen_factor=1)
    blocks = [module for module in model.modules() if isinstance(module, WideBlock)]
    assert [block.get_parameter("branch.conv2.weight").shape[0] for block in blocks] == [16, 32, 64]


@pytest.mark.each(1)
@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("shape", [(3, 9, 15), (2, 16, 8)])
def test_images_of_any_shape(name: str, shape: tuple[int, ...]) -> None:
    model = stirred(make_model(name, shape, 4, seed=0))
    x = images(3, *shape)
    before = x.clone()
    outputs = model(x)
    assert outputs.shape == (3, 4)
    assert torch.equal(x, before)  # nothing is done in place
    torch.testing.assert_close(model(x[1:2]), outputs[1:2])


# ---------------------------------------------------------------------------- the start


@pytest.mark.parametrize("name", NETWORKS)
def test_initial_outputs_are_zero(name: str) -> None:
    model = make_model(name, (3, 8, 8), 10, seed=0)
    assert not model(torch.randn(3, 3, 8, 8)).any()


@pytest.mark.parametrize("name", NETWORKS)
def test_branches_start_at_zero(name: str) -> None:
    """Without its branches a new network computes the same features."""
    model = make_model(name, (3, 8, 8), 10, seed=0)
    nn.init.normal_(model.get_parameter("output.weight"))
    x = torch.randn(3, 3, 8, 8)
    outputs = model(x)
    assert outputs.std() > 0.05
    with torch.no_grad():
        for scale in (p for n, p in model.named_parameters() if n.endswith("scale.scale")):
            scale.zero_()
    torch.testing.assert_close(model(x), outputs)


@pytest.mark.parametrize(
    ("name", "pattern", "branches", "power"),
    [
        ("wrn16-4", "stages.2.1.branch.conv1.weight", 6, 1 / 2),
        ("resnet18", "stages.3.1.branch.conv1.weight", 8, 1 / 2),
        ("resnet50", "stages.3.1.branch.conv1.weight", 16, 1 / 4),
        ("resnet50", "stages.3.1.branch.conv2.weight", 16, 1 / 4),
        ("resnet50", "stages.3.0.shortcut.weight", 1, 1),
        ("wrn16-4", "stages.2.0.shortcut.weight", 1, 1),
    ],
)
def test_initial_scale_of_weights(name: str, pattern: str, branches: int, power: float) -> None:
    weight = make_model(name, (3, 8, 8), 10, seed=0).get_parameter(pattern)
    expected = sqrt(2 / (weight.shape[0] * prod(weight.shape[2:]))) * branches**-power
    assert weight.std().item() == pytest.approx(expected, rel=0.02)


def test_learns() -> None:
    """A few steps of the paper's optimiser, scalars at a tenth of the rate."""
    model = make_model("wide_resnet", (3, 8, 8), 3, depth=10, widen_factor=1, seed=0)
    generator = torch.Generator().manual_seed(0)
    y = torch.randint(3, (60,), generator=generator)
    x = torch.randn(60, 3, 8, 8, generator=generator) + y[:, None, None, None]
    scalars = list(fixup_scalars(model).values())
    ids = {id(p) for p in scalars}
    others = [p for p in model.parameters() if id(p) not in ids]
    optimiser = torch.optim.SGD(
        [{"params": others}, {"params": scalars, "lr": 0.01}], lr=0.1, momentum=0.9
    )
    losses = []
    for _ in range(25):
        loss = F.cross_entropy(model(x), y)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    assert losses[0] == pytest.approx(1.0986, abs=1e-4)
    assert losses[-1] < 0.5


# ---------------------------------------------------------------------------- the scalars


@pytest.mark.parametrize(("name", "count"), [("resnet18", 42), ("resnet50", 114), ("wrn16-4", 32)])
def test_scalars_are_all_that_is_no_layer(name: str, count: int) -> None:
    model = make_model(name, (3, 8, 8), 10)
    scalars = fixup_scalars(model)
    named = dict(model.named_parameters())
    assert len(scalars) == count
    assert all(named[key] is parameter for key, parameter in scalars.items())
    assert set(named) - set(scalars) == {
        f"{path}.{key}"
        for path, module in model.named_modules()
        if isinstance(module, nn.Conv2d | nn.Linear)
        for key, _ in module.named_parameters()
    }
    assert all(p.item() == (1 if key.endswith("scale") else 0) for key, p in scalars.items())


def test_scalars_of_a_part_and_of_none() -> None:
    inner = make_model("wrn16-4", (3, 8, 8), 10)
    outer = nn.ModuleDict({"net": inner, "again": inner})
    assert list(fixup_scalars(outer)) == [f"net.{name}" for name in fixup_scalars(inner)]
    assert fixup_scalars(make_model("mlp", (3,), 2)) == {}


# ---------------------------------------------------------------------------- the blocks


@pytest.mark.parametrize(("inputs", "width", "stride"), [(4, 4, 1), (4, 8, 2), (4, 6, 1)])
def test_block_by_hand(inputs: int, width: int, stride: int) -> None:
    block = stirred(Block(inputs, width, stride))
    x = images(2, inputs, 7, 6)
    p = dict(block.named_parameters())
    z = x + p["bias.bias"]
    h = F.relu(F.conv2d(z, p["branch.conv1.weight"], None, stride, 1) + p["branch.bias1b.bias"])
    h = F.conv2d(h + p["branch.bias2a.bias"], p["branch.conv2.weight"], None, 1, 1)
    h = h * p["branch.scale.scale"] + p["branch.bias2b.bias"]
    if stride == 1 and inputs == width:
        passed = x
    else:  # as Fixup's authors write it
        passed = F.avg_pool2d(z, 1, stride)
        passed = torch.cat([passed, torch.zeros_like(h[:, inputs:])], dim=1)
    torch.testing.assert_close(block(x), F.relu(h + passed))


def test_bottleneck_by_hand() -> None:
    block = stirred(Bottleneck(5, 3, 2))
    x = images(2, 5, 7, 6)
    p = dict(block.named_parameters())
    z = x + p["bias.bias"]
    h = F.relu(F.conv2d(z, p["branch.conv1.weight"]) + p["branch.bias1b.bias"])
    h = F.conv2d(h + p["branch.bias2a.bias"], p["branch.conv2.weight"], None, 2, 1)
    h = F.relu(h + p["branch.bias2b.bias"])
    h = F.conv2d(h + p["branch.bias3a.bias"], p["branch.conv3.weight"])
    h = h * p["branch.scale.scale"] + p["branch.bias3b.bias"]
    assert h.shape == (2, 12, 4, 3)
    torch.testing.assert_close(block(x), F.relu(h + F.conv2d(z, p["shortcut.weight"], None, 2)))


@pytest.mark.parametrize(("inputs", "outputs", "stride"), [(4, 4, 1), (4, 6, 1), (4, 6, 2)])
def test_wide_block_by_hand(inputs: int, outputs: int, stride: int) -> None:
    block = stirred(WideBlock(inputs, outputs, stride))
    x = images(2, inputs, 7, 6)
    p = dict(block.named_parameters())
    z = F.relu(x + p["bias.bias"])
    h = F.relu(F.conv2d(z, p["branch.conv1.weight"], None, stride, 1) + p["branch.bias1b.bias"])
    h = F.conv2d(h + p["branch.bias2a.bias"], p["branch.conv2.weight"], None, 1, 1)
    h = h * p["branch.scale.scale"] + p["branch.bias2b.bias"]
    passed = x if inputs == outputs else F.conv2d(z, p["shortcut.weight"], None, stride)
    torch.testing.assert_close(block(x), h + passed)


# ---------------------------------------------------------------------------- the plans


@pytest.mark.parametrize("name", NETWORKS)
def test_every_weight_has_a_closed_form(name: str) -> None:
    model = make_model(name, (3, 8, 8), 10, seed=0)
    evidence = Evidence(
        model, Categorical(), GaussianPrior(), estimator="kfac-4-1", num_data=10, generator=0
    )
    reports = evidence.describe(torch.randn(3, 3, 8, 8))
    rows = Counter(report.rows for report in reports)
    scalars = fixup_scalars(model)
    assert rows["add"] + rows["mul"] == len(scalars)
    assert rows["mul"] == sum(key.endswith("scale") for key in scalars)
    assert rows["conv2d"] == sum(isinstance(m, nn.Conv2d) for m in model.modules())
    assert rows["linear"] == 2
    assert set(rows) == {"add", "mul", "conv2d", "linear"}
