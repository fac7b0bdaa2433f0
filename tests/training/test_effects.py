"""Every setting changes a run, or it is refused with words on what to use instead.

A row of ``IDLE`` is a setting without effect: the run that has no use for it, two values, and words
of the error. The two values train the same network if the check is left out.
"""

import warnings
from collections.abc import Callable
from dataclasses import fields, replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from training.small_runs import without_estimator

import evigrad
from evigrad import Anchoring, Evidence, Learner, Memory, Optimization, Schedule
from evigrad.errors import ConfigurationError, EvigradWarning
from evigrad.hosted import HostedLearner
from evigrad.likelihoods import Categorical, Gaussian
from evigrad.priors import GaussianPrior, NormalHyperprior
from evigrad.training import Settings, fit, prepare, tune
from evigrad.training.settings import Laplace, grouped

N = 24
X = torch.randn(N, 3, generator=torch.Generator().manual_seed(0))
LABELS, NUMBERS = torch.arange(N) % 3, X[:, :1].sin()
SMALL: dict[str, Any] = {
    "estimator": "ntk-6-1",
    "epochs": 3,
    "batch_size": 12,
    "burn_in": 1,
    "every": 1,
    "steps": 2,
    "lr": 0.02,
}


class Scaled(nn.Module):
    def __init__(self, num_outputs: int) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.linear = nn.Linear(3, num_outputs)
        self.scale = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.scale * x)


def sgd(weights: Any) -> Any:
    return torch.optim.SGD(weights.values(), lr=0.1)


# Runs, by what differs from SMALL. Functions make objects that a run binds to its network.
PLAIN = without_estimator(SMALL)
FIXED = {"prior": lambda: GaussianPrior(learnable=False)}
MODEL = {"hyperparameters": ["scale"]}
OF_MODEL = {"hyper_every": 2, "hyper_steps": 1}
RUNS: dict[str, dict[str, Any]] = {
    "map": PLAIN,
    "map, noise": PLAIN | {"likelihood": "gaussian", "noise_on_loss": True},
    "ntk": SMALL,
    "adam": SMALL | {"prior_update": "adam"},
    "fixed noise": SMALL | {"likelihood": lambda: Gaussian(0.3, learnable=False)},
    "fixed prior": SMALL | FIXED | MODEL,
    "only noise": SMALL | FIXED | {"likelihood": "gaussian"},
    "only model": PLAIN | {"estimator": "ntk-6-1"} | FIXED | MODEL | OF_MODEL,
    "no burn-in": SMALL | {"burn_in": 0},
    "means": SMALL | {"prior": lambda: GaussianPrior(mean="initial")},
    "noise": SMALL | {"likelihood": "gaussian"},
    "full batch": SMALL | {"estimator": "ntk-N-C"},
    "all outputs": SMALL | {"estimator": "kfac-6-C"},
    "empirical": SMALL | {"estimator": "diag-6-1-ef"},
    "sampled": SMALL | {"estimator": "diag-6-1-mc"},
    "own optimizer": {n: v for n, v in SMALL.items() if n != "lr"} | {"optimizer": sgd},
    "map, own optimizer": {n: v for n, v in PLAIN.items() if n != "lr"} | {"optimizer": sgd},
}
_ROUNDS = {
    "burn_in": (0, 2),
    "every": (1, 2),
    "steps": (1, 3),
    "hyper_every": (1, 2),
    "hyper_steps": (1, 3),
    "prior_blocks": (1, 2),
    "hyper_lr": (0.1, 0.3),
    "hyper_lr_min": (0.01, 0.03),
}
_WITHOUT: dict[str, tuple[tuple[Any, Any], str]] = {
    **{name: (values, "Set an estimator") for name, values in _ROUNDS.items()},
    "root": (("fisher", "eigen"), "Set an estimator"),
    "parameter_partition": (("module", {"all": ["linear", "scale"]}), "Set an estimator"),
    "log_det_weight": ((0.5, 2.0), "Set an estimator"),
    "prior_update": (("adam", "fixed_point"), "Set precision"),
    "start_decay": ((1e-4, 10.0), "Set precision"),
    "anchoring": ((Anchoring(share=0.5), Anchoring(share=0.7)), "Use an estimator with anchors"),
}
_RATES = {"prior_lr": (0.2, 0.3), "prior_lr_min": (0.02, 0.03)}
_DECAYS = (0.1, 0.5)
# The run, the setting, two values, and words of the error.
IDLE: list[tuple[str, str, tuple[Any, Any], str]] = [
    *(("map", name, *row) for name, row in _WITHOUT.items()),
    *(("map", name, values, "Set an estimator") for name, values in _RATES.items()),
    *(("map, noise", name, values, "Set lr") for name, values in _RATES.items()),
    *(
        ("ntk", name, values, "Name such parameters in hyperparameters")
        for name, values in _ROUNDS.items()
        if name.startswith("hyper_")
    ),
    *(("ntk", name, values, "Set prior_update='adam'") for name, values in _RATES.items()),
    *(("fixed noise", name, v, "Set prior_update='adam'") for name, v in _RATES.items()),
    *(("fixed prior", name, v, "Set hyper_lr") for name, v in _RATES.items()),
    ("ntk", "precision", (0.5, 5.0), "Set start_decay"),
    (
        "ntk",
        "prior",
        (partial(GaussianPrior, "layerwise", 2.0), partial(GaussianPrior, "layerwise", 3.0)),
        "decay",
    ),
    ("ntk", "parameter_partition", ("module", {"all": ["linear", "scale"]}), "blockdiag"),
    ("ntk", "start_decay", ((0.1, 0.5), (0.1, 0.9)), "too few rounds"),
    ("adam", "start_decay", _DECAYS, "Set precision, or prior_update='fixed_point'"),
    ("fixed prior", "start_decay", _DECAYS, "Set the precision of the prior"),
    ("only noise", "prior_update", ("adam", None), "learnable=True"),
    ("no burn-in", "start_decay", _DECAYS, "Set burn_in or precision"),
    ("means", "start_decay", _DECAYS, "prior mean zero"),
    ("only model", "every", (2, 3), "Set only hyper_every"),
    ("only model", "steps", (3, 4), "Set only hyper_steps"),
    ("full batch", "prior_blocks", (1, 3), "only one block"),
    ("full batch", "root", ("fisher", "subblock"), "all outputs"),
    ("all outputs", "root", ("fisher", "subblock"), "all outputs"),
    ("empirical", "root", ("fisher", "eigen"), "scores of labels"),
    ("sampled", "root", ("fisher", "eigen"), "scores of labels"),
    ("noise", "root", ("fisher", "eigen"), "does not couple outputs"),
    ("own optimizer", "lr", (0.01, 0.1), "optimizer's function"),
    ("map, own optimizer", "lr", (0.01, 0.1), "optimizer's function"),
]
# Pairs that are equal only up to rounding, or that Evidence itself refuses.
ROUNDED = {("full batch", "root"), ("all outputs", "root")}
REFUSED_BY_EVIDENCE = {"parameter_partition", "anchoring"}


def made(settings: dict[str, Any]) -> tuple[nn.Module, tuple[Tensor, Tensor], Settings]:
    settings = {
        n: v() if n in ("prior", "likelihood") and callable(v) else v for n, v in settings.items()
    }
    likelihood = settings.setdefault("likelihood", "categorical")
    is_class = likelihood == "categorical"
    data = (X, LABELS if is_class else NUMBERS)
    return Scaled(3 if is_class else 1), data, Settings(**grouped(settings))


def trained(settings: dict[str, Any]) -> Tensor:
    """All that a run ends with, if nothing checks its settings."""
    model, data, all_settings = made(settings)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", EvigradWarning)
        result = prepare(model, data, all_settings).train(progress=False)
    parts = [*model.parameters(), *result.evidence.hyperparameters().values()]
    return torch.cat([part.detach().flatten() for part in parts])


@pytest.mark.parametrize(("run", "name", "values", "words"), IDLE)
def test_a_setting_without_effect_is_refused(run, name, values, words):
    for value in values:
        model, data, settings = made(RUNS[run] | {name: value})
        before = [w.detach().clone() for w in model.parameters()]
        if value is None:  # the default
            continue
        with pytest.raises(ConfigurationError, match="has no effect") as caught:
            prepare(model, data, settings, strict=True)
        assert words in str(caught.value), str(caught.value)
        shown = "precision" if name == "prior" else name
        assert str(caught.value).startswith(shown)
        assert all(torch.equal(w, b) for w, b in zip(model.parameters(), before, strict=True))


@pytest.mark.each(1, "run")
@pytest.mark.parametrize(
    ("run", "name", "values"), [row[:3] for row in IDLE if row[1] not in REFUSED_BY_EVIDENCE]
)
def test_without_the_check_both_values_train_the_same_network(run, name, values):
    one, other = (trained(RUNS[run] | {name: value}) for value in values)
    if (run, name) in ROUNDED:
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    else:
        assert torch.equal(one, other)


# Settings that a run uses, though they look like rows above.
USED: list[tuple[str, dict[str, Any]]] = [
    ("map", {"precision": 3.0, "hyperparameters": ["scale"], "temperature": 0.5}),
    ("map", {"micro_batch": 5, "gram_dtype": "float32", "sharing": "reduce"}),  # of the posterior
    ("map, noise", {"bracket_every": 3, "epoch_size": 12}),
    ("ntk", {"root": "fisher", "prior_blocks": 2, "precision": 1.0, "start_decay": 0.1}),
    ("ntk", {"prior": lambda: GaussianPrior(precision=2.0, learnable={"scale": False})}),
    ("adam", {"precision": 3.0, "prior_lr": 0.2}),
    ("no burn-in", {"precision": 3.0}),
    ("noise", {"prior_lr": 0.2, "start_decay": (0.1, 0.2), "epochs": 8}),
    ("only noise", {"prior_lr": 0.2}),
    ("fixed prior", {"hyper_lr": 0.1}),
    ("full batch", {"every": 2}),
    ("own optimizer", {"lr_min": 0.01}),
]


def test_a_setting_with_an_effect_is_not_refused():
    for run, changes in USED:
        model, data, settings = made(RUNS[run] | changes)
        prepare(model, data, settings, strict=True)


def test_defaults_are_never_refused():
    for run in RUNS:
        settings = Settings()
        defaults = {
            field.name: field.default
            for group in (
                settings.laplace,
                settings.schedule,
                settings.optimization,
                settings.memory,
            )
            for field in fields(group)
        }
        model, data, settings = made({**defaults, **RUNS[run]})
        prepare(model, data, settings, strict=True)


def test_every_field_is_in_the_table_or_always_used():
    named = {name for _, name, _, _ in IDLE}
    used = {"epochs", "max_epochs", "epoch_size", "batch_size", "eval_every", "bracket_every"}
    used |= {"optimizer", "lr_min", "noise_on_loss", "temperature", "sharing", "checkpoint_every"}
    every = {field.name for kind in (Laplace, Schedule, Optimization) for field in fields(kind)}
    assert every - named == used


@pytest.mark.parametrize(
    "settings",
    [
        {"schedule": Schedule(checkpoint_every=2)},
        {"prior": GaussianPrior(hyperprior=NormalHyperprior()), "estimator": None},
        {"estimator": None, "optimization": Optimization(start_decay=10.0)},
    ],
)
def test_fit_refuses_at_once(settings):
    with pytest.raises(ConfigurationError, match="has no effect with"):
        fit(Scaled(3), (X, LABELS), progress=False, **settings)


CALLERS: dict[str, Callable[[Any, Any], object]] = {
    "Learner": lambda schedule, optimization: Learner(
        Evidence(Scaled(3), Categorical(), GaussianPrior(), estimator="ntk-6-1", num_data=N),
        (X, LABELS),
        replace(schedule, epochs=4),
        optimization,
    ),
    "callback": lambda schedule, optimization: HostedLearner(
        Settings(schedule=schedule, optimization=optimization), "nll"
    ),
}


@pytest.mark.parametrize("caller", CALLERS)
def test_settings_of_fit_are_refused_where_another_loop_trains(caller):
    for name, value in [
        *(("max_epochs", 9), ("epoch_size", 5), ("batch_size", 7), ("eval_every", 3)),
        *(("bracket_every", 2), ("checkpoint_every", 2), ("optimizer", "sgd"), ("lr", 0.1)),
        *(("lr_min", 0.001), ("start_decay", (0.1, 0.2))),
    ]:
        settings = Settings(**grouped({name: value}))
        with pytest.raises(ConfigurationError, match=f"^{name} has no effect"):
            CALLERS[caller](settings.schedule, settings.optimization)
        CALLERS[caller](Schedule(), Optimization(start_decay=0.1))


@pytest.mark.parametrize(("name", "value"), [("lr", 0.1), ("optimizer", "sgd"), ("start_decay", 1)])
def test_tune_refuses_settings_of_training(name, value):
    with pytest.raises(ConfigurationError, match=f"^{name} has no effect in evigrad.tune"):
        tune(Scaled(3), (X, LABELS), optimization=Optimization(**{name: value}))


def test_priors_and_starts_that_repeat_or_fix_everything():
    with pytest.raises(ConfigurationError, match="hyperprior has no effect on fixed precisions"):
        GaussianPrior(learnable=False, hyperprior=NormalHyperprior())
    with pytest.raises(ConfigurationError, match="must not contain a value twice"):
        Optimization(start_decay=(0.1, 0.1))


def test_a_custom_optimizer_ends_at_lr_min():
    schedule = Schedule(epochs=4)
    result = fit(
        Scaled(3),
        (X, LABELS),
        estimator=None,
        schedule=schedule,
        optimization=Optimization(optimizer=sgd, lr_min=0.02),
        progress=False,
    )
    rates = [float(row["lr"] or 0) for row in result.history]
    cosines = [0.06 + 0.04 * torch.cos(torch.tensor(torch.pi * e / 4)).item() for e in range(4)]
    assert rates == pytest.approx(cosines)


def test_memory_without_an_estimator_is_for_the_posterior():
    results = [
        evigrad.fit(
            Scaled(3),
            (X, LABELS),
            estimator=None,
            schedule=Schedule(epochs=1),
            memory=Memory(gram_dtype=dtype),
            progress=False,
        )
        for dtype in ("float32", "float64")
    ]
    one, other = (r.evidence.posterior((X, LABELS))(X).variance for r in results)
    assert not torch.equal(one, other)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({}, "Set start_decay, the weight decay of the burn-in, or prior_update='adam', or remove"),
        ({"mean": "initial"}, r"by a start, got 2.0. Set prior_update='adam', or remove precision"),
        (
            {
                "structure": {"free": "scale", "decayed": "*"},
                "precision": {"free": 1e-3, "decayed": 2.0},
                "learnable": {"free": False},
            },
            "got 2.0. .* or use 1.0 for the learned groups 'decayed'.$",
        ),
    ],
)
def test_the_error_about_a_precision_names_settings_that_work(settings, words):
    run = SMALL | {"prior": lambda: GaussianPrior(**{"precision": 2.0, **settings})}
    model, data, all_settings = made(run)
    with pytest.raises(ConfigurationError, match=words):
        prepare(model, data, all_settings, strict=True)
    if settings.get("structure"):
        settings = {**settings, "precision": {"free": 1e-3, "decayed": 1.0}}
        changes = {"prior": lambda: GaussianPrior(**settings)}
    else:
        changes = {"prior_update": "adam"}
    model, data, all_settings = made(run | changes)
    prepare(model, data, all_settings, strict=True)
