"""Several heads in one likelihood, and missing targets, against dense oracles."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import evigrad
import evigrad.data
from evigrad import Evidence
from evigrad.errors import ConfigurationError, InputError
from evigrad.likelihoods import (
    Bernoulli,
    Categorical,
    Gaussian,
    Joint,
    Likelihood,
    Poisson,
    StudentT,
    Weighted,
)
from evigrad.likelihoods.calls import summed_metrics
from evigrad.measure.metrics import evaluate
from evigrad.posterior.predictive import Predictive
from evigrad.priors import GaussianPrior

N, NAN = 8, float("nan")
X = torch.randn(N, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
Z = torch.randn(N, 2, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
LABELS = torch.tensor([0, 1, 2, 0, 1, 2, 0, 1])


def net(num_outputs: int) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, num_outputs)).double()


def heads() -> Joint:
    return Joint(
        {
            "depth": (2, Gaussian([0.5, 1.5], missing="nan")),
            "kind": (3, Categorical()),
            "seen": (1, Bernoulli(missing="nan")),
        }
    ).double()


def targets(likelihood: Joint, missing: bool) -> Tensor:
    depth, labels, seen = Z.clone(), LABELS.clone(), (Z[:, :1] > 0).double()
    if missing:
        depth[0, 1] = depth[3] = seen[4, 0] = NAN
        labels[3] = labels[5] = -100
    return likelihood.targets({"depth": depth, "kind": labels, "seen": seen})


@pytest.mark.parametrize(
    "likelihood",
    [
        Gaussian(0.5, missing="nan"),
        StudentT(0.5, missing="nan"),
        Bernoulli(missing="nan"),
        Poisson(missing="nan"),
    ],
)
def test_missing_targets_do_not_count(likelihood: Likelihood) -> None:
    f = Z.exp()
    y = likelihood.sample(f, torch.Generator().manual_seed(0))
    alone = [likelihood.log_prob(f[:, d : d + 1], y[:, d : d + 1]) for d in range(2)]
    whole = likelihood.score(f, y)
    y[0, 1] = y[1, 0] = y[2] = NAN
    likelihood.validate(f.shape, y)
    log_prob, score = likelihood.log_prob(f, y), likelihood.score(f, y)
    torch.testing.assert_close(log_prob[0], alone[0][0])
    torch.testing.assert_close(log_prob[1], alone[1][1])
    assert log_prob[2] == 0 and not score[2].any()
    torch.testing.assert_close(log_prob[3:], alone[0][3:] + alone[1][3:])
    torch.testing.assert_close(score, torch.where(y.isnan(), 0.0, whole))
    torch.testing.assert_close(likelihood.weights(y), (~y.isnan()).double())
    weighted = Weighted(likelihood)
    both = weighted.weights(weighted.targets(y, 2 * torch.ones(N)))
    torch.testing.assert_close(both, 2.0 * (~y.isnan()).double())
    assert all(torch.tensor(pair).isfinite().all() for pair in likelihood.metrics(f, y).values())


@pytest.mark.parametrize("kind", [Gaussian, StudentT, Bernoulli, Poisson])
def test_missing_targets_are_errors_unless_asked_for(kind: Any) -> None:
    y = torch.tensor([[1.0, NAN]])
    with pytest.raises(InputError, match=rf'\[0, 1\] is NaN.*{kind.__name__}\(missing="nan"\)'):
        kind().validate((1, 2), y)
    kind(missing="nan").validate((1, 2), y)
    with pytest.raises(InputError, match="not finite"):
        kind(missing="nan").validate((1, 2), torch.tensor([[1.0, torch.inf]]))
    with pytest.raises(ConfigurationError, match="missing must be None or 'nan', got -1"):
        kind(missing=-1)


def test_a_predicted_density_leaves_missing_targets_out() -> None:
    covariance = torch.tensor([[0.5, 0.2], [0.2, 0.7]], dtype=torch.float64).expand(2, 2, 2)
    f, likelihood = Z[:2], Gaussian(0.6, missing="nan").double()
    y = torch.tensor([[0.3, NAN], [NAN, NAN]], dtype=torch.float64)
    both = Predictive(f, covariance, likelihood).log_prob(y)
    alone = Predictive(f[:, :1], covariance[:, :1, :1], likelihood).log_prob(y[:, :1])
    torch.testing.assert_close(both[0], alone[0])
    assert both[1] == 0


def test_the_noise_of_a_head_is_learned_and_each_head_predicts() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(200, 2, generator=generator)
    depth = x[:, :1] + 0.3 * torch.randn(200, 1, generator=generator)
    kind = (x[:, 1] > 0).long()
    depth[:30], kind[30:60] = NAN, -100
    likelihood = Joint({"depth": (1, Gaussian(missing="nan")), "kind": (2, Categorical())})
    y = likelihood.targets({"depth": depth, "kind": kind})
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 3))
    schedule = evigrad.Schedule(epochs=60)
    settings: dict[str, Any] = {"estimator": "full-N-C", "schedule": schedule, "progress": False}
    result = evigrad.fit(model, (x, y), likelihood=likelihood, test=(x, y), **settings)
    assert result.history[-1]["likelihood/depth/noise"] == pytest.approx(0.3, abs=0.08)
    assert result.test_metrics["kind/accuracy"] > 0.9
    assert result.test_metrics["depth/squared_error"] < 0.2
    prediction = result.evidence.posterior((x, y))(x)
    assert prediction["kind"].probabilities.shape == (200, 2)
    std = prediction["depth"].std
    assert bool((std > 0.2).all()) and float(std.mean()) < 0.6
    assert prediction.log_prob(y).isfinite().all()
    with pytest.raises(ConfigurationError, match="no head 'kid'.*depth, kind.*'kind'"):
        prediction["kid"]
    with pytest.raises(ConfigurationError, match="Gaussian has no part 'a'"):
        Predictive(Z, torch.zeros(N, 2, 2), Gaussian())["a"]


def test_metrics_of_heads_and_of_missing_targets() -> None:
    joint, f = heads(), torch.cat([Z, torch.zeros(N, 3), Z[:, :1]], 1)
    y = targets(joint, missing=True)
    y[:, 0] = Z[:, 0] + 2
    y[3, 0] = NAN
    y[:, 1] = NAN
    sums = summed_metrics(joint, f, y)
    parts = sum(value for name, (value, _) in sums.items() if name.endswith("/log_likelihood"))
    assert sums["log_likelihood"] == pytest.approx((parts, N))
    # Two outputs, of which one is observed with an error of 2.
    assert sums["depth/squared_error"] == pytest.approx((2 * (N - 1) * 4.0, N - 1))
    means = evaluate(nn.Identity(), joint, (f, y))
    assert means["depth/squared_error"] == pytest.approx(2 * 4.0)
    for batch_size in (1, 3):
        assert evaluate(nn.Identity(), joint, (f, y), batch_size=batch_size) == pytest.approx(means)
    turned = evaluate(nn.Identity(), joint, (f.flip(0), y.flip(0)), batch_size=2)
    assert turned == pytest.approx(means)
    labels = torch.full((N,), -100)
    y = joint.targets({"depth": Z, "kind": labels, "seen": (Z[:, :1] > 0).double()})
    assert math.isnan(evaluate(nn.Identity(), joint, (f, y))["kind/accuracy"])


def test_a_scaling_leaves_missing_values_out() -> None:
    values = torch.tensor([[1.0, NAN, 5.0], [3.0, 2.0, 5.0], [NAN, NAN, NAN]])
    scaling = evigrad.data.Scaling.of(values)
    torch.testing.assert_close(scaling.mean, torch.tensor([2.0, 2.0, 5.0]))
    torch.testing.assert_close(scaling.std, torch.tensor([1.0, 1.0, 1.0]))
    plain = evigrad.data.Scaling.of(Z)
    torch.testing.assert_close(plain.std, Z.std(0, correction=0))


def test_targets_that_are_all_missing_are_refused() -> None:
    y = torch.full((N, 1), NAN)
    with pytest.raises(InputError, match="All targets are missing"):
        evigrad.fit(net(1).float(), (X.float(), y), likelihood=Gaussian(missing="nan"))


def test_what_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="at least one head"):
        Joint({})
    broken: dict[str, Any] = {"a": Gaussian()}
    with pytest.raises(ConfigurationError, match="'a' must be a number of outputs and a likeli"):
        Joint(broken)
    with pytest.raises(ConfigurationError, match="at least one output, got 0"):
        Joint({"a": (0, Gaussian())})
    with pytest.raises(ConfigurationError, match="letters, digits"):
        Joint({"a.b": (1, Gaussian())})
    joint = heads()
    y = targets(joint, missing=True)
    with pytest.raises(InputError, match=r"need 6 outputs \(depth 2, kind 3, seen 1\), got 5"):
        joint.validate((N, 5), y)
    with pytest.raises(InputError, match="joined in one tensor"):
        joint.validate((N, 6), Z)
    y[0, 2] = 7
    with pytest.raises(InputError, match="Head 'kind': Target 7 at index 0"):
        joint.validate((N, 6), y)
    with pytest.raises(InputError, match="must have the heads depth, kind, seen, got depth"):
        joint.targets({"depth": Z})
    parts = {"depth": Z[:, :1], "kind": LABELS, "seen": Z[:, :1]}
    with pytest.raises(InputError, match="'depth' must have 2 columns"):
        joint.targets(parts)
    parts["depth"] = Z
    with pytest.raises(InputError, match="the same number of targets"):
        joint.targets(parts | {"depth": Z[:3]})
    with pytest.raises(InputError, match="'kind' must be integers.*ignore_index, -100"):
        joint.targets(parts | {"kind": LABELS.double()})
    arrays: Any = {name: part.numpy() for name, part in parts.items()}
    assert torch.equal(joint.targets(arrays), joint.targets(parts))


def test_training_does_not_depend_on_the_order_of_heads() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(60, 2, generator=generator, dtype=torch.float64)
    noise = torch.randn(60, 2, generator=generator, dtype=torch.float64)
    y = {"a": x[:, :1] + 0.02 * noise[:, :1], "b": x[:, 1:] + noise[:, 1:]}
    histories = []
    for names in (("a", "b"), ("b", "a")):
        torch.manual_seed(0)
        model = nn.Linear(2, 2).double()
        if names[0] == "b":
            model.weight.data, model.bias.data = model.weight.data.flip(0), model.bias.data.flip(0)
        noises = {"a": 0.1, "b": 2.0}
        likelihood = Joint({name: (1, Gaussian(noises[name])) for name in names})
        schedule = evigrad.Schedule(epochs=6, batch_size=20, burn_in=2, every=2, steps=2)
        result = evigrad.fit(
            model,
            (x, likelihood.targets(y)),
            likelihood=likelihood,
            prior="scalar",
            estimator="full-N-C",
            schedule=schedule,
            progress=False,
        )
        history = result.history[-1]
        histories.append([history["log_evidence"], history["likelihood/a/noise"]])
    assert histories[0] == pytest.approx(histories[1], rel=1e-6)


def test_weighted_heads() -> None:
    inner = Weighted(Gaussian(0.5))
    joint = Joint({"d": (1, inner), "k": (3, Weighted(Categorical()))})
    kinds = joint.heads["k"]
    assert isinstance(kinds, Weighted)
    weights = torch.tensor([1.0, 0.0, 2.0, 1.0])
    d, k = torch.tensor([[3.0], [4.0], [0.5], [1.0]]), torch.tensor([2, 1, 0, 2])
    y = joint.targets({"d": inner.targets(d, weights), "k": kinds.targets(k, weights.flip(0))})
    f = torch.randn(4, 4, generator=torch.Generator().manual_seed(0))
    joint.validate(f.shape, y)
    of_d = weights * Gaussian(0.5).log_prob(f[:, :1], d)
    of_k = weights.flip(0) * Categorical().log_prob(f[:, 1:], k)
    torch.testing.assert_close(joint.log_prob(f, y), of_d + of_k)
    expected = torch.cat([weights[:, None], weights.flip(0)[:, None].expand(-1, 3)], 1)
    torch.testing.assert_close(joint.weights(y), expected.double())
    prediction = Predictive(f, torch.zeros(4, 4, 4), joint)
    torch.testing.assert_close(prediction["d"].std, torch.full((4, 1), 0.5))
    torch.testing.assert_close(prediction["k"].probabilities, f[:, 1:].softmax(1))
    for part in ("std", "mean", "probabilities"):
        with pytest.raises(ConfigurationError, match=r"heads: d, k. .* prediction\['d'\]"):
            getattr(prediction, part)


def test_any_name_is_a_head() -> None:
    for name in ("type", "values", "train", "double"):
        joint = Joint({name: (1, Gaussian(0.5))})
        assert joint.reported() == {f"{name}/noise": 0.5}
        assert list(joint.state_dict()) == [f"heads.{name}.log_noise"]


def test_fractions_are_no_labels() -> None:
    for likelihood, y in (
        (Joint({"k": (3, Categorical())}), torch.tensor([[0.9], [NAN]])),
        (Weighted(Categorical()), torch.tensor([[0.9, 1.0], [1.0, 1.0]])),
        (Weighted(Categorical()), torch.tensor([[NAN, 1.0], [1.0, 1.0]])),
    ):
        with pytest.raises(InputError, match="is not a label"):
            likelihood.validate((2, 3), y.double())


def test_a_model_that_returns_the_heads_by_name() -> None:
    class Heads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.depth, self.kind = nn.Linear(3, 1), nn.Linear(3, 2)

        def forward(self, x: Tensor) -> dict[str, Tensor]:
            return {"kind": self.kind(x), "depth": self.depth(x)}

    joint = Joint({"depth": (1, Gaussian()), "kind": (2, Categorical())})
    y = joint.targets({"depth": Z[:, :1], "kind": LABELS % 2})
    model, names = Heads().double(), ["depth", "kind"]
    f = evigrad.Outputs(model, output=names)(X)
    torch.testing.assert_close(f, torch.cat([model.depth(X), model.kind(X)], 1))
    prior = GaussianPrior("layerwise")
    evidence = Evidence(evigrad.Outputs(model, output=names), joint, prior, num_data=N)
    assert evidence.map_loss(X, y).isfinite()
    with pytest.raises(InputError, match=r"output=\['depth', 'kind'\]"):
        Evidence(model, joint, GaussianPrior("layerwise"), num_data=N).map_loss(X, y)
