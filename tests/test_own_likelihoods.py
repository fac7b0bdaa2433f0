"""A density of the user's own whose rows would be another's is refused, and before training."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from likelihood_zoo import RelativeNoise, targets
from torch import Tensor, nn

import evigrad
from evigrad import Evidence, Schedule, fit
from evigrad.errors import ConfigurationError, InputError, NotFiniteError
from evigrad.likelihoods import Categorical, Gaussian, Likelihood, RootRows
from evigrad.priors import GaussianPrior

N, C, MASK = 12, 3, -100
X = torch.linspace(-1, 1, 2 * N).reshape(N, 2)
LABELS = torch.arange(N) % C
MASKED = torch.where(torch.arange(N) > 8, MASK, LABELS)
NUMBERS = torch.linspace(-1, 1, N * C).reshape(N, C)


class Masked(Likelihood):
    """Classes, where some data do not count."""

    name = "masked"
    is_classification = True

    def log_prob(self, f: Tensor, y: Tensor) -> Tensor:
        chosen = f.log_softmax(1).gather(1, y.clamp(min=0)[:, None])[:, 0]
        return torch.where(y == MASK, 0.0, chosen)

    def reference_targets(self, f: Tensor) -> tuple[Tensor, Tensor]:
        label = torch.zeros(len(f), dtype=torch.long, device=f.device)
        return label, label + 1


class MaskedCategorical(Categorical):
    """The same by half."""

    def log_prob(self, f: Tensor, y: Tensor) -> Tensor:
        return Masked().log_prob(f, y)

    def validate(self, f_shape: Any, y: Tensor) -> None:
        pass


class StudentT(Likelihood):
    """Its Hessian depends on the targets."""

    name = "student"
    couples_outputs = False

    def log_prob(self, f: Tensor, y: Tensor) -> Tensor:
        return -2.0 * torch.log1p((y - f).square()).sum(1)


class InheritedStudentT(Gaussian):
    """Its root is that of another density."""

    def log_prob(self, f: Tensor, y: Tensor) -> Tensor:
        return StudentT().log_prob(f, y)


class FisherStudentT(StudentT):
    """With the curvature that it has on average."""

    def hessian(self, f: Tensor) -> Tensor:
        return torch.eye(f.shape[1]).expand(len(f), -1, -1) * (2 / 3)


class Tempered(Categorical):
    """Its Hessian is that of another density, whatever the targets."""

    def log_prob(self, f: Tensor, y: Tensor) -> Tensor:
        return super().log_prob(f / 2, y)


class Curved(Likelihood):
    """Says what its Hessian is."""

    name = "curved"
    couples_outputs = False

    def log_prob(self, f: Tensor, y: Tensor) -> Tensor:
        return -0.5 * (y - f).square().sum(1)

    def hessian(self, f: Tensor) -> Tensor:
        return torch.eye(f.shape[1]).expand(len(f), -1, -1)


class Steeper(Curved):
    """Its Hessian is twice as large."""

    def log_prob(self, f: Tensor, y: Tensor) -> Tensor:
        return 2 * super().log_prob(f, y)


class Smoothed(Categorical):
    """Its Hessian is that of a softmax, and its score is not."""

    def log_prob(self, f: Tensor, y: Tensor) -> Tensor:
        return 0.9 * super().log_prob(f, y) + 0.1 * f.log_softmax(1).mean(1)


class Uncoupled(Masked):
    """Says of its outputs what is not so."""

    couples_outputs = False


class Careless(Likelihood):
    """Takes no targets but integers, and does not say which."""

    name = "careless"

    def log_prob(self, f: Tensor, y: Tensor) -> Tensor:
        return f.log_softmax(1).gather(1, y[:, None])[:, 0]


def network(num_outputs: int = C) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, num_outputs))


def build(likelihood: Likelihood, estimator: str, num_data: int = N) -> Evidence:
    return Evidence(
        network(),
        likelihood,
        GaussianPrior(),
        estimator=estimator,
        num_data=num_data,
        generator=0,
    )


VERBS: dict[str, tuple[str, Callable[[Evidence, Tensor], Any]]] = {
    "estimate": ("ntk-N-C", lambda e, y: e.estimate(X, y)),
    "backward": ("kfac-N-C", lambda e, y: e.backward(X, y)),
    "collect": ("ntk-N-1", lambda e, y: e.collect(X, y)),
    "blocks": ("ntk-4-1", lambda e, y: e.blocks((X, y))),
    "anchored": ("ntk-4-rows-anchored", lambda e, y: e.blocks((X, y))),
    "bracket": ("ntk-4-1", lambda e, y: evigrad.bracket(e, (X, y), rows=6)),
    "fit": (
        "ntk-4-1",
        lambda e, y: fit(
            e.model, (X, y), likelihood=e.likelihood, estimator="ntk-4-1", progress=False
        ),
    ),
}
REFUSED: dict[str, tuple[Likelihood, Tensor, str]] = {
    "mask": (Masked(), MASKED, "At target -100, it differs.*remove them"),
    "mask of a subclass": (MaskedCategorical(), MASKED, "At target -100, it differs"),
    "Student": (StudentT(), NUMBERS, "StudentT.log_prob depends on the targets"),
    "Student of a subclass": (InheritedStudentT(), NUMBERS, "inherits root"),
    "tempered": (Tempered(), LABELS, "Tempered inherits root"),
    "steeper": (Steeper(), NUMBERS, "Steeper inherits hessian"),
    "uncoupled": (Uncoupled(), LABELS, "couples_outputs = True"),
    "careless": (
        Careless(),
        LABELS,
        "Careless, or its derivatives at its reference_targets, raised",
    ),
}


@pytest.mark.each(1)
@pytest.mark.parametrize("kind", REFUSED)
@pytest.mark.parametrize("verb", VERBS)
def test_rows_of_another_density_are_refused_before_anything_changes(verb: str, kind: str) -> None:
    (likelihood, y, words), (estimator, call) = REFUSED[kind], VERBS[verb]
    evidence = build(likelihood, estimator)
    before = copy.deepcopy(evidence.state_dict()["generator"])
    weights = copy.deepcopy(evidence.model.state_dict())
    with pytest.raises((ConfigurationError, ValueError), match=words):
        call(evidence, y)
    assert torch.equal(evidence.generator.get_state(), before)
    after = evidence.model.state_dict()
    assert all(torch.equal(after[name], w) for name, w in weights.items())


def test_without_masked_data_it_is_the_density_that_it_looks_like() -> None:
    kept = MASKED != MASK
    estimate = build(Masked(), "ntk-N-C", 9).estimate(X[kept], MASKED[kept])
    expected = build(Categorical(), "ntk-N-C", 9).estimate(X[kept], MASKED[kept])
    assert estimate.log_evidence == pytest.approx(expected.log_evidence, rel=1e-5)
    # A subset without a mask passes, the next one does not.
    evidence = build(MaskedCategorical(), "ntk-4-1")
    evidence.estimate(X[:4], MASKED[:4])
    with pytest.raises(ConfigurationError, match="-100"):
        evidence.estimate(X[6:10], MASKED[6:10])


@pytest.mark.parametrize(
    ("likelihood", "y", "estimator"),
    [
        (Masked(), LABELS, "ntk-4-1"),
        (Masked(), MASKED, "diag-N-1-ef"),
        (StudentT(), NUMBERS, "diag-N-1-ef"),
        (FisherStudentT(), NUMBERS, "ntk-4-1"),
        (Smoothed(), LABELS, "ntk-4-1"),
    ],
)
def test_what_has_rows_of_its_own_is_taken(
    likelihood: Likelihood, y: Tensor, estimator: str
) -> None:
    evidence = build(likelihood, estimator)
    evidence.backward(next(iter(evidence.blocks((X, y)))))


@pytest.mark.each(1)
@pytest.mark.parametrize("num_outputs", [1, 3])
@pytest.mark.parametrize("choice", ["N-C", "8-1"])
@pytest.mark.parametrize("structure", ["ntk", "full", "blockdiag", "diag", "kfac"])
def test_scales_that_depend_on_outputs_and_a_learned_parameter(
    structure: str, choice: str, num_outputs: int
) -> None:
    """Rows that are added up cannot be rescaled then. test_pairs has their gradients."""
    likelihood, x = RelativeNoise(), X[:8].double()
    model, y = network(num_outputs).double(), targets(likelihood, 8, num_outputs)
    evidence = Evidence(
        model, likelihood, GaussianPrior(), estimator=f"{structure}-{choice}", num_data=8
    )
    keeps_rows = structure == "ntk" or (
        structure == "full" and (choice == "8-1" or num_outputs == 1)
    )
    if not keeps_rows:
        with pytest.raises(ConfigurationError, match="sums rows with different scales"):
            evidence.collect(x, y)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("estimator", ["kfac-N-C", "kfac-4-1", "ntk-N-C"])
def test_such_a_likelihood_is_learned(estimator: str) -> None:
    result = fit(
        network(),
        (X, NUMBERS),
        likelihood=RelativeNoise(),
        estimator=estimator,
        schedule=Schedule(epochs=2, burn_in=0, steps=3),
        progress=False,
    )
    assert result.history[-1]["likelihood/log_ratio"] != result.history[0]["likelihood/log_ratio"]


def test_training_without_an_evidence_needs_no_rows() -> None:
    fit(
        network(),
        (X, NUMBERS),
        likelihood=StudentT(),
        estimator=None,
        schedule=Schedule(epochs=1),
        progress=False,
    )


@pytest.mark.parametrize(
    ("likelihood", "y", "estimator", "words"),
    [
        (Smoothed(), LABELS, "diag-N-1-ef", "Smoothed inherits score"),
        (MaskedCategorical(), MASKED, "diag-N-1-ef", "MaskedCategorical inherits score"),
        (Masked(), LABELS, "diag-N-1-mc", r"no sample\(f, generator\)"),
    ],
)
def test_scores_are_known_beforehand_too(
    likelihood: Likelihood, y: Tensor, estimator: str, words: str
) -> None:
    with pytest.raises(ConfigurationError, match=words):
        build(likelihood, estimator).blocks((X, y))
    with pytest.raises(ConfigurationError, match=words):
        build(likelihood, estimator).estimate(X, y)


def test_a_hyperprior_that_is_no_number() -> None:
    prior = GaussianPrior(hyperprior=lambda log_precision: log_precision)
    with pytest.raises(ConfigurationError, match="0-dimensional"):
        Evidence(network(), Categorical(), prior, estimator="ntk-4-1", num_data=N)


class Gamma(Likelihood):
    """A density of positive targets with mean exp(f), whose curvature is the Fisher information."""

    name = "gamma"
    couples_outputs = False

    def log_prob(self, f: Tensor, y: Tensor) -> Tensor:
        return (y.log() - 2.0 * f - 2.0 * y * (-f).exp()).sum(1)

    def hessian(self, f: Tensor) -> Tensor:
        return torch.full_like(f, 2.0).diag_embed()


def gamma(estimator: str = "ntk-N-C") -> Evidence:
    prior = GaussianPrior()
    return Evidence(nn.Linear(2, 1), Gamma(), prior, estimator=estimator, num_data=N)


FEW: dict[str, Any] = {"likelihood": Gamma(), "progress": False, "schedule": Schedule(epochs=1)}
POSITIVE = X[:, :1].exp()
NOT_ALLOWED: dict[str, Callable[[Any], object]] = {
    "fit": lambda data: fit(nn.Linear(2, 1), data, **FEW),
    "fit by MAP": lambda data: fit(nn.Linear(2, 1), data, estimator=None, **FEW),
    "fit, items": lambda data: fit(nn.Linear(2, 1), list(zip(*data, strict=True)), **FEW),
    "tune": lambda data: evigrad.tune(nn.Linear(2, 1), data, likelihood=Gamma(), rounds=1),
    "estimate": lambda data: gamma().estimate(*data),
    "backward": lambda data: gamma("kfac-N-C").backward(*data),
    "map_loss": lambda data: gamma().map_loss(*data),
    "mode_gap": lambda data: gamma().mode_gap(data),
    "posterior": lambda data: gamma().posterior(data),
    "bracket": lambda data: evigrad.bracket(gamma(), data, rows=5),
}


@pytest.mark.parametrize("call", NOT_ALLOWED)
@pytest.mark.filterwarnings("ignore::evigrad.errors.EvigradWarning")
def test_targets_that_the_density_does_not_allow_are_named(call):
    y = POSITIVE.clone()
    NOT_ALLOWED[call]((X, y))
    y[9] = -1.5
    words = r"log_prob of Gamma must be finite .* 1 of \d+ targets\. The first of them is -1\.5,"
    with pytest.raises(InputError, match=words):
        NOT_ALLOWED[call]((X, y))


def test_overflow_is_not_blamed_on_targets():
    # Outputs so small that exp(−f) overflows, as in training that has diverged.
    evidence = gamma()
    with torch.no_grad():
        next(iter(evidence.weights().values())).fill_(1e30)
    assert not evidence.map_loss(X, POSITIVE).isfinite()


def test_a_posterior_gives_impossible_targets_no_probability():
    posterior = gamma().posterior((X, POSITIVE))
    assert posterior(X).log_prob(torch.zeros_like(POSITIVE)).tolist() == [-torch.inf] * N


class OfWeights(Curved):
    """Its weights are the results of a function of the targets."""

    def __init__(self, weights: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.of = weights

    def weights(self, y: Tensor) -> Any:
        return self.of(y)


WEIGHTS: dict[str, tuple[Callable[[Tensor], Any], str]] = {
    "negative": (lambda y: torch.where(y[:, 0] > 0.5, -1.0, 1.0), "^Weight -1.0 .*from weights of"),
    "NaN": (lambda y: y[:, 0] * torch.nan, "^Weight nan at index 0 from weights of OfWeights"),
    "too many": (lambda y: torch.ones(len(y) + 1), r"one factor per example.*got shape \(13,\)"),
    "one": (lambda y: torch.ones(()), r"must return a tensor of shape \(12,\).*got shape \(\)"),
    "columns": (lambda y: torch.ones(len(y), 2), r"\(12, 3\), with .*got shape \(12, 2\)"),
    "list": (lambda y: [1.0] * len(y), "got a list"),
    "raises": (lambda y: y.view(7), "weights of OfWeights, given outputs .* raised RuntimeError"),
}


class OfRoot(Curved):
    """Its root is the result of a function of the outputs."""

    def __init__(self, root: Callable[[Tensor, Any], Any]) -> None:
        super().__init__()
        self.of = root

    def root(self, f: Tensor, columns: Any = None, kind: str = "subblock") -> Any:
        return self.of(f, columns)


def rows(f: Tensor, columns: Tensor | None) -> Tensor:
    return torch.ones(len(f), C if columns is None else columns.shape[1], C)


ROOTS: dict[str, Callable[[Tensor, Any], Any]] = {
    "a Tensor|shape": rows,
    r"shape \(.*, 2\)": lambda f, columns: RootRows(rows(f, columns)[..., :2]),
    r"shape \(1, \d, 3\)": lambda f, columns: RootRows(rows(f, columns)[:1]),
}


class OfHessian(Curved):
    """Its Hessian is a vector for each example."""

    def hessian(self, f: Tensor) -> Tensor:
        return torch.ones_like(f)


def test_methods_that_return_something_else_are_named() -> None:
    for kind in [*WEIGHTS, *ROOTS, "hessian"]:
        if kind in WEIGHTS:
            likelihood, words = OfWeights(WEIGHTS[kind][0]), WEIGHTS[kind][1]
        elif kind in ROOTS:
            likelihood = OfRoot(ROOTS[kind])
            words = f"root of OfRoot must return evigrad.likelihoods.RootRows with .*got ({kind})"
        else:
            likelihood, words = (
                OfHessian(),
                r"hessian of OfHessian must return .*, 3, 3\), got shape",
            )
        calls: dict[str, tuple[str, Callable[[Evidence], Any]]] = {
            "estimate": ("ntk-N-C", lambda e: e.estimate(X, NUMBERS)),
            "backward": ("kfac-N-C", lambda e: e.backward(X, NUMBERS)),
            "blocks": ("ntk-4-1", lambda e: e.blocks((X, NUMBERS))),
            "anchored": ("ntk-4-rows-anchored", lambda e: e.blocks((X, NUMBERS))),
            "posterior": ("ntk-N-C", lambda e: e.posterior((X, NUMBERS), structure="diag")),
            "mode_gap": ("ntk-N-C", lambda e: e.mode_gap((X, NUMBERS))),
        }
        for verb, (estimator, call) in calls.items():
            with pytest.raises((ConfigurationError, InputError), match=words):
                call(build(likelihood, estimator))
                pytest.fail(f"{verb}: accepted")


def test_a_message_about_a_hessian_of_targets_names_estimators_that_need_none() -> None:
    """Also if the first error is one of PyTorch, because the reference targets do not fit."""

    class OneTarget(StudentT):
        def log_prob(self, f: Tensor, y: Tensor) -> Tensor:
            assert y.shape == (len(f), 1)
            return super().log_prob(f, y)

    way_out = "'ntk-400-1-ef', need only log_prob.*'mc' need log_prob and sample"
    y = NUMBERS[:, :1]
    for likelihood, of_likelihood in ((StudentT(), NUMBERS), (OneTarget(), y)):
        for verb, (estimator, call) in VERBS.items():
            with pytest.raises((ConfigurationError, InputError), match=way_out):
                call(build(likelihood, estimator), of_likelihood)
                pytest.fail(f"{verb}: accepted")
    with pytest.raises(InputError, match="(?s)raised AssertionError.*Define reference_targets"):
        build(OneTarget(), "ntk-N-C").estimate(X, y)
    build(OneTarget(), "ntk-4-1-ef").backward(X[:4], y[:4])


def test_anchors_use_outputs_in_the_type_of_the_model() -> None:
    x, y = X.double(), NUMBERS[:, :1].double()
    types: set[torch.dtype] = set()

    class Noted(Curved):
        def hessian(self, f: Tensor) -> Tensor:
            types.add(f.dtype)
            return super().hessian(f).to(f)

    model = network(1).double()
    evidence = Evidence(
        model, Noted(), GaussianPrior(), estimator="ntk-4-rows-anchored", num_data=N, generator=0
    )
    evidence.map_loss(x, y, indices=torch.arange(N))
    for block in evidence.blocks((x, y)).take(2):
        evidence.backward(block)
    assert types == {torch.float64}


@pytest.mark.parametrize("num_outputs", [1, C])
@pytest.mark.parametrize("couples", [False, True])
def test_a_hessian_that_overflows_has_no_off_diagonal_entries(
    num_outputs: int, couples: bool
) -> None:
    class Overflowing(Curved):
        couples_outputs = couples

        def hessian(self, f: Tensor) -> Tensor:
            return super().hessian(f) * torch.inf

    f = torch.zeros(2, num_outputs)
    with pytest.raises(NotFiniteError, match="contains NaN or infinite values"):
        Overflowing().root(f)


def test_derivatives_that_are_not_finite_are_no_difference() -> None:
    """As of a mask whose other branch is infinite."""

    class Censored(Likelihood):
        name, couples_outputs = "censored", False

        def log_prob(self, f: Tensor, y: Tensor) -> Tensor:
            return torch.where(y > 0, (f - f.detach()).sqrt(), -0.5 * (y - f).square()).sum(1)

    with pytest.raises(NotFiniteError, match=r"Hessian of Censored.log_prob .*NaN.*torch.where"):
        build(Censored(), "ntk-4-1").blocks((X, NUMBERS))


def test_errors_about_shapes_show_m_instead_of_the_size_of_a_trial() -> None:
    class OfHessian(Curved):
        def hessian(self, f: Tensor) -> Tensor:
            return f

    class OfVectors(Curved):
        def root(self, f: Tensor, columns: Any = None, kind: str = "subblock") -> Any:
            return RootRows(rows(f, columns)[..., :2])

    data = torch.randn(12, 2), torch.rand(12, C)
    for kind, words in (
        (OfHessian, r"of shape \(m, 3, 3\), got shape \(m, 3\)"),
        (OfVectors, r"vectors of shape \(m, \w, 3\) and a scale.*, got shape \(m, \d, 2\)"),
    ):
        with pytest.raises(ConfigurationError, match=words):
            fit(nn.Linear(2, C), data, likelihood=kind(), progress=False)
