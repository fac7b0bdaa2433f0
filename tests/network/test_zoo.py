"""Every kind of module, by every path: rows and their derivatives against the dense Jacobian."""

from functools import cached_property
from unittest import mock

import pytest
import torch
from network.dense import (
    assert_rows,
    functional,
    gradients,
    jacobian,
    random,
    rows,
    scale,
    weights_of,
)
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from zoo import CASES, HYPERPARAMETERS

from evigrad.network import Linearization, convolutions, plan, spot_check
from evigrad.network import linearization as linearizing
from evigrad.network.generic import loop_rows, vmap_rows
from evigrad.network.linearization import uses_of
from evigrad.network.modes import model_run
from evigrad.network.ownership import probed, traced
from evigrad.network.recorder import Recorder

M = 5
NOT_VECTORISED = ("lstm", "gru")
# With parameters that have no closed form; a wrong closed form would take this path too.
GENERIC = ("transposed", "loose", "parametrized", "positions")


class Network:
    """A network of the zoo with its plan, and its Jacobian by plain autograd."""

    def __init__(self, case: str) -> None:
        self.case = case
        self.model, self.x = CASES[case].build(M)
        self.model.eval()
        self.weights = weights_of(self.model, HYPERPARAMETERS)
        self.plan = plan(self.model, self.weights, self.x[:3])
        self.vectors = random(M, 2, 3).requires_grad_()
        # In what rows are differentiated.
        self.arguments = [self.vectors]
        self.arguments += [p for n, p in self.model.named_parameters() if n in HYPERPARAMETERS]
        if self.x.is_floating_point():
            self.arguments.append(self.x.requires_grad_())

    @cached_property
    def jacobian(self) -> dict[str, Tensor]:
        return jacobian(self.model, self.weights, self.x, graph=True)

    def dense_rows(self, vectors: Tensor) -> dict[str, Tensor]:
        """Rows of the first data, without a graph."""
        jac = {name: j[: len(vectors)].detach() for name, j in self.jacobian.items()}
        return rows(jac, vectors)

    def linearized(self, m: int = M, differentiable: bool = False) -> Linearization:
        return Linearization(self.model, self.weights, self.x[:m], self.plan, differentiable)


def assert_planned_rows(network: Network) -> None:
    paths = network.plan.describe()
    assert list(paths) == list(network.weights)
    assert any("generic" in path for path in paths.values()) == (network.case in GENERIC)
    f = network.model(network.x.clone()).detach()
    for m, k in ((M, 1), (2, 4), (1, 2)):
        vectors = random(m, k, f.shape[1], seed=k)
        linearization, expected = network.linearized(m), network.dense_rows(vectors)
        torch.testing.assert_close(linearization.outputs, f[:m], rtol=1e-12, atol=1e-12)
        assert_rows(linearization.rows(vectors), expected)
        every_second = list(network.weights)[::2]
        chosen = {name: expected[name] for name in every_second}
        assert_rows(linearization.rows(vectors, every_second), chosen)
    assert spot_check(network.linearized(), random(M, 2, 3), 3) == set()


def assert_generic_rows(network: Network) -> None:
    """The two generic ways are each other's twins."""
    model, weights = network.model, network.weights
    for k in (1, 2):
        vectors = random(M, k, 3)
        expected = network.dense_rows(vectors)
        for compute in (loop_rows, vmap_rows):
            if compute is vmap_rows and network.case in NOT_VECTORISED:
                continue
            for names in (list(weights), list(weights)[1:]):
                with model_run(model):
                    actual = compute(model, weights, names, network.x.detach(), vectors, False)
                assert_rows(actual, {name: expected[name] for name in names})


def assert_derivatives_of_rows(network: Network) -> None:
    linearization, arguments = network.linearized(differentiable=True), network.arguments
    actual = functional(linearization.rows(network.vectors))
    expected = functional(rows(network.jacobian, network.vectors))
    torch.testing.assert_close(actual, expected, rtol=1e-10, atol=0)
    right = gradients(expected, arguments)
    for a, e in zip(gradients(actual, arguments), right, strict=True):
        assert (a - e).norm() <= 1e-9 * max(1.0, float(e.norm()))
    assert right[0].norm() > 1e-3

    target = random(M, 3)
    with sdpa_kernel(SDPBackend.MATH):
        plain = network.model(network.x)
    for a, e in zip(
        gradients((linearization.outputs * target).sum(), arguments[1:]),
        gradients((plain * target).sum(), arguments[1:]),
        strict=True,
    ):
        torch.testing.assert_close(a, e, rtol=1e-10, atol=1e-10)


def assert_inner_products(network: Network) -> None:
    """Inner products of rows with cotangents: those of the rows, value and derivative."""
    arguments = network.arguments
    cotangents = {
        name: random(M, 2, *w.shape, seed=i).requires_grad_()
        for i, (name, w) in enumerate(network.weights.items())
    }
    linearization = network.linearized(differentiable=True)
    linearized_rows = linearization.rows(network.vectors)
    for names in (list(network.weights), *([name] for name in network.weights)):
        chosen = {name: cotangents[name] for name in names}
        parts = [(linearized_rows[name] * c.detach()).sum() for name, c in chosen.items()]
        expected, actual = torch.stack(parts).sum(), linearization.inner(network.vectors, chosen)
        assert abs(actual - expected) <= 1e-12 * scale(parts)
        right = gradients(expected, arguments)
        for a, e in zip(gradients(actual, arguments), right, strict=True):
            assert (a - e).norm() <= 1e-12 * scale(right)
        assert not any(g.any() for g in gradients(actual, list(chosen.values())))
    with torch.no_grad():
        value = network.linearized().inner(network.vectors, cotangents)
    assert not value.requires_grad
    torch.testing.assert_close(value, linearization.inner(network.vectors, cotangents).detach())


def assert_known_by_the_graph(network: Network) -> None:
    """No layer of an ordinary network has to be probed for the data of its rows."""
    with Recorder(network.weights, M) as recorder:
        f = network.model(network.x.clone())
    calls = [call for uses in uses_of(recorder.calls).values() for call, _ in uses if call.parts]
    everyone = {id(call) for call in calls}
    assert traced(f, calls)[0] <= probed(f, calls, False) <= everyone
    unknown = mock.Mock(side_effect=AssertionError("not known by the graph"))
    with mock.patch.object(linearizing, "probed", unknown):
        linearization = network.linearized(differentiable=True)
        assert all(map(linearization.is_closed, network.plan.uses)) and not linearization.may_mix


@pytest.mark.one_in(2)
@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")
@pytest.mark.parametrize("case", CASES)
def test_every_module(case: str) -> None:
    network = Network(case)
    assert_planned_rows(network)
    assert_generic_rows(network)
    assert_derivatives_of_rows(network)
    for worth_a_call in (0, 2**62) if case.startswith("conv") else (2**62,):
        with mock.patch.object(convolutions, "_WORTH_A_CALL", worth_a_call):
            assert_inner_products(network)
    assert_known_by_the_graph(network)
