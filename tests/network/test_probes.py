"""Planning on weights and data that are special: zero heads, equal data, shared memory, NaN."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from network.dense import assert_rows, jacobian, random, rows, weights_of
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from evigrad.errors import ConfigurationError, EvigradWarning, InputError
from evigrad.network import Linearization, plan
from evigrad.network.layers import RULES, Linear, Match


def product(x: Tensor, w: Tensor) -> Tensor:
    """x w, in a way that no closed form knows."""
    return torch.einsum("ni,io->no", x, w)


class Net(nn.Module):
    """A head that starts at zero, as in Fixup, and a weight that is also kept in a list."""

    def __init__(self, forward: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.w = nn.Linear(3, 3), nn.Parameter(torch.randn(3, 4))
        self.head = nn.Linear(4, 3)
        nn.init.zeros_(self.head.weight)
        self.double()
        self.kept = [self.w]
        self._forward = forward

    def forward(self, x: Tensor) -> Tensor:
        return self._forward(self, x)


def by_reference(net: Any, x: Tensor) -> Tensor:
    return net.head(torch.tanh(product(net.first(x), net.kept[0])))


def by_name(net: Any, x: Tensor) -> Tensor:
    return net.head(torch.tanh(product(net.first(x), net.w)))


def check_rows(model: nn.Module, jacobian_plan: Any, x: Tensor) -> None:
    weights, vectors = weights_of(model), random(len(x), 2, 3)
    expected = rows(jacobian(model, weights, x), vectors)
    assert_rows(Linearization(model, weights, x, jacobian_plan, False).rows(vectors), expected)


@pytest.mark.parametrize(
    "forward, word", [(by_reference, "generic: loop"), (by_name, "generic: vmap")]
)
def test_zero_head_says_nothing_about_the_rows_before_it(forward: Callable, word: str) -> None:
    model, x = Net(forward), random(5, 3)
    state, before = torch.get_rng_state(), [p.detach().clone() for p in model.parameters()]
    jacobian_plan = plan(model, weights_of(model), x[:3])
    assert jacobian_plan.words["w"] == word
    assert jacobian_plan.words["first.weight"] == jacobian_plan.words["head.weight"] == "linear"
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))
    check_rows(model, jacobian_plan, x)
    with torch.no_grad():
        model.head.weight.normal_()
    check_rows(model, jacobian_plan, x)


def test_zero_head_hides_no_wrong_closed_form(monkeypatch: pytest.MonkeyPatch) -> None:
    class Doubled(Linear):
        def rows(self, slot: str, match: Match, gradient: Tensor) -> Tensor:
            return 2 * super().rows(slot, match, gradient)

    monkeypatch.setitem(RULES, F.linear, Doubled())
    model = Net(by_name)
    with pytest.warns(EvigradWarning, match=r"rows\(\.\.\.\) disagrees with automatic"):
        jacobian_plan = plan(model, weights_of(model), random(3, 3))
    assert jacobian_plan.words["first.weight"] == "generic: vmap"


class Uncopied:
    def __deepcopy__(self, memo: Any) -> Any:
        raise TypeError("there is but one")


@pytest.mark.parametrize("how", ["refuses", "shares"])
def test_model_that_cannot_be_copied(how: str) -> None:
    """No moved copy: closed forms have their structure, vectorised rows have nothing."""
    model: Any = Net(by_name)
    if how == "refuses":
        model.single = Uncopied()
    else:  # a copy that still works with the original's parameters
        original = model
        model._forward = lambda net, x: by_name(original, x)
    jacobian_plan = plan(model, weights_of(model), random(3, 3))
    assert jacobian_plan.words["first.weight"] == "linear"
    assert jacobian_plan.words["w"] == "generic: loop"
    with torch.no_grad():
        model.head.weight.normal_()
    check_rows(model, jacobian_plan, random(5, 3))


def test_hyperparameter_that_must_not_be_moved() -> None:
    """The second try leaves it alone."""

    def forward(net: Any, x: Tensor) -> Tensor:
        return by_name(net, x) / (net.one == 1).to(x).where(net.one == 1, torch.nan).sum()

    model: Any = Net(forward)
    model.one = nn.Parameter(torch.ones((), dtype=torch.float64))
    weights = weights_of(model, ["one"])
    assert plan(model, weights, random(3, 3)).words["w"] == "generic: vmap"


def test_activations_kept_from_training_do_not_prevent_a_copy() -> None:
    def forward(net: Any, x: Tensor) -> Tensor:
        net.seen["last"] = net.hidden = net.first(x)
        return net.head(torch.tanh(product(net.hidden, net.w)))

    model: Any = Net(forward)
    model.seen = {}
    model(random(3, 3))
    assert plan(model, weights_of(model), random(3, 3)).words["w"] == "generic: vmap"


def sorting(net: Any, x: Tensor) -> Tensor:
    order = x.flatten(1).sum(1).argsort(stable=True)
    h = net.embed(x).sum(1) if hasattr(net, "embed") else x
    return net.first(h[order])[order.argsort()]


def test_equal_data_are_made_different() -> None:
    """Among equal data nobody sees that they are sorted."""
    model, x = Net(sorting), random(5, 3)
    for probe in (x[:1], x[:1].expand(3, 3), torch.stack([x[0], x[0], x[1]]), torch.zeros(2, 3)):
        jacobian_plan = plan(model, weights_of(model), probe.double())
        assert jacobian_plan.words["first.weight"] != "linear"
        check_rows(model, jacobian_plan, x)


def tokens(m: int) -> Tensor:
    return torch.randint(1, 9, (m, 4), generator=torch.Generator().manual_seed(0))


def test_equal_tokens_are_made_different() -> None:
    model: Any = Net(sorting)
    model.embed = nn.Embedding(9, 3).double()
    jacobian_plan = plan(model, weights_of(model), tokens(1))
    assert jacobian_plan.words["first.weight"] != "linear"
    check_rows(model, jacobian_plan, tokens(5))


@pytest.mark.parametrize("probe", [random(1, 3), tokens(1)])
def test_one_datum_is_enough_for_closed_forms(probe: Tensor) -> None:
    def forward(net: Any, x: Tensor) -> Tensor:
        return net.first(x if x.is_floating_point() else net.embed(x).sum(1))

    model: Any = Net(forward)
    model.embed = nn.Embedding(9, 3).double()
    assert plan(model, weights_of(model), probe).words["first.weight"] == "linear"


def test_data_that_cannot_be_told_apart_take_the_loop() -> None:
    """All tokens are 0: there is no other that is sure to exist."""
    model: Any = Net(sorting)
    model.embed = nn.Embedding(9, 3).double()
    jacobian_plan = plan(model, weights_of(model), torch.zeros(3, 4, dtype=torch.long))
    assert set(jacobian_plan.words.values()) == {"generic: loop"}
    check_rows(model, jacobian_plan, tokens(5))


def test_data_that_mix_are_noticed_with_one_datum() -> None:
    model = Net(lambda net, x: by_name(net, x - x.mean(0)))
    with torch.no_grad():
        model.head.weight.normal_()
    with pytest.raises(ConfigurationError, match="other examples of\\s+the batch"):
        plan(model, weights_of(model), random(1, 3))


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_outputs_that_are_not_finite(value: float) -> None:
    model = Net(by_name)
    with torch.no_grad():
        model.head.bias.fill_(value)
    with pytest.raises(InputError, match="outputs contain NaN or infinite"):
        plan(model, weights_of(model), random(3, 3))


def tied(share: Callable[[nn.Parameter], Tensor]) -> nn.Module:
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3)).double()
    model[2].weight = nn.Parameter(share(model.get_parameter("0.weight")))
    return model


@pytest.mark.parametrize("share", [lambda p: p.data, lambda p: p.data.mT, lambda p: p.data[1:, :2]])
def test_two_parameters_on_one_memory(share: Callable[[nn.Parameter], Tensor]) -> None:
    model = tied(share)
    with pytest.raises(ConfigurationError, match=r"'0\.weight' and '2\.weight'.*share memory"):
        plan(model, weights_of(model), random(3, 3))


def test_memory_side_by_side_and_the_same_parameter_twice_are_fine() -> None:
    whole = random(3, 6)
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3), nn.Linear(3, 3)).double()
    model[0].weight = nn.Parameter(whole[:, :3])
    model[2].weight = nn.Parameter(whole[:, 3:])
    model[3].weight = model[2].weight
    jacobian_plan = plan(model, weights_of(model), random(3, 3))
    assert jacobian_plan.words["0.weight"] == "linear"
    assert "3.weight" not in jacobian_plan.words
    check_rows(model, jacobian_plan, random(5, 3))


@pytest.mark.parametrize("through", ["data", "layer"])
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_reentrant_checkpoint(through: str) -> None:
    def forward(net: Any, x: Tensor) -> Tensor:
        h = x if through == "data" else net.first(x)
        h = checkpoint(lambda z: torch.tanh(product(z, net.w)), h, use_reentrant=reentrant)
        return net.head(h)

    model, reentrant = Net(forward), True
    with pytest.raises(ConfigurationError, match="use_reentrant=False"):
        plan(model, weights_of(model), random(3, 3))
    reentrant = False
    check_rows(model, plan(model, weights_of(model), random(3, 3)), random(5, 3))
