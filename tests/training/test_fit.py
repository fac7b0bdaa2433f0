import json
import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset
from training.small_runs import without_estimator

from evigrad.errors import ConfigurationError, EvigradError, EvigradWarning, InputError
from evigrad.likelihoods import Gaussian
from evigrad.measure import evaluate_evidence
from evigrad.priors import GaussianPrior
from evigrad.training import fit, read_metrics
from evigrad.training.plan import BURN_IN_DECAY
from evigrad.training.settings import grouped
from evigrad.training.trainer import is_evaluated

SMALL: dict[str, Any] = {
    "estimator": "ntk-20-1",
    "epochs": 6,
    "batch_size": 20,
    "burn_in": 2,
    "every": 2,
    "steps": 3,
    "lr": 0.02,
    "progress": False,
}


def small(**changes: Any) -> dict[str, Any]:
    settings = {**SMALL, **changes}
    return settings if settings["estimator"] else without_estimator(settings)


def log_precision_of(result):
    return result.evidence.prior.log_precision.detach()


def state_of(result):
    weights = [w.detach().clone() for w in result.model.parameters()]
    return torch.cat([*(w.flatten() for w in weights), log_precision_of(result)])


def test_burn_in_rounds_and_steps(blobs, make_net):
    train, test = blobs
    result = fit(make_net(), train, test=test, **grouped(dict(**SMALL, eval_every=0)))
    assert [row["hyper_steps"] for row in result.history] == [0, 3, 3, 6, 6, 9]
    learned = [row["log_evidence"] is not None for row in result.history]
    assert learned == [False, True, False, True, False, True]
    first = [row["precision/0.weight"] for row in result.history]
    assert first[0] == pytest.approx(0.01 * len(train[0]))  # where learning starts
    assert first[1] != first[0]
    assert first[2] == first[1]
    assert len(set(first)) == 4
    assert result.estimator == "ntk-20-1"
    assert result.history[-1]["test_accuracy"] == result.test_metrics["accuracy"]
    assert result.history[-2]["test_accuracy"] is None
    assert not result.model.training


def test_a_result_is_shown_in_a_line_and_evaluated_during_training(blobs, make_net, tmp_path):
    train, test = blobs
    result = fit(make_net(), train, test=test, run_dir=tmp_path / "run", **grouped(SMALL))
    shown = repr(result)
    assert len(shown) < 300 and "\n" not in shown
    for words in ("ntk-20-1", "6 epochs", "train accuracy", "test log_likelihood", "run_dir"):
        assert words in shown
    assert None not in [row["test_accuracy"] for row in result.history]


def test_map_is_the_same_loop_without_hyperparameter_steps(blobs, make_net):
    settings = small(estimator=None)
    start = BURN_IN_DECAY * len(blobs[0][0])
    result = fit(make_net(), blobs[0], precision=start, **grouped(settings))
    assert result.estimator is None
    assert torch.equal(log_precision_of(result), torch.full((4,), math.log(start)))
    assert all(row["hyper_steps"] == 0 for row in result.history)
    # Up to the first round both runs are the same run.
    learned = fit(make_net(), blobs[0], **grouped(SMALL))
    assert [row["loss"] for row in learned.history[:2]] == [
        row["loss"] for row in result.history[:2]
    ]
    assert learned.history[3]["loss"] != result.history[3]["loss"]


def test_map_runs_describe_their_weights(blobs, make_net):
    result = fit(make_net(), blobs[0], **grouped(small(estimator=None, epochs=1)))
    reports = result.evidence.describe()
    assert [report.name for report in reports] == list(result.evidence.weights())
    assert reports == result.evidence.describe(blobs[0][0])


def test_map_leaves_a_learnable_noise_alone(blobs, make_net):
    x = blobs[0][0]
    settings = small(estimator=None)
    likelihood = Gaussian(noise=0.7)
    result = fit(make_net(), (x, x[:, :3].clone()), likelihood=likelihood, **grouped(settings))
    assert [row["noise"] for row in result.history] == [pytest.approx(0.7)] * 6
    learned = fit(
        make_net(), (x, x[:, :3].clone()), likelihood=Gaussian(noise=0.7), **grouped(SMALL)
    )
    assert learned.history[-1]["noise"] != pytest.approx(0.7)
    assert "squared_error" in learned.train_metrics


def test_the_seed_decides_everything(blobs, make_net):
    train, test = blobs
    runs = [
        fit(
            make_net(dropout=0.3),
            train,
            test=test,
            seed=seed,
            **grouped(dict(**SMALL, eval_every=every)),
        )
        for seed, every in ((3, 1), (3, 0), (4, 0))
    ]
    # Looking at the test set more often changes nothing.
    assert torch.equal(state_of(runs[0]), state_of(runs[1]))
    assert runs[0].test_metrics == runs[1].test_metrics
    assert not torch.allclose(state_of(runs[1]), state_of(runs[2]))


def test_dropout_is_seeded_by_the_run_not_by_the_global_state(blobs, make_net):
    settings = small(estimator=None, batch_size=60)  # one batch: order is no difference
    torch.manual_seed(1)
    first = fit(make_net(dropout=0.5), blobs[0], seed=0, **grouped(settings))
    torch.manual_seed(2)
    second = fit(make_net(dropout=0.5), blobs[0], seed=0, **grouped(settings))
    other = fit(make_net(dropout=0.5), blobs[0], seed=1, **grouped(settings))
    assert torch.equal(state_of(first), state_of(second))
    assert not torch.allclose(state_of(first), state_of(other))


def test_the_global_random_state_stays(blobs, make_net):
    net = make_net(dropout=0.5)
    before, numpys = torch.get_rng_state(), np.random.get_state()
    fit(net, blobs[0], test=blobs[1], **grouped(SMALL))
    assert torch.equal(torch.get_rng_state(), before)
    # Any draw would move the position in the stream, which the text shows.
    assert str(np.random.get_state()) == str(numpys)


def test_the_test_set_changes_nothing(blobs, make_net):
    train, (x, y) = blobs
    with_test = fit(make_net(), train, test=(x, y.flip(0)), **grouped(dict(**SMALL, eval_every=1)))
    without = fit(make_net(), train, **grouped(SMALL))
    assert torch.equal(state_of(with_test), state_of(without))
    assert without.test_metrics == {}
    assert without.history[-1]["test_log_likelihood"] is None


def test_frozen_layers_stay(blobs, make_net):
    net = make_net()
    net[0].weight.requires_grad_(False)
    before = net[0].weight.clone()
    result = fit(net, blobs[0], **grouped(SMALL))
    assert torch.equal(net[0].weight, before)
    assert "precision/0.weight" not in result.history[0]


class Gated(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate = nn.Parameter(torch.tensor([0.5, 0.5, 0.5, 0.5]))
        self.scale = nn.Parameter(torch.tensor(1.0))
        self.linear = nn.Linear(4, 3)

    def forward(self, x):
        return self.scale * self.linear(self.gate * x)


def test_hyperparameters_of_the_model_are_learned_by_the_evidence_alone(blobs):
    settings = small(hyperparameters=["gate", "scale"])
    net = Gated()
    rows = []
    result = fit(net, blobs[0], callbacks=[rows.append], **grouped(settings))
    assert rows == result.history
    assert rows[0]["model/scale"] == 1.0
    assert rows[0]["model/gate"] == pytest.approx(1.0)  # its norm
    assert rows[-1]["model/gate"] != pytest.approx(1.0)
    assert rows[-1]["model/scale"] != pytest.approx(1.0)
    names = settings["hyperparameters"]
    fixed = fit(Gated(), blobs[0], **grouped(small(estimator=None, hyperparameters=names)))
    assert fixed.history[-1]["model/gate"] == pytest.approx(1.0)


def test_map_keeps_the_usual_weight_decay_where_no_precision_is_named(blobs, make_net):
    train, _ = blobs
    fixed = fit(make_net(), train, **grouped(small(estimator=None, epochs=1)))
    assert fixed.history[-1]["precision/0.weight"] == pytest.approx(5e-4 * len(train[0]))


def test_one_precision_for_each_group_and_the_mean_of_a_diagonal_prior(blobs, make_net):
    scalar = fit(make_net(), blobs[0], prior="scalar", **grouped(SMALL))
    assert [name for name in scalar.history[0] if name.startswith("precision/")] == [
        "precision/all"
    ]
    options = small(prior_update="adam")
    diagonal = fit(make_net(), blobs[0], prior="diagonal", precision=3.0, **grouped(options))
    names = [name for name in diagonal.history[0] if name.startswith("precision/")]
    assert len(names) == 4
    assert diagonal.history[0][names[0]] == pytest.approx(3.0)
    last = diagonal.evidence.prior.precisions()["0.weight"].detach()
    assert diagonal.history[-1][names[0]] == pytest.approx(float(last.log().mean().exp()), rel=1e-5)
    assert last.std() > 0


@pytest.mark.parametrize("mean", ["initial", "zero"])
def test_a_huge_precision_leaves_the_weights_at_the_mean(blobs, make_net, mean):
    model = make_net()
    start = [w.detach().clone() for w in model.parameters()]
    prior = GaussianPrior(precision=1e6, mean={"0": "initial", "3": mean}, learnable=False)
    fit(model, blobs[0], prior=prior, **grouped(small(estimator=None, epochs=40, lr=0.05)))
    means = [w if i < 2 or mean == "initial" else 0 * w for i, w in enumerate(start)]
    assert all((w - m).abs().max() < 1e-2 for w, m in zip(model.parameters(), means, strict=True))


def test_the_run_directory(blobs, make_net, tmp_path, capsys):
    result = fit(make_net(), blobs[0], test=blobs[1], run_dir=tmp_path / "run", **grouped(SMALL))
    assert result.run_dir == tmp_path / "run"
    assert {p.name for p in (tmp_path / "run").iterdir()} == {
        "config.json",
        "metrics.csv",
        "checkpoint.pt",
    }
    rows = read_metrics(tmp_path / "run" / "metrics.csv")
    assert [row["epoch"] for row in rows] == [1, 2, 3, 4, 5, 6]
    assert list(rows[0]) == list(result.history[0])
    for row, history_row in zip(rows, result.history, strict=True):
        for name, value in history_row.items():
            assert row[name] == (None if value is None else pytest.approx(value, rel=1e-5))
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    assert config["estimator"] == "ntk-20-1"
    assert config["learned"] == ["prior.log_precision"]
    assert config["prior_mean"] == "zero"
    assert config["num_weights"] == 4 * 8 + 8 + 8 * 3 + 3
    capsys.readouterr()
    shown = small(progress=True)
    again = fit(make_net(), blobs[0], run_dir=tmp_path / "run", **grouped(shown))
    assert again.run_dir == tmp_path / "run-2"
    said = " ".join(capsys.readouterr().err.split())
    assert f"is not empty: this run writes to {again.run_dir}" in said


def test_how_an_estimate_computes_changes_no_result_and_is_recorded(blobs, make_net, tmp_path):
    plain = fit(make_net(), blobs[0], **grouped(SMALL))
    automatic = fit(
        make_net(),
        blobs[0],
        run_dir=tmp_path / "run",
        **grouped(dict(**SMALL, micro_batch="auto", memory_budget="2 kB", rows_device="cpu")),
    )
    torch.testing.assert_close(state_of(automatic), state_of(plain), rtol=1e-3, atol=1e-4)
    chosen = automatic.evidence.state_dict()["micro_batches"]
    (first,) = [size for words, size in chosen.items() if words.startswith("first pass")]
    assert 1 <= first < 20
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    assert (config["micro_batch"], config["memory_budget"]) == ("auto", "2 kB")
    assert (config["rows_device"], config["autocast"]) == ("cpu", None)
    assert (config["prior_update"], config["prior_blocks"]) == ("fixed_point", None)
    state = torch.load(tmp_path / "run" / "checkpoint.pt", weights_only=True)
    assert state["evidence"]["micro_batches"] == chosen


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", ["rows_dtype", "autocast"])
def test_types_by_name_and_as_types(blobs, make_net, tmp_path, name):
    settings: dict[str, Any] = small(micro_batch=7)  # of one micro-batch no rows are kept
    kinds: list[Any] = ["bfloat16", torch.bfloat16]
    runs = [
        fit(make_net(), blobs[0], run_dir=tmp_path / "run", **grouped({**settings, name: dtype}))
        for dtype in kinds
    ]
    assert torch.equal(state_of(runs[0]), state_of(runs[1]))
    assert not torch.equal(
        state_of(runs[0]), state_of(fit(make_net(), blobs[0], **grouped(settings)))
    )
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    assert config[name] == "bfloat16"


def test_the_checkpoint_holds_all_that_is_needed(blobs, make_net, tmp_path):
    settings = small(prior_update="adam")
    result = fit(make_net(), blobs[0], run_dir=tmp_path / "run", **grouped(settings))
    state = torch.load(tmp_path / "run" / "checkpoint.pt", weights_only=True)
    assert (state["epoch"], state["hyper_steps"]) == (6, [9])
    net = make_net(seed=9)
    net.load_state_dict(state["model"])
    x = blobs[1][0]
    assert torch.equal(net.eval()(x), result.model(x))
    assert torch.equal(state["evidence"]["prior"]["log_precision"], log_precision_of(result))
    assert state["weight_optimizer"]["state"]
    assert state["hyper_optimizer"]["state"]


def test_metrics_are_kept_when_training_fails(blobs, make_net, tmp_path):
    class Stop(Exception):
        pass

    def stop(row):
        on_disk = read_metrics(tmp_path / "run" / "metrics.csv")
        assert len(on_disk) == row["epoch"]
        if row["epoch"] == 3:
            raise Stop

    with pytest.raises(Stop):
        fit(make_net(), blobs[0], run_dir=tmp_path / "run", callbacks=[stop], **grouped(SMALL))
    assert len(read_metrics(tmp_path / "run" / "metrics.csv")) == 3


def test_divergence_says_where_the_metrics_are(blobs, make_net, tmp_path):
    net = make_net()

    def break_it(row):
        if row["epoch"] == 2:
            net[0].weight.data.fill_(float("nan"))

    words = r"diverged in epoch 3 of 6.*The metrics up to epoch 2 are in .*metrics\.csv"
    with pytest.raises(EvigradError, match=words):
        fit(net, blobs[0], run_dir=tmp_path / "run", callbacks=[break_it], **grouped(SMALL))
    assert len(read_metrics(tmp_path / "run" / "metrics.csv")) == 2


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"estimator": "ntk-20"}, ConfigurationError, "OUTPUTS is missing"),
        ({"estimator": "nkt-20-1"}, ConfigurationError, "Did you mean 'ntk-20-1'"),
        ({"estimator": "ntk-61-1"}, ConfigurationError, "num_data is 60"),
        ({"estimator": "ntk-20-4"}, ConfigurationError, "4"),
        ({"likelihood": "categoric"}, ConfigurationError, "Did you mean 'categorical'"),
        ({"prior": "layer"}, ConfigurationError, "layerwise"),
        ({"prior": GaussianPrior(), "precision": 2.0}, ConfigurationError, "precision"),
        (
            {"prior": GaussianPrior(learnable=False)},
            ConfigurationError,
            "There is nothing to learn",
        ),
        ({"hyperparameters": ["gate"]}, ConfigurationError, "gate"),
        ({"optimizer": "lbfgs"}, ConfigurationError, "adam, sgd"),
        ({"optimizer": torch.optim.Adam}, ConfigurationError, "lambda weights: torch.optim.Adam"),
        ({"autocast": "int8"}, ConfigurationError, "autocast must be one of bfloat16"),
        ({"memory_budget": "1GiB"}, ConfigurationError, "micro_batch='auto'"),
        ({"micro_batch": "all"}, ConfigurationError, "micro_batch"),
        ({"prior_update": "newton"}, ConfigurationError, "adam, fixed_point"),
        ({"lr": 0.0}, ConfigurationError, "lr"),
        ({"likelihood": "gaussian"}, InputError, "argets"),
    ],
)
def test_wrong_settings_fail_before_anything_is_written(
    blobs, make_net, tmp_path, changes, error, words
):
    net = make_net()
    before = [w.clone() for w in net.parameters()]
    with pytest.raises(error, match=words):
        fit(net, blobs[0], run_dir=tmp_path / "run", **grouped(small(**changes)))
    assert not (tmp_path / "run").exists()
    assert all(torch.equal(w, b) for w, b in zip(net.parameters(), before, strict=True))


@pytest.mark.each(1)
@pytest.mark.parametrize("part", ["train", "test"])
@pytest.mark.parametrize("estimator", ["ntk-20-1", None])
def test_wrong_data_fail_before_the_first_step(blobs, make_net, tmp_path, part, estimator):
    (x, y), test = blobs
    far = y.clone()
    far[-1] = 3
    dirty = x.clone()
    dirty[-1, 0] = float("nan")
    for wrong, words in (((x, far), "label"), ((dirty, y), "NaN"), ((x[:0], y[:0]), "empty")):
        data = {"train": (x, y), "test": test} | {part: wrong}
        settings = small(estimator=estimator)
        with pytest.raises(InputError, match=words):
            fit(
                make_net(),
                data["train"],
                test=data["test"],
                run_dir=tmp_path / "r",
                **grouped(settings),
            )
    assert not (tmp_path / "r").exists()


def test_outputs_that_are_probabilities_already(blobs, make_net):
    with pytest.warns(EvigradWarning, match="are probabilities.*needs logits") as caught:
        fit(nn.Sequential(make_net(), nn.Softmax(1)), blobs[0], test=blobs[1], **grouped(SMALL))
    about_outputs = [one for one in caught if "has not converged" not in str(one.message)]
    assert len(about_outputs) == 1
    fit(
        nn.Sequential(make_net(), nn.LogSoftmax(1)), blobs[0], **grouped(SMALL)
    )  # warnings are errors


def test_any_form_of_the_data(blobs, make_net):
    x, y = blobs[0]
    pair = fit(make_net(), (x, y), **grouped(SMALL))
    for data in (TensorDataset(x, y), [(a, int(b)) for a, b in zip(x, y, strict=True)]):
        assert torch.equal(state_of(fit(make_net(), data, **grouped(SMALL))), state_of(pair))


@pytest.mark.one_in(2)
@pytest.mark.parametrize("precision", [1e-3, 1e3])
def test_learning_raises_the_log_evidence(blobs, make_net, precision):
    # From a precision that is far too small and one that is far too large.
    rounds = {"every": 1, "steps": 10, "burn_in": 1, "prior_lr": 0.3, "prior_update": "adam"}

    def log_evidence(estimator):
        settings = small(estimator=estimator, epochs=20, **(rounds if estimator else {}))
        result = fit(make_net(), blobs[0], precision=precision, **grouped(settings))
        return evaluate_evidence(result.evidence, blobs[0], "full-N-C").per_datum

    assert log_evidence("ntk-N-C") > log_evidence(None) + 0.05


def test_precisions_that_the_burn_in_replaces_are_refused(blobs, make_net):
    for options in ({"precision": 1e-3}, {"prior": GaussianPrior(precision=7.0)}):
        with pytest.raises(ConfigurationError, match=r"precision has no effect.* Set start_decay"):
            fit(make_net(), blobs[0], **options, **grouped(SMALL))


def test_fixed_precisions_beside_learned_ones_stay(blobs, make_net):
    prior = GaussianPrior(precision=2.0, learnable={"0.weight": False})
    result = fit(make_net(), blobs[0], prior=prior, **grouped(SMALL))
    precisions = result.evidence.prior.precisions()
    assert precisions["0.weight"].item() == pytest.approx(2.0)
    assert precisions["3.weight"].item() != pytest.approx(2.0)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu(blobs, make_net):
    result = fit(make_net(dropout=0.2).cuda(), blobs[0], test=blobs[1], **grouped(SMALL))
    assert next(result.model.parameters()).is_cuda
    again = fit(make_net(dropout=0.2).cuda(), blobs[0], test=blobs[1], **grouped(SMALL))
    assert result.test_metrics == pytest.approx(again.test_metrics, rel=1e-4)


@pytest.mark.parametrize(
    ("epochs", "every", "expected"),
    [
        (4, None, [1, 2, 3, 4]),
        (25, None, [3, 6, 9, 12, 15, 18, 21, 24, 25]),
        (100, None, [10, 20, 30, 40, 50, 60, 70, 80, 90, 100]),
        (7, 3, [3, 6, 7]),
        (7, 0, [7]),
    ],
)
def test_evaluations_are_about_ten_or_as_often_as_was_said(epochs, every, expected):
    assert [n for n in range(1, epochs + 1) if is_evaluated(n, epochs, every)] == expected
