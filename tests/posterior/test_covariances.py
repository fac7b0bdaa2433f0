"""The covariance of the outputs against dense float64 matrices."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from posterior.cases import LIKELIHOODS, Case, case
from torch import nn

from evigrad import Evidence, Memory
from evigrad.core.curvature.kfac import Factors
from evigrad.errors import NotFiniteError, NotPositiveDefiniteError
from evigrad.invariances import AffineInvariance, Averaged
from evigrad.likelihoods import Gaussian
from evigrad.posterior import STRUCTURES, covariances
from evigrad.posterior.covariances import Kronecker
from evigrad.priors import GaussianPrior


def assert_close(one: torch.Tensor, other: torch.Tensor) -> None:
    torch.testing.assert_close(one, other, rtol=1e-8, atol=1e-10)


def found(small_case: Case, structure: str, **options) -> torch.Tensor:
    return small_case.evidence.posterior(small_case.train, structure=structure, **options)(
        small_case.test
    ).covariance


@pytest.mark.parametrize(
    ("likelihood", "prior"),
    (("categorical", "scalar"), ("gaussian", "diagonal"), ("bernoulli", "layerwise")),
)
def test_full_and_kernel_are_exact(likelihood, prior):
    small_case = case(likelihood, structure=prior, temperature=0.5)
    expected = small_case.covariance(small_case.hessian())
    for structure in ("full", "ntk"):
        assert_close(found(small_case, structure), expected)


def test_diag_is_that_of_the_diagonal():
    small_case = case(structure="diagonal")
    expected = small_case.covariance(small_case.hessian().diagonal().diag())
    assert_close(found(small_case, "diag"), expected)


def kronecker(small_case: Case) -> torch.Tensor:
    """H of kfac for normal noise: B ⊗ A / count of each matrix, and exact blocks of the others."""
    exact, model = small_case.hessian(), small_case.evidence.model
    assert isinstance(model, nn.Sequential)
    hessian = torch.zeros_like(exact)
    for name in small_case.weights:
        span = small_case.span([name])
        block = exact[span[:, None], span]
        if name in ("0.weight", "4.weight"):
            seen: list[torch.Tensor] = []
            handle = model[int(name[0])].register_forward_hook(
                lambda _, inputs, output, seen=seen: seen.extend((*inputs, output))
            )
            f = model(small_case.train[0])
            handle.remove()
            a, z = seen
            noise = small_case.evidence.likelihood.get_parameter("log_noise").exp()
            g = torch.stack(
                [
                    torch.autograd.grad(r.sum(), z, retain_graph=True)[0]
                    for r in (f / noise).unbind(1)
                ]
            )
            # Of each position: a is (N, T, i), and g is (C, N, T, o).
            a = a.unfold(2, 2, 1).transpose(1, 2).flatten(2) if a.ndim == 3 else a[:, None]
            g = g.transpose(2, 3) if g.ndim == 4 else g[:, :, None]
            both = (torch.einsum("...o,...p->op", g, g), torch.einsum("...i,...j->ij", a, a))
            block = torch.kron(*both).detach() / (a.shape[0] * a.shape[1])
        hessian[span[:, None], span] = block
    return hessian


def test_kfac_is_the_kronecker_product_with_the_prior_added_to_it():
    small_case = case("gaussian")
    assert_close(found(small_case, "kfac"), small_case.covariance(kronecker(small_case)))


def grouped() -> nn.Module:
    """A convolution whose outputs have channels of their own."""
    first = nn.Linear(4, 6).requires_grad_(False)
    convolution = nn.Conv1d(3, 3, 2, groups=3)
    return nn.Sequential(nn.Flatten(), first, nn.Unflatten(1, (3, 2)), convolution, nn.Flatten())


class Transposed(nn.Module):
    """A square weight (in, out)."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x.flatten(1) @ self.weight)[:, :3]


@pytest.mark.parametrize(
    ("likelihood", "build"),
    (
        ("categorical", Transposed),
        ("categorical", lambda: nn.Sequential(nn.Flatten(), nn.Linear(4, 3))),
        ("gaussian", grouped),
    ),
)
def test_kfac_is_exact_for_one_datum_and_no_shared_weights(likelihood, build):
    small_case = case(likelihood, model=build(), num_data=1)
    hessian = small_case.hessian()
    parts = torch.zeros_like(hessian)
    for name in small_case.weights:  # weight and bias are blocks of their own
        span = small_case.span([name])
        parts[span[:, None], span] = hessian[span[:, None], span]
    assert_close(found(small_case, "kfac"), small_case.covariance(parts))


def test_last_layer_holds_the_others_constant():
    small_case = case(estimator="blockdiag-N-C", parameter_partition=[["0"], ["3", "4"]])
    posterior = small_case.evidence.posterior(small_case.train, structure="last-layer")
    assert posterior.parameters == ["4.weight", "4.bias"]
    expected = small_case.covariance(small_case.hessian(), posterior.parameters)
    assert_close(posterior(small_case.test).covariance, expected)
    assert all(weight.requires_grad for weight in small_case.weights.values())


class OutOfOrder(nn.Module):
    """The last layer is registered first, and below a module with a weight of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.ones(3))
        self.last = nn.utils.parametrizations.weight_norm(nn.Linear(4, 3))
        self.first = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.first(x.flatten(1)))) + self.shift


def test_last_layer_is_the_one_called_last():
    small_case = case(model=OutOfOrder())
    posterior = small_case.evidence.posterior(small_case.train, structure="last-layer")
    assert posterior.parameters == [name for name in small_case.weights if name.startswith("last.")]
    expected = small_case.covariance(small_case.hessian(), posterior.parameters)
    assert_close(posterior(small_case.test).covariance, expected)


@pytest.mark.parametrize("likelihood", LIKELIHOODS)
def test_fewer_rows_leave_more_variance_and_all_of_them_the_exact_one(likelihood):
    small_case = case(likelihood)
    exact = small_case.covariance(small_case.hessian())
    prior = small_case.covariance(torch.zeros_like(small_case.hessian()))
    for rows in (1, 8, 14):
        approximate = found(small_case, "ntk", rows=rows)
        for lower, upper in ((exact, approximate), (approximate, prior)):
            assert torch.linalg.eigvalsh(upper - lower).min() > -1e-10
        assert (approximate - exact).abs().max() > 1e-4
    assert_close(found(small_case, "ntk", rows=100), exact)


@settings(max_examples=6)
@given(st.integers(1, 7), st.integers(1, 2), st.sampled_from(("full", "ntk")))
def test_variance_falls_with_every_datum(count, more, structure):
    model = nn.Sequential(nn.Flatten(), nn.Linear(4, 3))
    whole = case(model=model, num_data=count + more)
    part = case(model=model, num_data=count)
    part.train, part.test = (whole.train[0][:count], whole.train[1][:count]), whole.test
    difference = found(part, structure) - found(whole, structure)
    assert torch.linalg.eigvalsh(difference).min() > -1e-10
    assert difference.diagonal(dim1=1, dim2=2).max() > 1e-5


@pytest.mark.parametrize("structure", ("full", "ntk", "kfac", "diag", "last-layer"))
def test_micro_batches_change_nothing(structure):
    whole, parts = case(), case(memory=Memory(micro_batch=2))
    assert_close(found(whole, structure), found(parts, structure))


@pytest.mark.parametrize("structure", ("full", "ntk", "kfac"))
def test_float32_weights_lose_no_more_than_their_own_digits(structure):
    small_case = case()
    small_case.lower_precisions()  # H + P0 would not be positive in float32
    expected = found(small_case, structure)
    small_case.evidence.model.float()
    narrow = case(model=small_case.evidence.model, dtype=torch.float32)
    narrow.lower_precisions()
    result = found(narrow, structure)
    assert result.dtype == torch.float32
    torch.testing.assert_close(result.double(), expected, rtol=2e-2, atol=1e-3)


def test_a_model_that_draws_has_the_same_draws_in_every_call():
    images = torch.randn(6, 1, 4, 4).double()
    model = Averaged(
        nn.Sequential(nn.Flatten(), nn.Linear(16, 3)), AffineInvariance({"rotation": 0.5}), 3
    )
    small_case = case(model=model, hyperparameters=["invariance"], num_data=6, memory=Memory(2))
    small_case.train, small_case.test = (images, small_case.train[1]), images[:5]
    for structure in ("full", "kfac", "last-layer"):
        posterior = small_case.evidence.posterior(small_case.train, structure=structure)
        one, two = posterior(small_case.test), posterior(small_case.test)
        assert torch.equal(one.mean, two.mean) and torch.equal(one.covariance, two.covariance)


@pytest.mark.each(1)
@pytest.mark.parametrize("axis", (None, 0, 1))
@pytest.mark.parametrize("transposed", (False, True))
@pytest.mark.parametrize(("wide", "high"), ((40, 3), (4, 30), (40, 30)))
def test_few_examples_of_a_large_matrix_have_few_eigenvectors(wide, high, transposed, axis):
    shape, count = torch.Size((wide, high) if transposed else (high, wide)), 2
    sizes = [n if i == axis else 1 for i, n in enumerate(shape)]
    precision = torch.tensor(0.3).double() if axis is None else torch.rand(sizes).double() + 0.1
    inputs, gradients = torch.randn(count, wide).double(), torch.randn(count, high).double()
    factors = Factors(
        (inputs.mT @ inputs)[None], (gradients.mT @ gradients)[None], count, count, transposed
    )
    block = Kronecker.of("weight", factors, precision, shape)
    of_inputs = block.gradients if transposed else block.inputs
    assert of_inputs.shape[-1] == (12 if wide == 40 else wide)

    hessian = torch.kron(factors.gradients[0], factors.inputs[0]) / count
    rows = torch.randn(5, 3, high, wide).double()
    flat = rows.flatten(2)
    entries = precision.expand(shape).mT if transposed else precision.expand(shape)
    shifted = hessian + entries.flatten().diag()
    expected = flat @ torch.linalg.solve(shifted, flat.mT)
    white = block.whitened({"weight": rows.mT if transposed else rows})
    torch.testing.assert_close(white @ white.mT, expected, rtol=1e-10, atol=1e-10)


def test_eigenvectors_are_computed_when_first_needed(monkeypatch):
    small_case = case()
    calls = []

    def counted(*arguments, psd_eigen=covariances.psd_eigen):
        calls.append(arguments)
        return psd_eigen(*arguments)

    monkeypatch.setattr(covariances, "psd_eigen", counted)
    posterior = small_case.evidence.posterior(small_case.train, structure="kfac")
    assert not calls
    small_case.lower_precisions()  # the posterior is the one of the precisions at its start
    one = posterior(small_case.test).covariance
    count = len(calls)
    assert count and torch.equal(posterior(small_case.test).covariance, one) and len(calls) == count
    state = small_case.evidence.posterior(state=posterior.state_dict())
    assert torch.equal(state(small_case.test).covariance, one) and len(calls) == count


def test_a_curvature_that_is_not_finite_is_refused_before_it_is_needed():
    small_case = case("gaussian")
    statistic = covariances.KfacStatistic(
        {"0.weight": Factors(torch.full((1, 2, 2), torch.nan), torch.eye(2)[None], 1, 1)}
    )
    precisions = small_case.evidence.prior.precisions()
    with pytest.raises(NotPositiveDefiniteError, match="the curvature is NaN or infinite"):
        covariances.covariance_of(statistic, precisions, small_case.weights, torch.float64)


def linear(precision: float = 1.0) -> Evidence:
    """A linear model of two examples, with a precision that may be infinite."""
    model = nn.Linear(1, 1).double()
    nn.init.zeros_(model.weight)
    nn.init.zeros_(model.bias)
    prior = GaussianPrior()
    evidence = Evidence(model, Gaussian(1.0), prior, estimator="full-N-C", num_data=2)
    prior.get_parameter("log_precision").data.fill_(precision).log_()
    return evidence


@pytest.mark.filterwarnings("ignore:The fast derivatives")  # whose comparison overflows too
@pytest.mark.parametrize("structure", STRUCTURES)
def test_a_curvature_that_overflows_is_refused_as_by_an_estimate(structure):
    """Squares of inputs of 1e160 are infinite, so a factor of H exists, but it is wrong."""
    evidence, y = linear(), torch.zeros(2, 1).double()
    x = torch.tensor([[1.0], [1e160]], dtype=torch.float64)
    calls = (
        lambda: evidence.estimate(x, y),
        lambda: evidence.posterior((x, y), structure=structure),
        lambda: evidence.mode_gap((x, y), structure=structure),
    )
    for call in calls:
        with pytest.raises(NotPositiveDefiniteError, match="curvature is NaN or infinite"):
            call()
    x[1] = 1e150  # squares of 1e300 are finite
    assert evidence.posterior((x, y), structure=structure)(x).std.isfinite().all()


def test_kronecker_factors_whose_product_overflows_are_refused():
    small_case = case("gaussian")
    factor = 1e200 * torch.eye(2, dtype=torch.float64)[None]
    statistic = covariances.KfacStatistic({"0.weight": Factors(factor, factor, 1, 1)})
    precisions = small_case.evidence.prior.precisions()
    with pytest.raises(NotPositiveDefiniteError, match="curvature is NaN or infinite"):
        covariances.covariance_of(statistic, precisions, small_case.weights, torch.float64)


def test_a_precision_that_is_infinite_or_zero_is_refused():
    for structure in STRUCTURES:
        for precision in [torch.inf, 0.0]:
            data = torch.ones(2, 1).double(), torch.zeros(2, 1).double()
            evidence = linear(precision)
            for call in (evidence.posterior, evidence.mode_gap):
                with pytest.raises(
                    NotFiniteError, match="precision of .* must be positive and finite"
                ):
                    call(data, structure=structure)


@pytest.mark.parametrize(("wrong", "change"), [(torch.inf, "smaller"), (0.0, "larger")])
def test_the_error_shows_the_wrong_precision_and_which_way_to_change_it(wrong, change):
    prior = GaussianPrior("diagonal", learnable=False)
    model = nn.Linear(2, 1, bias=False).double()
    evidence = Evidence(model, Gaussian(), prior, estimator="full-N-C", num_data=2)
    with torch.no_grad():
        prior.get_parameter("log_precision")[1] = math.log(wrong) if wrong else -torch.inf
    data = torch.ones(2, 2).double(), torch.zeros(2, 1).double()
    with pytest.raises(NotFiniteError, match=f"got {wrong:.3g}. .* a {change} precision"):
        evidence.posterior(data, structure="diag")
