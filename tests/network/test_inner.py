"""Inner products of rows with cotangents: those of the rows themselves, value and derivative."""

from collections.abc import Sequence
from unittest import mock

import pytest
import torch
from network.dense import random, weights_of
from torch import Tensor, nn
from zoo import CASES, HYPERPARAMETERS

from evigrad.errors import ConfigurationError
from evigrad.network import Linearization, convolutions, plan


def gradients(value: Tensor, arguments: Sequence[Tensor]) -> list[Tensor]:
    if not value.requires_grad:
        return [torch.zeros_like(a) for a in arguments]
    slopes = torch.autograd.grad(value, arguments, retain_graph=True, allow_unused=True)
    return [torch.zeros_like(a) if g is None else g for a, g in zip(arguments, slopes, strict=True)]


def scale(values: Sequence[Tensor]) -> float:
    return max(1.0, *(float(v.detach().norm()) for v in values))


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")
@pytest.mark.parametrize(
    "case, call_per_example",
    [(c, False) for c in CASES] + [(c, True) for c in CASES if c.startswith("conv")],
)
def test_zoo(case: str, call_per_example: bool) -> None:
    model, x = CASES[case].build(4)
    model.eval()
    weights = weights_of(model, HYPERPARAMETERS)
    jacobian_plan = plan(model, weights, x)
    vectors = random(4, 2, 3).requires_grad_()
    arguments = [vectors, *(p for n, p in model.named_parameters() if n in HYPERPARAMETERS)]
    if x.is_floating_point():
        arguments.append(x.requires_grad_())
    cotangents = {
        name: random(4, 2, *w.shape, seed=i).requires_grad_()
        for i, (name, w) in enumerate(weights.items())
    }
    with mock.patch.object(convolutions, "_WORTH_A_CALL", 0 if call_per_example else 2**62):
        linearization = Linearization(model, weights, x, jacobian_plan, differentiable=True)
        rows = linearization.rows(vectors)
        for names in (list(weights), *([name] for name in weights)):
            chosen_cotangents = {name: cotangents[name] for name in names}
            parts = [(rows[name] * c.detach()).sum() for name, c in chosen_cotangents.items()]
            expected = torch.stack(parts).sum()
            actual = linearization.inner(vectors, chosen_cotangents)
            assert abs(actual - expected) <= 1e-12 * scale(parts)
            right = gradients(expected, arguments)
            for a, e in zip(gradients(actual, arguments), right, strict=True):
                assert (a - e).norm() <= 1e-12 * scale(right)
            assert not any(g.any() for g in gradients(actual, list(chosen_cotangents.values())))

        with torch.no_grad():
            detached = Linearization(model, weights, x, jacobian_plan, differentiable=False)
            value = detached.inner(vectors, cotangents)
        assert not value.requires_grad
        torch.testing.assert_close(value, linearization.inner(vectors, cotangents).detach())


def test_nothing_asked_for() -> None:
    model, x = CASES["linear"].build(4)
    weights = weights_of(model.eval(), HYPERPARAMETERS)
    linearization = Linearization(model, weights, x, plan(model, weights, x), True)
    assert linearization.inner(random(4, 2, 3), {}) == 0
    with pytest.raises(ConfigurationError, match="no weight named"):
        linearization.inner(random(4, 2, 3), {"body.0.weigth": random(4, 2, 4, 3)})


def test_channels_last() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.Tanh(), nn.Conv2d(4, 2, 2), nn.Tanh())
    model = nn.Sequential(model, nn.Flatten(), nn.Linear(2 * 9, 3)).double()
    weights, x, vectors = weights_of(model), random(3, 3, 4, 4), random(3, 2, 3)
    jacobian_plan = plan(model, weights, x)
    cotangents = {name: random(3, 2, *w.shape) for name, w in weights.items()}
    rows = Linearization(model, weights, x, jacobian_plan, False).rows(vectors)
    for p in model.parameters():
        if p.dim() == 4:
            p.data = p.contiguous(memory_format=torch.channels_last)
    x = x.contiguous(memory_format=torch.channels_last)
    for way in (0, 2**62):
        with mock.patch.object(convolutions, "_WORTH_A_CALL", way):
            linearization = Linearization(model, weights, x, jacobian_plan, True)
            assert all(linearization.is_closed(name) for name in weights)
            torch.testing.assert_close(linearization.rows(vectors), rows)
            value = torch.stack([(rows[n] * c).sum() for n, c in cotangents.items()]).sum()
            torch.testing.assert_close(linearization.inner(vectors, cotangents).detach(), value)
