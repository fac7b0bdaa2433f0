"""Gaussian priors: values against torch.distributions, groups, binding, keeping."""

import copy
import io
import math
import pickle
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.autograd import gradcheck
from torch.distributions import Normal
from torch.nn.utils import vector_to_parameters

from evigrad import Evidence, Schedule, fit, tune
from evigrad.errors import ConfigurationError
from evigrad.likelihoods import Gaussian
from evigrad.priors import GaussianPrior, NormalHyperprior

GROUPS = {"first": ["encoder"], "rest": ["*.weight_*", "head.bias", "gain"]}
# A precision for each unit of the encoder, and for each input of the head.
AXES = {"units": {"encoder": 0, "head.weight_v": -1}, "rest": "*"}
STRUCTURES = ["scalar", "layerwise", "diagonal", GROUPS, AXES]
IDS = ["scalar", "layerwise", "diagonal", "groups", "axes"]


def weights(dtype: torch.dtype = torch.float64, seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = {
        "encoder.weight": (3, 2),
        "encoder.bias": (3,),
        "head.weight_v": (1, 3),
        "head.bias": (1,),
        "gain": (),
    }
    return {
        name: torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
        for name, shape in shapes.items()
    }


def bound(structure: str | Mapping[str, list[str]], seed: int = 3, **settings) -> GaussianPrior:
    """A prior with a different value in each log precision."""
    prior = GaussianPrior(structure, **settings)
    prior.bind(weights())
    values = parameter(prior)
    with torch.no_grad():
        values.copy_(torch.randn(values.shape, generator=torch.Generator().manual_seed(seed)))
    return prior


def parameter(prior: GaussianPrior) -> nn.Parameter:
    assert prior.log_precision is not None
    return prior.log_precision


# ---------------------------------------------------------------- values


@pytest.mark.parametrize("structure", STRUCTURES, ids=IDS)
def test_the_density_is_that_of_normals(structure) -> None:
    prior, w = bound(structure), weights(seed=1)
    precisions = prior.precisions()
    oracle = sum(Normal(0.0, precisions[n] ** -0.5).log_prob(w[n]).sum() for n in w)
    count = sum(t.numel() for t in w.values())
    density = 0.5 * prior.log_det() - 0.5 * prior.quadratic(w) - 0.5 * count * math.log(2 * math.pi)
    torch.testing.assert_close(density, torch.as_tensor(oracle), rtol=1e-12, atol=0)


@pytest.mark.parametrize("structure", STRUCTURES, ids=IDS)
def test_weights_may_come_in_any_order(structure) -> None:
    prior, w = bound(structure), weights(seed=1)
    backwards = dict(reversed(list(w.items())))
    torch.testing.assert_close(prior.quadratic(backwards), prior.quadratic(w))
    torch.testing.assert_close(prior.square_norms(backwards), prior.square_norms(w))


def test_which_log_precision_belongs_to_which_weight() -> None:
    w = weights()
    scalar = bound("scalar")
    assert scalar.group_names == ["all"] and set(scalar.group_of.values()) == {0}
    for precision in scalar.precisions().values():
        assert torch.equal(precision, parameter(scalar).exp()[0])
    layerwise = bound("layerwise")
    assert layerwise.group_names == list(w)
    for index, precision in enumerate(layerwise.precisions().values()):
        assert torch.equal(precision, parameter(layerwise).exp()[index])
    groups = bound(GROUPS)
    assert groups.group_names == ["first", "rest"]
    assert groups.group_of == {name: int(not name.startswith("encoder")) for name in w}
    for name, precision in groups.precisions().items():
        assert torch.equal(precision, parameter(groups).exp()[groups.group_of[name]])
    diagonal = bound("diagonal")
    assert diagonal.group_names == list(w)
    flat = torch.cat([p.flatten() for p in diagonal.precisions().values()])
    assert torch.equal(flat, parameter(diagonal).exp())


@pytest.mark.parametrize("structure", STRUCTURES, ids=IDS)
def test_shapes_and_names_of_precisions(structure) -> None:
    prior, w = bound(structure), weights()
    varies = structure == "diagonal"
    shapes = {"encoder.weight": (3, 1), "encoder.bias": (3,), "head.weight_v": (1, 3)}
    for name, precision in prior.precisions().items():
        shape = w[name].shape if varies else shapes.get(name, ()) if structure is AXES else ()
        assert precision.shape == shape
    axes = prior.varying_axes()
    if structure is AXES:
        assert axes == {"encoder.weight": (0,), "encoder.bias": (0,), "head.weight_v": (1,)}
    else:
        assert axes == ({n: tuple(range(t.ndim)) for n, t in w.items() if t.ndim} if varies else {})
    for name in w:
        assert prior.group_name(name) == prior.group_names[prior.group_of[name]]


@pytest.mark.parametrize("structure", STRUCTURES, ids=IDS)
def test_gradients_reach_log_precisions_and_weights(structure) -> None:
    prior, w = bound(structure, hyperprior=NormalHyperprior(0.5, 2.0)), weights()
    tensors = [t.requires_grad_() for t in w.values()]

    def everything(log_precision: Tensor, *values: Tensor) -> tuple[Tensor, ...]:
        # Finite differences perturb the parameter itself, in place.
        assert log_precision is prior.log_precision
        named = dict(zip(w, values, strict=True))
        return (
            prior.quadratic(named),
            prior.log_det(),
            prior.log_hyperprior(),
            *prior.precisions().values(),
        )

    assert gradcheck(everything, (parameter(prior), *tensors))


@pytest.mark.parametrize("structure", STRUCTURES, ids=IDS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_neither_overflows_nor_rounds_sums(structure, dtype) -> None:
    w = {name: 300 * value.to(dtype) for name, value in weights().items()}
    halves, doubles = GaussianPrior(structure), GaussianPrior(structure)
    halves.bind(w)
    doubles.bind({name: value.double() for name, value in w.items()})
    quadratic = halves.quadratic(w)
    expected = doubles.quadratic({name: value.double() for name, value in w.items()})
    assert expected > torch.finfo(torch.float16).max
    torch.testing.assert_close(quadratic.double(), expected, rtol=1e-6, atol=0.0)


@given(
    mean=st.floats(-3, 3),
    std=st.floats(0.1, 5),
    values=st.lists(st.floats(-5, 5), min_size=1, max_size=4),
)
def test_normal_hyperprior(mean: float, std: float, values: list[float]) -> None:
    x = torch.tensor(values, dtype=torch.float64)
    oracle = Normal(torch.tensor(mean).double(), torch.tensor(std).double()).log_prob(x).sum()
    torch.testing.assert_close(NormalHyperprior(mean, std)(x), oracle, rtol=1e-6, atol=1e-6)


def test_hyperpriors() -> None:
    assert bound("layerwise").log_hyperprior().item() == 0.0
    prior = bound("layerwise", hyperprior=lambda log_precision: -log_precision.sum())
    assert prior.log_hyperprior().item() == pytest.approx(-parameter(prior).sum().item())
    with pytest.raises(ConfigurationError, match="0-dimensional"):
        bound("layerwise", hyperprior=lambda log_precision: log_precision).log_hyperprior()


# ---------------------------------------------------------------- the mean


@pytest.mark.parametrize("structure", STRUCTURES, ids=IDS)
def test_the_density_around_a_mean_is_that_of_normals(structure) -> None:
    start, w = weights(), weights(seed=1)
    shift = torch.randn(3, 2, generator=torch.Generator().manual_seed(4)).double()
    cases = {
        "zero": {},
        "initial": start,
        "by name": {"encoder.weight": shift, "head.bias": start["head.bias"]},
    }
    by_name = {"encoder.weight": shift, "head.bias": "initial"}
    for name, means in cases.items():
        prior = bound(structure, mean=by_name if name == "by name" else name)
        bound_means = prior.means()
        assert list(bound_means) == [n for n in w if n in means]
        assert all(torch.equal(bound_means[n], means[n]) for n in bound_means)
        precisions = prior.precisions()
        oracle = sum(
            Normal(means.get(n, torch.zeros(())), precisions[n] ** -0.5).log_prob(w[n]).sum()
            for n in w
        )
        count = sum(t.numel() for t in w.values())
        constant = 0.5 * count * math.log(2 * math.pi)
        density = 0.5 * prior.log_det() - 0.5 * prior.quadratic(w) - constant
        torch.testing.assert_close(density, torch.as_tensor(oracle), rtol=1e-12, atol=0)


MEANS = {
    "names": ({"encoder.weight": "initial", "gain": "initial"}, ["encoder.weight", "gain"]),
    "module": ({"head": "initial", "gain": "zero"}, ["head.weight_v", "head.bias"]),
    "pattern": ({"*.bias": "initial"}, ["encoder.bias", "head.bias"]),
    "group": ({"first": "initial", "rest": "zero"}, ["encoder.weight", "encoder.bias"]),
    "zero": ({"*": "zero"}, []),
    "nothing": ({}, []),
}


def test_means_by_name() -> None:
    for mean, names in MEANS.values():
        assert list(bound(GROUPS, mean=mean).means()) == names


def test_the_mean_is_that_of_the_first_binding_and_moves_with_the_prior() -> None:
    w, prior = weights(), GaussianPrior(mean="initial")
    prior.bind(w)
    w["gain"].add_(1.0)  # a step of training, in place
    assert prior.deviations(w)["gain"].item() == pytest.approx(1.0)
    prior.bind(w)
    assert torch.equal(prior.means()["gain"], weights()["gain"])
    prior.bind(weights(torch.float32))
    assert prior.means()["gain"].dtype == torch.float32
    assert prior.to("meta").means()["gain"].is_meta
    half = GaussianPrior(mean="initial")
    half.bind(weights(torch.bfloat16))  # kept as finely as the precisions
    assert half.means()["gain"].dtype == torch.float32
    assert half.quadratic(weights(torch.bfloat16)).item() == 0.0


def test_means_that_do_not_fit() -> None:
    for mean, words in [
        ("intial", "Did you mean 'initial'"),
        ({"gain": 0.0}, "The mean of 'gain' must be 'zero', 'initial', or .* got 0.0"),
        ({"gain": torch.ones((), dtype=torch.long)}, r"int64 tensor \(\)"),
        ({"gain": torch.tensor(math.nan)}, "a finite floating-point tensor"),
        (torch.ones(2), r"mean of 'encoder.weight' must .*\(3, 2\), got \(2,\)"),
        ({"gian": "zero"}, "Did you mean 'gain'"),
        ({"encodr": "zero"}, "Did you mean 'encoder'"),
        ({"frist": "zero"}, "Did you mean 'first'"),
        ({"*.bias": "initial", "head": "zero"}, "two values for 'head.bias', from '\\*.bias' and"),
        ({"encoder.weight": torch.ones(2, 3)}, r"shape, \(3, 2\), got \(2, 3\)"),
    ]:
        prior = None
        with pytest.raises(ConfigurationError, match=words):
            prior = GaussianPrior(GROUPS, mean=mean)
            prior.bind(weights())
        assert prior is None or prior.log_precision is None


@pytest.mark.parametrize("structure", STRUCTURES, ids=IDS)
def test_a_mean_is_kept_in_the_state(structure) -> None:
    mean = {"encoder": "initial", "gain": torch.tensor(2.0)}
    prior = bound(structure, mean=mean)
    state = through_a_file(prior.state_dict())
    other_start = GaussianPrior(structure, mean=mean)
    other_start.bind(weights(seed=9))
    for other in (other_start, GaussianPrior(structure, mean=mean), copy.deepcopy(prior)):
        other.load_state_dict(state)
        other.bind(weights(seed=9))
        loaded_means = other.means()
        assert list(loaded_means) == ["encoder.weight", "encoder.bias", "gain"]
        assert all(torch.equal(loaded_means[name], mean) for name, mean in prior.means().items())
    for other, words in (("zero", "this prior for no weight"), ("initial", "'head.weight_v'")):
        unlike = GaussianPrior(structure, mean=other)
        with pytest.raises(ConfigurationError, match=f"{words}.*Use the same mean="):
            unlike.load_state_dict(state)
        assert unlike.log_precision is None
    assert "_means" not in bound(structure).state_dict()
    assert "mean={'encoder': 'initial', 'gain': float32 tensor ()}" in repr(prior)
    assert "mean" not in repr(bound(structure))


# ---------------------------------------------------------------- initial values


@pytest.mark.parametrize("structure", STRUCTURES, ids=IDS)
def test_initial_precision(structure) -> None:
    prior = GaussianPrior(structure, precision=25)
    prior.bind(weights())
    for precision in prior.precisions().values():
        torch.testing.assert_close(precision, torch.full_like(precision, 25.0))


def test_initial_precision_of_each_group() -> None:
    prior = GaussianPrior(GROUPS, precision={"rest": 0.5, "first": 4})
    prior.bind(weights())
    torch.testing.assert_close(parameter(prior).exp(), torch.tensor([4.0, 0.5]).double())
    prior = GaussianPrior("scalar", precision={"all": 3.0})
    prior.bind(weights())
    torch.testing.assert_close(parameter(prior).exp(), torch.tensor([3.0]).double())
    initial_precisions = {name: float(index + 1) for index, name in enumerate(weights())}
    prior = GaussianPrior("layerwise", precision=initial_precisions)
    prior.bind(weights())
    assert {n: p.item() for n, p in prior.precisions().items()} == pytest.approx(initial_precisions)


def test_precisions_must_be_positive() -> None:
    for precision in [0.0, -1.0, float("nan"), float("inf"), {"all": 0.0}]:
        with pytest.raises(ConfigurationError, match="positive and finite"):
            GaussianPrior("scalar", precision=precision)


@pytest.mark.parametrize("precision", [0.0, {"first": 0, "rest": 1.0}])
def test_the_error_for_precision_zero_names_a_prior_without_decay(precision) -> None:
    structure = GROUPS if isinstance(precision, dict) else "scalar"
    with pytest.raises(ConfigurationError, match="positive and finite") as caught:
        GaussianPrior(structure, precision)
    words = str(caught.value)
    call = words[words.index("GaussianPrior(") : words.rindex(")") + 1]
    prior = eval(call)
    prior.bind(weights())
    assert prior.group_of == {name: int("bias" not in name) for name in weights()}
    assert prior.learned_groups() == ["decayed"]
    assert prior.precisions()["head.bias"].item() == pytest.approx(1e-3)
    with pytest.raises(ConfigurationError, match="requires_grad_.False"):
        GaussianPrior("scalar", precision=math.inf)


def test_a_small_precision_acts_like_no_weight_decay() -> None:
    """Compare gradients and modes with the dense evidence of an intercept without a prior."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(30, 3, generator=generator).double()
    y = 5 + x.sum(1, keepdim=True) + torch.randn(30, 1, generator=generator).double()
    model = nn.Linear(3, 1).double()
    groups = {"free": "*bias", "decayed": "*"}
    prior = GaussianPrior(groups, {"free": 1e-3, "decayed": 2.0}, {"free": False})
    evidence = Evidence(
        model, Gaussian(noise=1.0), prior, estimator="full-N-C", num_data=30, generator=0
    )
    centered, rows = y - y.mean(), x - x.mean(0)  # an intercept without a prior
    with torch.no_grad():
        model.weight.copy_(
            torch.linalg.solve(rows.mT @ rows + 2 * torch.eye(3), rows.mT @ centered).mT
        )
        model.bias.copy_(y.mean() - x.mean(0) @ model.weight[0])
    assert evidence.mode_gap((x, y)) < 1e-3
    evidence.backward(x, y, wrt="prior")
    covariance = torch.eye(30).double() + rows @ rows.mT / 2
    solved = torch.linalg.solve(covariance, centered)
    # The derivative of the log evidence in log δ, where the covariance is I + X Xᵀ / δ.
    by_log = 0.5 * torch.trace(torch.linalg.solve(covariance, rows @ rows.mT)) / 2
    by_log = by_log - 0.5 * (solved.mT @ rows @ rows.mT @ solved).item() / 2
    gradient = prior.get_parameter("log_precision").grad
    assert gradient is not None
    assert -30 * gradient.item() == pytest.approx(by_log.item(), rel=1e-4)


def test_matrices_and_posteriors_are_refused_with_a_recipe() -> None:
    model = nn.Linear(2, 1).double()
    x = torch.randn(9, 2).double()
    evidence = Evidence(model, Gaussian(), GaussianPrior(), num_data=9)
    posterior: Any = evidence.posterior((x, x[:, :1]), structure="full")
    matrix: Any = torch.eye(3)
    by_name: Any = {"first": torch.ones(3, 2), "rest": 1.0}
    number: Any = 5
    for refused in (
        lambda: GaussianPrior(posterior),
        lambda: GaussianPrior(matrix),
        lambda: GaussianPrior(precision=matrix),
        lambda: GaussianPrior(precision=matrix.numpy()),
        lambda: GaussianPrior(GROUPS, precision=by_name),
        lambda: GaussianPrior("diagonal", precision=by_name),
        lambda: Evidence(model, Gaussian(), posterior, num_data=9),
        lambda: Evidence(model, Gaussian(), matrix, num_data=9),
        lambda: fit(model, (x, x[:, :1]), likelihood="gaussian", prior=posterior),
        lambda: fit(model, (x, x[:, :1]), likelihood="gaussian", precision=matrix),
        lambda: tune(model, (x, x[:, :1]), likelihood="gaussian", prior=posterior),
    ):
        with pytest.raises(ConfigurationError, match="Use a posterior as the prior") as caught:
            refused()
        assert "[1., 0." not in str(caught.value)  # no numbers of a large matrix
    title, page = "## Use a posterior as the prior", Path(__file__).parent.parent
    assert title in (page / "docs" / "fine_tuning.md").read_text()
    with pytest.raises(ConfigurationError, match=r"got 5. Use GaussianPrior\(precision=5\).$"):
        GaussianPrior(number)


def test_the_recipe_for_a_posterior_as_the_prior_is_exact() -> None:
    """For a linear model, two steps have the evidence and the posterior of one step."""
    page = (Path(__file__).parent.parent / "docs" / "fine_tuning.md").read_text()
    (recipe,) = re.findall(r"(class Whitened.*?)\n\n\n", page, re.DOTALL)
    (lines,) = re.findall(r"(block = posterior.*?)\nnoise", page, re.DOTALL)
    names: dict = {"nn": nn, "torch": torch}
    exec(recipe, names)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(20, 3, generator=generator).double()
    y = x[:, :2] + torch.randn(20, 2, generator=generator).double()
    test = torch.randn(5, 3, generator=generator).double()

    def evidence_of(model: nn.Module, num_data: int, prior: GaussianPrior) -> Evidence:
        likelihood = Gaussian(noise=0.7, learnable=False)
        return Evidence(model, likelihood, prior, estimator="full-N-C", num_data=num_data)

    def at_mode(model: nn.Module, data: tuple[Tensor, Tensor], prior: GaussianPrior) -> Evidence:
        """Return the evidence after exact training, by one step from Newton's method."""
        evidence = evidence_of(model, len(data[0]), prior)
        loss = evidence.map_loss(*data)
        trained = list(evidence.weights().values())
        flat = torch.cat([w.detach().flatten() for w in trained])
        gradients = torch.autograd.grad(loss, trained, create_graph=True)
        gradient = torch.cat([g.flatten() for g in gradients])
        hessian = torch.stack(
            [
                torch.cat(
                    [g.flatten() for g in torch.autograd.grad(entry, trained, retain_graph=True)]
                )
                for entry in gradient
            ]
        )
        vector_to_parameters(flat - torch.linalg.solve(hessian, gradient.detach()), trained)
        return evidence

    whole = at_mode(nn.Linear(3, 2).double(), (x, y), GaussianPrior(precision=0.5))
    model = nn.Linear(3, 2).double()
    first = at_mode(model, (x[:8], y[:8]), GaussianPrior(precision=0.5))
    log_first = first.estimate(x[:8], y[:8]).log_evidence
    names["posterior"] = first.posterior((x[:8], y[:8]), structure="full")
    exec(lines, names)
    whitened = names["Whitened"](model, names["factor"])
    second = at_mode(whitened, (x[8:], y[8:]), GaussianPrior(precision=1.0, learnable=False))
    log_second = second.estimate(x[8:], y[8:]).log_evidence
    expected = whole.estimate(x, y).log_evidence
    assert log_first + log_second == pytest.approx(expected, rel=1e-9)
    predictions = [
        evidence.posterior(data, structure="full")(test)
        for evidence, data in ((second, (x[8:], y[8:])), (whole, (x, y)))
    ]
    for moment in ("mean", "covariance"):
        ours, theirs = (getattr(prediction, moment) for prediction in predictions)
        assert torch.allclose(ours, theirs, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize(("mean", "std"), [(0.0, 0.0), (0.0, -1.0), (float("nan"), 1.0)])
def test_hyperprior_numbers_must_make_sense(mean: float, std: float) -> None:
    with pytest.raises(ConfigurationError):
        NormalHyperprior(mean, std)


def test_precisions_must_name_the_groups() -> None:
    with pytest.raises(ConfigurationError, match="Did you mean 'first'"):
        GaussianPrior(GROUPS, precision={"frist": 1.0, "rest": 1.0})
    with pytest.raises(
        ConfigurationError, match="must have a value for each group, got none for 'rest'"
    ):
        GaussianPrior(GROUPS, precision={"first": 1.0})
    for structure in ("layerwise", "diagonal"):
        prior = GaussianPrior(structure, precision={"encoder.wieght": 1.0})
        with pytest.raises(ConfigurationError, match="Did you mean 'encoder.weight'"):
            prior.bind(weights())
        assert prior.log_precision is None


# ---------------------------------------------------------------- groups


def test_a_name_is_no_prefix_of_a_longer_name() -> None:
    prior = GaussianPrior({"one": ["conv1"], "ten": ["conv10."]})
    prior.bind({"conv1.weight": torch.ones(2), "conv10.weight": torch.ones(2)})
    assert prior.group_of == {"conv1.weight": 0, "conv10.weight": 1}


def test_one_pattern_needs_no_list() -> None:
    prior = GaussianPrior({"all of it": "*"})
    prior.bind(weights())
    assert set(prior.group_of.values()) == {0}


def test_each_weight_is_in_one_group() -> None:
    w = weights()
    with pytest.raises(ConfigurationError, match="without a group: 'head.weight_v', 'head.bias'"):
        GaussianPrior({"a": ["encoder"], "b": ["gain"]}).bind(w)
    with pytest.raises(ConfigurationError, match="'encoder.bias' is in several groups: a, b"):
        GaussianPrior({"a": ["encoder", "gain"], "b": ["head", "*.bias"]}).bind(w)
    with pytest.raises(ConfigurationError, match="'encodr' matches.*Did you mean 'encoder'"):
        GaussianPrior({"a": ["encodr"], "b": ["*"]}).bind(w)
    # Twice in one group is no contradiction.
    prior = GaussianPrior({"a": ["encoder", "*.bias"], "b": ["head.weight_v", "gain"]})
    prior.bind(w)
    assert prior.group_of["encoder.bias"] == 0


def test_a_star_stands_for_all_other_weights() -> None:
    w = weights()
    for others in ("*", ["*"]):
        prior = GaussianPrior({"rest": others, "biases": "*bias", "gain": ["gain"]})
        prior.bind(w)
        groups = [prior.group_name(name) for name in w]
        assert groups == ["rest", "biases", "rest", "biases", "gain"]
    prior = GaussianPrior({"all": "*"})
    prior.bind(w)
    assert set(prior.group_of.values()) == {0}
    with pytest.raises(ConfigurationError, match="'\\*' matches no other weight"):
        GaussianPrior({"a": ["encoder", "head", "gain"], "b": ["*"]}).bind(w)
    with pytest.raises(ConfigurationError, match="'gain' is in several groups: a, b"):
        GaussianPrior({"a": ["encoder", "head", "*"], "b": ["*"]}).bind(w)
    with pytest.raises(ConfigurationError, match="The pattern '\\*' stands for all"):
        GaussianPrior({"a": ["encoder"]}).bind(w)
    prior = GaussianPrior("scalar", mean={"*": "initial", "head": "zero", "gain": torch.ones(())})
    prior.bind(w)
    assert list(prior.means()) == ["encoder.weight", "encoder.bias", "gain"]
    assert prior.means()["gain"].item() == 1


@pytest.mark.parametrize("groups", [{}, {"a": []}])
def test_groups_must_not_be_empty(groups) -> None:
    with pytest.raises(ConfigurationError, match="must name at least one weight"):
        GaussianPrior(groups)


def test_unknown_structure() -> None:
    with pytest.raises(ConfigurationError, match="Did you mean 'layerwise'"):
        GaussianPrior("layerwse")


# ---------------------------------------------------------------- binding


def test_an_unbound_prior_says_so() -> None:
    prior = GaussianPrior()
    assert list(prior.parameters()) == []
    for call in (prior.precisions, prior.log_det, prior.log_hyperprior, prior.varying_axes):
        with pytest.raises(ConfigurationError, match="bind"):
            call()
    with pytest.raises(ConfigurationError, match="bind"):
        prior.group_name("gain")


@pytest.mark.parametrize("learnable", [True, False])
def test_learnable(learnable: bool) -> None:
    assert parameter(bound("layerwise", learnable=learnable)).requires_grad is learnable


# The groups that a setting leaves to be learned.
SOME = {
    "all": ("scalar", {"all": True}, ["all"]),
    "none": ("scalar", {"all": False}, []),
    "one": (GROUPS, {"first": False}, ["rest"]),
    "named": (GROUPS, {"rest": False, "first": True}, ["first"]),
    "no group": (GROUPS, {"rest": False, "first": False}, []),
    "tensors": ("layerwise", {"gain": False, "encoder.weight": False}, None),
}


@pytest.mark.parametrize(("structure", "learnable", "learned"), SOME.values(), ids=list(SOME))
def test_groups_that_are_learned(structure, learnable, learned) -> None:
    prior, whole = (GaussianPrior(structure, learnable=how) for how in (learnable, True))
    for bound_prior in (prior, whole):
        bound_prior.bind(weights())
    if learned is None:
        learned = [name for name in weights() if learnable.get(name, True)]
    assert parameter(prior).requires_grad is bool(learned)
    if learned:
        assert prior.learned_groups() == learned
        assert parameter(prior).shape == (len(learned),)
    # Whatever happens to the parameters, the others keep their precision.
    with torch.no_grad():
        for p in prior.parameters():
            if p.requires_grad:
                p.fill_(1.5)
    values = [1.5 if name in learned else 0.0 for name in prior.group_names]
    with torch.no_grad():
        parameter(whole).copy_(torch.tensor(values))
    w = weights(seed=1)
    for method in (
        GaussianPrior.log_det,
        lambda p: p.quadratic(w),
        lambda p: p.precisions()["gain"],
    ):
        torch.testing.assert_close(method(prior), method(whole))
    # A state says nothing of what is learned, and goes from one to the other.
    for source, target in ((prior, whole), (whole, prior)):
        fresh = copy.deepcopy(target)
        with torch.no_grad():
            parameter(fresh).sub_(3)
        fresh.load_state_dict(through_a_file(source.state_dict()))
        for name, precision in source.precisions().items():
            torch.testing.assert_close(fresh.precisions()[name], precision)
        unbound = GaussianPrior(structure, learnable=target.learnable)
        unbound.load_state_dict(source.state_dict())
        torch.testing.assert_close(unbound.log_det(), source.log_det())
        assert parameter(unbound).shape == parameter(target).shape


def test_a_hyperprior_sees_all_groups_and_moves_the_learned_ones() -> None:
    prior = bound(GROUPS, learnable={"first": False}, hyperprior=NormalHyperprior(0.5, 2.0))
    (gradient,) = torch.autograd.grad(prior.log_hyperprior(), parameter(prior))
    torch.testing.assert_close(gradient, -(parameter(prior).detach() - 0.5) / 4)
    values = torch.cat([torch.zeros(1).double(), parameter(prior).detach()])
    assert prior.log_hyperprior().item() == pytest.approx(float(NormalHyperprior(0.5, 2.0)(values)))


@pytest.mark.parametrize(
    ("structure", "learnable", "words"),
    [
        (GROUPS, {"frist": False}, "Did you mean 'first'"),
        ("scalar", {"al": False}, "Did you mean 'all'"),
        ("layerwise", {"encoder.wieght": False}, "Did you mean 'encoder.weight'"),
        ("diagonal", {"gian": False}, "Did you mean 'gain'"),
    ],
)
def test_learnable_is_said_for_groups_that_there_are(structure, learnable, words) -> None:
    with pytest.raises(ConfigurationError, match=words):
        GaussianPrior(structure, learnable=learnable).bind(weights())


@pytest.mark.parametrize(
    ("of_weights", "expected"),
    [
        (torch.float64, torch.float64),
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.float32),
    ],
)
def test_dtype_follows_the_weights(of_weights: torch.dtype, expected: torch.dtype) -> None:
    prior = GaussianPrior("layerwise", precision=0.1)
    prior.bind(weights(of_weights))
    assert parameter(prior).dtype == expected
    if expected == torch.float64:  # nothing was rounded to float32 on the way
        assert parameter(prior)[0].item() == math.log(0.1)


@pytest.mark.parametrize("structure", STRUCTURES, ids=IDS)
def test_binding_again_keeps_the_values(structure) -> None:
    prior = bound(structure)
    before = parameter(prior)
    values, precisions = before.detach().clone(), prior.precisions()
    prior.bind(dict(reversed(weights(seed=5).items())))
    assert prior.log_precision is before and torch.equal(before, values)
    for name, precision in prior.precisions().items():
        assert torch.equal(precision, precisions[name])


def test_binding_again_moves_to_the_weights() -> None:
    prior = bound("layerwise")
    before = parameter(prior)
    prior.bind(weights(torch.float32))
    assert prior.log_precision is before and before.dtype == torch.float32


@pytest.mark.parametrize("structure", STRUCTURES, ids=IDS)
def test_binding_to_other_weights_is_refused(structure) -> None:
    prior, w = bound(structure), weights()
    values = parameter(prior).detach().clone()
    without = {name: t for name, t in w.items() if name != "gain"}
    with pytest.raises(ConfigurationError, match="without 'gain'"):
        prior.bind(without)
    with pytest.raises(ConfigurationError, match="with 'encoder.extra'"):
        prior.bind(w | {"encoder.extra": torch.ones(2)})
    with pytest.raises(ConfigurationError, match=r"'gain' is \(2,\), not \(\)"):
        prior.bind(w | {"gain": torch.ones(2)})
    with pytest.raises(ConfigurationError, match="without 'gain'"):
        prior.quadratic(without)
    assert torch.equal(parameter(prior), values)


def test_weights_that_cannot_have_a_prior() -> None:
    with pytest.raises(ConfigurationError, match="needs trainable weights"):
        GaussianPrior().bind({})
    with pytest.raises(ConfigurationError, match="got other types for 'index'"):
        GaussianPrior().bind({"index": torch.ones(2).long()})


def test_unknown_weight() -> None:
    with pytest.raises(ConfigurationError, match="Did you mean 'encoder.bias'"):
        bound("scalar").group_name("encoder.bais")


# ---------------------------------------------------------------- keeping


def through_a_file(state: dict) -> dict:
    """A state as a checkpoint gives it back, without the trust that pickle needs."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize("structure", STRUCTURES, ids=IDS)
def test_state_dict_round_trip(structure) -> None:
    prior = bound(structure)
    state = through_a_file(prior.state_dict())
    same, unbound = bound(structure, seed=8), GaussianPrior(structure)
    for other in (same, unbound):
        other.load_state_dict(state)
        assert other.group_of == prior.group_of and other.group_names == prior.group_names
        assert parameter(other).dtype == torch.float64
        # As it stands, and once `Evidence` has bound it.
        for _ in range(2):
            for name, precision in prior.precisions().items():
                assert torch.equal(other.precisions()[name], precision)
            other.bind(weights())


def test_a_state_inside_another_module() -> None:
    holder = nn.ModuleDict({"prior": bound("layerwise")})
    other = nn.ModuleDict({"prior": GaussianPrior("layerwise", learnable=False)})
    other.load_state_dict(through_a_file(holder.state_dict()))
    (loaded,), (saved,) = other.parameters(), holder.parameters()
    assert torch.equal(loaded, saved) and not loaded.requires_grad


def test_an_unbound_state_round_trips() -> None:
    prior = GaussianPrior("scalar")
    prior.load_state_dict(through_a_file(GaussianPrior("scalar").state_dict()))
    assert prior.log_precision is None


def test_a_state_of_another_prior_is_refused() -> None:
    state = bound("layerwise").state_dict()
    with pytest.raises(
        ConfigurationError, match="have this prior's structure, scalar, got layerwise"
    ):
        GaussianPrior("scalar").load_state_dict(state)
    other = GaussianPrior("layerwise")
    other.bind({name: t for name, t in weights().items() if name != "gain"} | {"g": torch.ones(())})
    with pytest.raises(ConfigurationError, match="different weights"):
        other.load_state_dict(state)
    swapped = GaussianPrior({"rest": GROUPS["rest"], "first": GROUPS["first"]})
    with pytest.raises(ConfigurationError, match="have different groups"):
        swapped.load_state_dict(bound(GROUPS).state_dict())
    assert swapped.log_precision is None
    reordered = GaussianPrior("diagonal")
    reordered.bind(dict(reversed(weights().items())))
    with pytest.raises(ConfigurationError, match="in another order"):
        reordered.load_state_dict(bound("diagonal").state_dict())


def test_a_loaded_prior_is_bound() -> None:
    prior = GaussianPrior("layerwise")
    prior.load_state_dict(bound("layerwise").state_dict())
    with pytest.raises(ConfigurationError, match="without 'gain'"):
        prior.bind({name: t for name, t in weights().items() if name != "gain"})


@pytest.mark.parametrize("structure", STRUCTURES, ids=IDS)
def test_copies_are_independent(structure) -> None:
    prior = bound(structure, hyperprior=NormalHyperprior(1.0, 2.0))
    for other in (copy.deepcopy(prior), pickle.loads(pickle.dumps(prior))):
        assert torch.equal(parameter(other), parameter(prior))
        assert torch.equal(other.log_hyperprior(), prior.log_hyperprior())
        with torch.no_grad():
            parameter(other).add_(1.0)
        expected = prior.log_det() + sum(t.numel() for t in weights().values())
        torch.testing.assert_close(other.log_det(), expected)
    copy.deepcopy(GaussianPrior(structure)).bind(weights())


@pytest.mark.parametrize(
    ("value", "shown"), [(torch.ones(2), r"float32 tensor \(2,\)"), (3.0, "3.0"), ([1], r"\[1\]")]
)
def test_values_in_the_place_of_groups_name_precision_and_mean(value: Any, shown: str) -> None:
    with pytest.raises(ConfigurationError, match=f"got {shown} for '0.weight'. Use .*precision="):
        GaussianPrior({"0.weight": value})


def test_the_error_for_a_prior_of_another_type_names_the_argument_and_a_prior() -> None:
    cases: list[tuple[Any, str]] = [
        (None, r"got None. Use GaussianPrior\(\)"),
        (3.0, r"got 3.0. Use GaussianPrior\(precision=3.0\)"),
        (torch.eye(3), r"got float32 tensor \(3, 3\). A prior has one mean"),
        ("layerwse", "got 'layerwse'. Did you mean 'layerwise'"),
    ]
    data = torch.ones(4, 2), torch.ones(4, 1)
    for prior, words in cases:
        with pytest.raises(ConfigurationError, match=f"^structure must be .*{words}"):
            GaussianPrior(prior)
        with pytest.raises(ConfigurationError, match=f"^prior must be .*{words}"):
            fit(nn.Linear(2, 1), data, likelihood="gaussian", prior=prior)
        with pytest.raises(ConfigurationError, match=f"^prior must be .*{words}"):
            Evidence(nn.Linear(2, 1), Gaussian(), prior, num_data=4)


def of_posterior(**settings) -> tuple[GaussianPrior, Evidence, tuple[Tensor, Tensor]]:
    torch.manual_seed(0)
    x = torch.randn(8, 3).double()
    data = x, x.sin().sum(1, keepdim=True)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()
    evidence = Evidence(model, Gaussian(0.5), bound_to(model), estimator="diag-N-C", num_data=8)
    posterior = evidence.posterior(data, structure="diag")
    return GaussianPrior.from_posterior(posterior, **settings), evidence, data


def bound_to(model: nn.Module) -> GaussianPrior:
    prior = GaussianPrior("layerwise")
    prior.bind(dict(model.named_parameters()))
    with torch.no_grad():
        parameter(prior).copy_(torch.linspace(-1, 1, 4))
    return prior


def test_a_posterior_is_the_prior_of_more_data():
    prior, evidence, (x, y) = of_posterior()
    model, weights = evidence.model, evidence.weights()
    whole = Evidence(model, Gaussian(0.5), evidence.prior, estimator="diag-N-C", num_data=16)
    expected = whole.posterior((torch.cat([x, x + 1]), torch.cat([y, y])), structure="diag")
    later = Evidence(model, Gaussian(0.5), prior, estimator="diag-N-C", num_data=8)
    posterior = later.posterior((x + 1, y), structure="diag")
    torch.testing.assert_close(posterior(x).std, expected(x).std)

    # The factor scales a normal density.
    with torch.no_grad():
        parameter(prior).fill_(math.log(1.7))
        moved = {name: weight + torch.randn_like(weight) for name, weight in weights.items()}
    normals = {
        name: Normal(prior.means()[name], precision.rsqrt())
        for name, precision in prior.precisions().items()
    }
    log_density = sum(normals[name].log_prob(moved[name]).sum() for name in moved)
    count = sum(weight.numel() for weight in moved.values())
    ours = 0.5 * (prior.log_det() - prior.quadratic(moved) - count * math.log(2 * math.pi))
    torch.testing.assert_close(ours, log_density)
    (gradient,) = torch.autograd.grad(ours, parameter(prior))
    torch.testing.assert_close(gradient, 0.5 * (count - prior.quadratic(moved)).view(1))
    for name, precision in prior.precisions().items():
        torch.testing.assert_close(posterior_precision(evidence, (x, y))[name] * 1.7, precision)

    # Structures with and without rows have the same evidence, and a copy the same state.
    values = []
    for estimator in ("ntk-N-C", "full-N-C"):
        other = Evidence(model, Gaussian(0.5), prior, estimator=estimator, num_data=8)
        values.append(other.estimate(x + 1, y).log_evidence)
    torch.testing.assert_close(*values)
    again, _, _ = of_posterior()
    again.load_state_dict(prior.state_dict())
    again.bind(weights)
    assert torch.equal(again.precisions()["0.weight"], prior.precisions()["0.weight"])


def posterior_precision(evidence: Evidence, data: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
    precisions = evidence.posterior(data, structure="diag").diagonal_precisions()
    assert precisions is not None
    return {name: precision for name, (_, precision) in precisions.items()}


def test_the_factor_of_a_posterior_is_learned_from_one():
    prior, evidence, (x, y) = of_posterior()
    torch.manual_seed(1)
    start = {name: weight.detach().clone() for name, weight in evidence.weights().items()}
    result = fit(
        evidence.model, (x + 1, y), likelihood=Gaussian(0.5), prior=prior, progress=False,
        schedule=Schedule(epochs=4, burn_in=2),
    )  # fmt: skip
    assert parameter(prior).item() != 0.0 and result.evidence.prior is prior
    for name, mean in prior.means().items():
        assert torch.equal(mean, start[name])
    fixed, _, _ = of_posterior(learnable=False)
    assert not fixed.bind(evidence.weights()) and not parameter(fixed).requires_grad


def test_only_independent_weights_make_a_prior():
    prior, evidence, data = of_posterior()
    for posterior in (
        evidence.posterior(data, structure="full"),
        evidence.posterior(data, structure="diag").update(*data),
    ):
        with pytest.raises(ConfigurationError, match="needs a posterior with structure='diag'"):
            GaussianPrior.from_posterior(posterior)
    with pytest.raises(ConfigurationError, match="must be bound to the posterior's weights"):
        prior.bind(evidence.weights() | {"other": torch.zeros(1)})
