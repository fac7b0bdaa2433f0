"""Log probabilities, their derivatives in the outputs, samples and metrics, against oracles."""

import itertools

import pytest
import torch
from jaxtyping import Float
from likelihood_zoo import RelativeNoise
from torch import Tensor
from torch.distributions import Bernoulli as BernoulliOracle
from torch.distributions import Categorical as CategoricalOracle
from torch.distributions import Normal as NormalOracle
from torch.distributions import Poisson as PoissonOracle

from evigrad.errors import ConfigurationError, InputError, NotPositiveDefiniteError
from evigrad.likelihoods import (
    LIKELIHOODS,
    Bernoulli,
    Categorical,
    Gaussian,
    HeteroscedasticGaussian,
    KnownNoise,
    Likelihood,
    NegativeBinomial,
    Ordinal,
    Poisson,
    make_likelihood,
)

M, C = 5, 3


class PlainPoisson(Likelihood):
    """Counts with log rates f: all that a new likelihood has to say."""

    name = "plain poisson"
    couples_outputs = False

    def log_prob(self, f: Float[Tensor, "m C"], y: Tensor) -> Float[Tensor, " m"]:
        return (y * f - f.exp() - torch.lgamma(y + 1)).sum(dim=1)


class StudentT(Likelihood):
    """Its Hessian depends on y, and is negative for outliers."""

    name = "student"
    couples_outputs = False

    def log_prob(self, f: Float[Tensor, "m C"], y: Tensor) -> Float[Tensor, " m"]:
        return -2.0 * torch.log1p((y - f).square()).sum(dim=1)


class Concave(Likelihood):
    """No likelihood at all: its log is convex."""

    name = "concave"
    couples_outputs = True

    def log_prob(self, f: Float[Tensor, "m C"], y: Tensor) -> Float[Tensor, " m"]:
        return f.square().sum(dim=1)


class Coupled(Likelihood):
    """Outputs are coupled, but it says they are not."""

    name = "coupled"
    couples_outputs = False

    def log_prob(self, f: Float[Tensor, "m C"], y: Tensor) -> Float[Tensor, " m"]:
        return -f.sum(dim=1).square()


def outputs(seed: int = 0, spread: float = 1.5, num_outputs: int = C) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return spread * torch.randn(M, num_outputs, generator=generator, dtype=torch.float64)


def targets(likelihood: Likelihood, seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    if isinstance(likelihood, Categorical):
        return torch.randint(0, C, (M,), generator=generator)
    if isinstance(likelihood, Bernoulli):
        return torch.randint(0, 2, (M, C), generator=generator).double()
    if isinstance(likelihood, Poisson | PlainPoisson):
        return torch.randint(0, 5, (M, C), generator=generator).double()
    return torch.randn(M, C, generator=generator, dtype=torch.float64)


def test_log_prob_against_distributions() -> None:
    f = outputs()
    y = targets(Categorical())
    torch.testing.assert_close(
        Categorical().log_prob(f, y), CategoricalOracle(logits=f).log_prob(y), rtol=1e-12, atol=0
    )
    y = targets(Bernoulli())
    oracle = BernoulliOracle(logits=f).log_prob(y).sum(1)
    torch.testing.assert_close(Bernoulli().log_prob(f, y), oracle, rtol=1e-12, atol=0)
    gaussian = Gaussian(noise=[0.3, 0.9, 2.0]).double()
    y = targets(gaussian)
    oracle = NormalOracle(f, gaussian.log_noise.exp()).log_prob(y).sum(1)
    torch.testing.assert_close(gaussian.log_prob(f, y), oracle, rtol=1e-12, atol=0)
    y = targets(Poisson())
    oracle = PoissonOracle(f.exp()).log_prob(y).sum(1)
    torch.testing.assert_close(Poisson().log_prob(f, y), oracle, rtol=1e-12, atol=0)
    torch.testing.assert_close(Poisson().log_prob(f, y.long()), oracle, rtol=1e-12, atol=0)


def test_one_noise_counts_for_every_output() -> None:
    f, y = outputs(), targets(Gaussian())
    one, per_output = Gaussian(noise=0.4), Gaussian(noise=[0.4] * C)
    torch.testing.assert_close(one.log_prob(f, y), per_output.log_prob(f, y), rtol=1e-12, atol=0)


def test_bernoulli_probabilities_add_up_to_one() -> None:
    f = outputs()
    every = itertools.product([0.0, 1.0], repeat=C)
    total = sum(Bernoulli().log_prob(f, torch.tensor(y).expand(M, C)).exp() for y in every)
    torch.testing.assert_close(total, torch.ones(M, dtype=torch.float64))


def test_bernoulli_takes_every_dtype_of_labels() -> None:
    for dtype in [torch.int64, torch.bool, torch.uint8, torch.float32]:
        f, y = outputs(), targets(Bernoulli())
        torch.testing.assert_close(Bernoulli().log_prob(f, y.to(dtype)), Bernoulli().log_prob(f, y))


def test_default_derivatives_work_without_grad_mode() -> None:
    f, y = outputs(), targets(PlainPoisson())
    with torch.no_grad():
        score, hessian = PlainPoisson().score(f, y), PlainPoisson().hessian(f)
    torch.testing.assert_close(score, y - f.exp())
    torch.testing.assert_close(hessian, f.exp().diag_embed())
    assert not score.requires_grad and not hessian.requires_grad


@pytest.mark.parametrize("size", [50.0, 1e4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_saturated_logits(size: float, dtype: torch.dtype) -> None:
    f = torch.tensor([[size, -size, 0.0]], dtype=dtype, requires_grad=True)
    (log_prob,) = Categorical().log_prob(f, torch.tensor([1]))
    assert log_prob.item() == pytest.approx(-2 * size)
    (gradient,) = torch.autograd.grad(log_prob, f)
    torch.testing.assert_close(gradient, torch.tensor([[-1.0, 1.0, 0.0]], dtype=dtype))
    (log_prob,) = Bernoulli().log_prob(f[:, :2], torch.tensor([[0.0, 1.0]]))
    assert log_prob.item() == pytest.approx(-2 * size)
    (gradient,) = torch.autograd.grad(log_prob, f)
    torch.testing.assert_close(gradient, torch.tensor([[-1.0, 1.0, 0.0]], dtype=dtype))


def test_targets_of_another_precision() -> None:
    f, y = outputs().float(), targets(Gaussian())
    assert Gaussian().double().log_prob(f, y).dtype == torch.float32
    torch.testing.assert_close(Gaussian().log_prob(f, y), Gaussian().log_prob(f, y.float()))


@pytest.mark.parametrize("kind", [Gaussian, KnownNoise])
def test_noise_and_dispersion_have_the_names_of_their_arguments(kind: type[Gaussian]) -> None:
    assert kind(noise=0.3).noise.item() == pytest.approx(0.3)
    assert kind(noise=[0.3, 2.0]).noise.tolist() == pytest.approx([0.3, 2.0])
    dispersion = NegativeBinomial(dispersion=0.7).dispersion
    assert dispersion.item() == pytest.approx(0.7) and not dispersion.requires_grad


def test_parameters_are_reported_in_units_that_are_known() -> None:
    assert Categorical().reported() == {}
    assert Gaussian(0.5).reported() == {"noise": pytest.approx(0.5)}
    reported = Gaussian([0.5, 2.0], learnable=False).reported()
    assert reported == {"noise/0": pytest.approx(0.5), "noise/1": pytest.approx(2.0)}
    assert RelativeNoise().reported() == {"log_ratio": pytest.approx(-0.4)}


# ---------------------------------------------------------------- samples


def test_no_sample_by_default() -> None:
    with pytest.raises(ConfigurationError, match="PlainPoisson has no sample"):
        PlainPoisson().sample(outputs(), torch.Generator())


# ---------------------------------------------------------------- metrics


def test_metrics_are_sums() -> None:
    f = torch.tensor([[2.0, 1.0], [0.0, 1.0], [3.0, -1.0]])
    y = torch.tensor([0, 0, 0])
    metrics = Categorical().metrics(f, y)
    assert metrics["correct"] == 2
    assert metrics["log_likelihood"] == pytest.approx(Categorical().log_prob(f, y).sum().item())
    labels = torch.tensor([[1, 1], [1, 1], [1, 1]])
    assert Bernoulli().metrics(f, labels)["correct"] == pytest.approx(1 + 0.5 + 0.5)
    metrics = Gaussian(noise=0.5).metrics(f, f + torch.tensor([1.0, 2.0]))
    assert metrics["squared_error"] == pytest.approx(15.0)
    assert metrics["log_likelihood"] == pytest.approx(
        NormalOracle(f, 0.5).log_prob(f + torch.tensor([1.0, 2.0])).sum().item(), rel=1e-6
    )
    rates = torch.tensor([[2.0, 1.0], [0.5, 4.0]])
    counts = Poisson().metrics(rates.log(), torch.tensor([[1, 1], [1, 7]]))
    assert counts["squared_error"] == pytest.approx(1 + 0 + 0.25 + 9)
    assert set(PlainPoisson().metrics(f, labels)) == {"log_likelihood"}


# ---------------------------------------------------------------- defaults that would be wrong


def test_default_hessian_refuses_one_that_depends_on_targets() -> None:
    with pytest.raises(ConfigurationError, match="StudentT.log_prob depends on the targets"):
        StudentT().hessian(outputs())


@pytest.mark.parametrize("kind", ["subblock", "fisher", "eigen"])
def test_default_root_refuses_an_indefinite_hessian(kind: str) -> None:
    with pytest.raises(NotPositiveDefiniteError, match="Override the likelihood's hessian"):
        Concave().root(outputs(), None, kind)

    class Independent(Concave):
        couples_outputs = False

    with pytest.raises(NotPositiveDefiniteError, match="eigenvalue -2"):
        Independent().root(outputs(), None, kind)


def test_default_root_refuses_a_diagonal_that_is_none() -> None:
    with pytest.raises(ConfigurationError, match="couples_outputs = True"):
        Coupled().root(outputs())


# ---------------------------------------------------------------- making one


def test_names() -> None:
    assert {name: density.name for name, density in LIKELIHOODS.items()} == {
        n: n for n in LIKELIHOODS
    }
    assert isinstance(make_likelihood("bernoulli"), Bernoulli)
    gaussian = Gaussian(0.5)
    assert make_likelihood(gaussian) is gaussian
    with pytest.raises(ConfigurationError, match="Did you mean 'categorical'"):
        make_likelihood("categorial")


def test_noise_must_be_positive() -> None:
    for noise in [0.0, -1.0, float("nan"), float("inf"), [1.0, 0.0], []]:
        with pytest.raises(ConfigurationError, match="must be positive and finite"):
            Gaussian(noise=noise)


def test_noise_must_fit_the_number_of_outputs() -> None:
    for noise in [[1.0, 2.0], torch.ones(2, 2)]:
        with pytest.raises(ConfigurationError, match="one number per output"):
            Gaussian(noise=noise, num_outputs=3)


def test_gaussian_state_dict_round_trip() -> None:
    saved = Gaussian(noise=[0.2, 0.4]).state_dict()
    other = Gaussian(num_outputs=2)
    other.load_state_dict(saved)
    torch.testing.assert_close(other.log_noise.exp(), torch.tensor([0.2, 0.4]))


# ---------------------------------------------------------------- bad targets

NAN, INF = float("nan"), float("inf")

BAD = {
    "label too large": (Categorical(), (3, 4), torch.tensor([0, 4, 1]), r"4 at index 1.*0 … 3"),
    "label negative": (Categorical(), (2, 4), torch.tensor([-100, 1]), r"-100 at index 0"),
    "label float": (Categorical(), (2, 3), torch.tensor([0.0, 1.0]), r"y\.long\(\)"),
    "label missing, -1": (
        Categorical(),
        (2, 3),
        torch.tensor([0, -1]),
        "-1 at .*ignore_index, -100",
    ),
    "label missing, NaN": (Categorical(), (2, 3), torch.tensor([0.0, NAN]), "remove the.*, -100"),
    "order missing, -1": (Ordinal(3), (2, 1), torch.tensor([0, -1]), "-1 at .*ignore_index, -100"),
    "order missing, NaN": (Ordinal(3), (2, 1), torch.tensor([0.0, NAN]), "remove the.*, -100"),
    "order missing, -100": (Ordinal(3), (2, 1), torch.tensor([0, -100]), "is the ignore_index"),
    "order of floats": (Ordinal(3), (2, 1), torch.ones(2), "NaN cannot be converted.*, -100"),
    "yes-no missing, -1": (Bernoulli(), (1, 1), -torch.ones(1, 1), 'missing="nan"'),
    "label of one output": (Categorical(), (2, 1), torch.tensor([0, 1]), 'likelihood="gaussian"'),
    "label bool": (Categorical(), (2, 3), torch.tensor([True, False]), r"y\.long\(\)"),
    "label (m, 1)": (Categorical(), (2, 3), torch.tensor([[0], [1]]), r"y\.squeeze\(1\)"),
    "label one-hot": (Categorical(), (3, 3), torch.eye(3).long(), r"y\.argmax\(1\)"),
    "several labels": (Categorical(), (3, 3), torch.ones(3, 3), r'likelihood="bernoulli"'),
    "no label": (Categorical(), (3, 3), torch.zeros(3, 3), r'likelihood="bernoulli"'),
    "label smoothed": (
        Categorical(),
        (2, 3),
        torch.full((2, 3), 1 / 3),
        "not a log density. Use the labels",
    ),
    "one softmax output": (Categorical(), (2, 1), torch.tensor([0, 0]), "Bernoulli"),
    "target (m,)": (Gaussian(), (3, 1), torch.zeros(3), r"y\.unsqueeze\(-1\)"),
    "target (m, 1)": (Gaussian(), (3, 2), torch.zeros(3, 1), r"\(3, 2\), got \(3, 1\)"),
    "target integer": (Gaussian(), (3, 1), torch.zeros(3, 1).long(), r"y\.float\(\)"),
    "target NaN": (Gaussian(), (2, 1), torch.tensor([[0.0], [NAN]]), r"nan at index \[1, 0\]"),
    "target infinite": (Gaussian(), (2, 1), torch.tensor([[INF], [0.0]]), r"inf at index \[0, 0\]"),
    "noises": (Gaussian([1.0, 1.0]), (2, 3), torch.zeros(2, 3), r"got 2 for 3 outputs"),
    "yes-no (m,)": (Bernoulli(), (3, 1), torch.zeros(3), r"y\.unsqueeze\(-1\)"),
    "yes-no range": (
        Bernoulli(),
        (1, 2),
        torch.tensor([[0, 2]]),
        r"2 at index \[0, 1\].*must be 0 or 1",
    ),
    "yes-no soft": (Bernoulli(), (1, 2), torch.tensor([[0.5, 1.0]]), "must be 0 or 1"),
    "yes-no NaN": (Bernoulli(), (1, 2), torch.tensor([[NAN, 1.0]]), "is NaN.*missing="),
    "yes-no complex": (
        Bernoulli(),
        (1, 1),
        torch.zeros(1, 1, dtype=torch.complex64),
        "zeros and ones",
    ),
    "count (m,)": (Poisson(), (3, 1), torch.zeros(3), r"y\.unsqueeze\(-1\)"),
    "count negative": (Poisson(), (1, 2), torch.tensor([[0, -2]]), r"-2 at index \[0, 1\].*count"),
    "count broken": (Poisson(), (1, 2), torch.tensor([[0.5, 1.0]]), "0.5 at .*must be a count"),
    "count NaN": (Poisson(), (1, 2), torch.tensor([[NAN, 1.0]]), "is NaN.*missing="),
    "count complex": (Poisson(), (1, 1), torch.zeros(1, 1, dtype=torch.complex64), "whole"),
    "one output": (HeteroscedasticGaussian(), (2, 1), torch.zeros(2, 1), "two outputs per target"),
    "means alone": (HeteroscedasticGaussian(), (2, 2), torch.zeros(2, 2), "two outputs per target"),
    "mean (m,)": (HeteroscedasticGaussian(), (3, 2), torch.zeros(3), r"y\.unsqueeze\(-1\)"),
    "mean integer": (HeteroscedasticGaussian(), (3, 2), torch.ones(3, 1).long(), r"y\.float\(\)"),
    "empty": (Categorical(), (0, 3), torch.zeros(0).long(), "empty"),
    "no outputs": (Gaussian(), (2, 0), torch.zeros(2, 0), "empty"),
    "number of data": (
        Categorical(),
        (3, 3),
        torch.tensor([0, 1]),
        "need 3 targets, got targets of shape",
    ),
    "scalar target": (
        Categorical(),
        (3, 3),
        torch.tensor(1),
        "need 3 targets, got targets of shape",
    ),
    "outputs (m,)": (Gaussian(), (3,), torch.zeros(3), r"f\.unsqueeze\(1\)"),
    "outputs (m, T, C)": (Categorical(), (3, 2, 4), torch.zeros(3).long(), "flatten or average"),
    "default": (PlainPoisson(), (2, 1), torch.tensor([[0.0], [NAN]]), "not finite"),
}


def test_bad_targets_are_refused_with_words() -> None:
    for case in BAD:
        likelihood, f_shape, y, words = BAD[case]
        with pytest.raises(InputError, match=words):
            likelihood.validate(torch.Size(f_shape), y)


def test_labels_of_any_integer_dtype() -> None:
    for dtype in [torch.int64, torch.int32, torch.uint8]:
        f, y = outputs(), targets(Categorical())
        Categorical().validate(f.shape, y.to(dtype))
        torch.testing.assert_close(
            Categorical().log_prob(f, y.to(dtype)), Categorical().log_prob(f, y)
        )
        torch.testing.assert_close(Categorical().score(f, y.to(dtype)), Categorical().score(f, y))
