"""The scripts in ``examples/`` and the first experiments, in a short form and to their end."""

import importlib.util
import json
import math
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from types import ModuleType

import pytest
import torch
from late import needs
from torch import Tensor, nn

import evigrad
from evigrad.inputs import as_inputs
from evigrad.priors import GaussianPrior
from evigrad.training.rotation import RankRotation

pytestmark = needs("sklearn")

EXAMPLES = Path(__file__).parent.parent / "examples"


def load_script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"examples_{name}", EXAMPLES / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_script_is_imported() -> None:
    """Also those that only `make check-long` runs to their ends."""
    for file in EXAMPLES.glob("*.py"):
        if file.stem != "lora":  # which needs other packages
            assert callable(load_script(file.stem).main)


@pytest.mark.long
def test_sequences(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    script = load_script("sequences")
    short = "--subset 20 --epochs 3 --estimator ntk-10-1 --judge ntk-10-1".split()
    learned = script.main([*short, "--figure", str(tmp_path / "figure.png")])
    assert (tmp_path / "figure.png").stat().st_size > 10_000
    printed = capsys.readouterr().out
    assert set(learned) == {"transformer", "gru"}
    assert "8 x linear" in printed and "generic" not in printed
    for name, result in learned.items():
        assert printed.count(f"\n{name} ") >= 2
        values = result.model.get_submodule(script.TASKS[name].hyperparameter)().detach()
        assert values.isfinite().all()
        assert all(abs(math.log(w.precision)) > 1e-4 for w in result.evidence.describe())


def test_a_batch_asks_each_of_two_equal_questions_once() -> None:
    script = load_script("active_learning")
    # Two pairs of equal questions: a batch asks each of them once.
    outputs = 4 * torch.randn(500, 2, 3, generator=torch.Generator().manual_seed(0)).double()
    p = outputs[:, [0, 0, 1, 1]].softmax(-1)
    is_free, generator = torch.ones(4, dtype=torch.bool), torch.Generator().manual_seed(0)
    assert {i // 2 for i in script.best_alone(p, is_free, 2)} != {0, 1}
    assert {i // 2 for i in script.best_together(p, is_free, 2, generator)} == {0, 1}


@pytest.mark.long
def test_active_learning(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    script = load_script("active_learning")
    figure = tmp_path / "figure.png"
    short = "--first 8 --last 12 --batch 2 --epochs 1 --seeds 0"
    curves = script.main([*short.split(), "--figure", str(figure)])
    assert [len(curve) for (curve,) in curves.values()] == [3, 3, 3]
    assert 10_000 < figure.stat().st_size < 300_000


@pytest.mark.long
def test_fine_tuning(capsys: pytest.CaptureFixture[str]) -> None:
    results = load_script("fine_tuning").main("--epochs 2 --old-epochs 1 --subset 30".split())
    assert capsys.readouterr().out.count("initial ") == 4
    assert all(math.isfinite(value) for values in results.values() for value in values)


@pytest.mark.long
def test_censored(capsys: pytest.CaptureFixture[str]) -> None:
    script = load_script("censored")
    results = script.main("--epochs 2 --seeds 0 1".split())
    assert set(results) == {"as recorded", "left out", "censored"}
    assert all(math.isfinite(value) for values in results.values() for value in values)
    assert capsys.readouterr().out.count(" censored ") == 3


@pytest.mark.long
def test_segmentation(capsys: pytest.CaptureFixture[str]) -> None:
    results = load_script("segmentation").main("--images 1 --epochs 1".split())
    printed = capsys.readouterr().out
    assert all(printed.count(f"\n{name} ") == 1 for name in results)


@pytest.mark.long
def test_lora(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The prior pairs the ranks of each adapter, and rotations keep the outputs."""
    pytest.importorskip("peft")
    monkeypatch.syspath_prepend(str(EXAMPLES))
    is_enabled = torch.backends.mha.get_fastpath_enabled()
    script = load_script("lora")
    try:
        fits = script.main(
            "--each 10 --old-epochs 1 --epochs 2 --rank 3 --estimator kfac-10-1".split()
        )
        evidence = fits[script.PER_RANK].evidence
        optimizer = torch.optim.Adam(evidence.weights().values())
        probe, _ = script.snippets(script.TEST, 4, 0)
        rotation = RankRotation(evidence, optimizer, as_inputs(probe))
        rotation.rotate()
    finally:
        torch.backends.mha.set_fastpath_enabled(is_enabled)
    assert len(rotation.pairs) == 4
    assert capsys.readouterr().out.count("\n") == 2 + len(fits)


GALLERY = {
    "counts": "--num-train 100 --epochs 2 --seeds 0",
    "decay": "--data digits --model digitsnet --subset 40 --epochs 2 --decays 5e-4 1e-2",
    "length_scale": "--lengths 0.3 1 --epochs 3",
    "rare_classes": "--num-train 300 --epochs 2",
    "ratings": "--data synthetic --num-train 60 --epochs 2 --seeds 0",
    "text": "--each 20 --epochs 2 --estimators kfac-10-1",
    "two_heads": "--epochs 4",
    "uncertainty": "--epochs 2",
}


@pytest.mark.one_in(4)
@pytest.mark.parametrize("name", GALLERY)
def test_gallery(name: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Each script runs, prints, and draws a figure of a size that may be committed."""
    pytest.importorskip("matplotlib")
    figure = tmp_path / "figure.png"
    assert load_script(name).main([*GALLERY[name].split(), "--figure", str(figure)])
    assert 10_000 < figure.stat().st_size < 300_000
    assert capsys.readouterr().out


@pytest.mark.long
def test_a_length_is_learned_by_its_gradient() -> None:
    script = load_script("length_scale")
    for learned in ("", "--learn"):
        trainings = script.main(f"--lengths 1 --epochs 8 {learned}".split())
        assert (trainings[1.0].length != 1.0) == bool(learned)


def test_the_probabilities_of_ratings_sum_to_one() -> None:
    """For each likelihood, and the integral over all numbers takes those at the ends too."""
    script = load_script("ratings")
    x, y, first = script.read("synthetic", None)
    assert first == 1 and set(y.tolist()) == set(range(6))
    for method in script.METHODS:
        shares, _ = script.predict(method, x[:50], y[:50], x[50:70], 6, epochs=1, seed=0)
        assert shares.shape == (20, 6) and (shares >= 0).all()
        torch.testing.assert_close(shares.sum(1), torch.ones(20).double(), rtol=1e-5, atol=1e-5)


def test_the_true_probabilities_of_the_rare_class_are_calibrated() -> None:
    script = load_script("rare_classes")
    places, labels = script.draw_examples(50_000, seed=3)
    probability = script.true_probability(places)
    for low, high in ((0.0, 0.02), (0.02, 0.3), (0.3, 1.0)):
        chosen = (probability >= low) & (probability < high)
        error = (probability[chosen] - labels[chosen]).mean()
        assert abs(error) < 4 * labels[chosen].std() / chosen.sum() ** 0.5


def test_division_by_the_weights_returns_to_the_frequencies() -> None:
    script = load_script("rare_classes")
    probability, weights = script.np.array([0.01, 0.3, 0.9]), script.np.array([0.5, 12.0])
    odds = probability / (1 - probability) * weights[1] / weights[0]
    restored = script.undo_weights(odds / (1 + odds), weights)
    assert restored == pytest.approx(probability, rel=1e-12)


def test_every_figure_of_the_gallery_is_one_of_a_script() -> None:
    committed = EXAMPLES.parent / "docs" / "images" / "gallery"
    assert {path.stem for path in committed.glob("*.png")} == GALLERY.keys() - {"rare_classes"}
    assert all(path.stat().st_size < 300_000 for path in committed.iterdir())


def test_the_rows_of_censored_targets_are_those_of_the_mean_hessian() -> None:
    """By quadrature over all that can be recorded, value and gradient."""
    likelihood = load_script("censored").Censored(0.7, noise=1.3).double()
    f = torch.linspace(-6, 8, 8).double()[:, None].requires_grad_()
    grid = torch.linspace(-30, 0.7, 40_001).double()[:-1, None] + 1e-9

    def curvature(of: Tensor, y: Tensor) -> Tensor:
        total = -likelihood.log_prob(of, y).sum()
        (slope,) = torch.autograd.grad(total, of, create_graph=True)
        return torch.autograd.grad(slope.sum(), of, create_graph=True)[0]

    limit = torch.full_like(f, 0.7)
    expected = likelihood.log_prob(f, limit).exp() * curvature(f, limit)[:, 0]
    densities = [likelihood.log_prob(output.expand(len(grid), 1), grid).exp() for output in f]
    curvatures = [curvature(one[None].repeat(len(grid), 1), grid)[:, 0] for one in f]
    integral = torch.stack(
        [torch.trapezoid(d * c, grid[:, 0]) for d, c in zip(densities, curvatures, strict=True)]
    )
    hessians = likelihood.hessian(f)[:, 0, 0]
    torch.testing.assert_close(hessians, expected + integral, rtol=1e-3, atol=1e-4)
    assert torch.autograd.gradcheck(likelihood.hessian, (f,))


@pytest.mark.one_in(3)
@pytest.mark.parametrize("estimator", ["ntk-N-C", "kfac-N-C", "diag-N-C"])
def test_limits_as_an_output_of_the_model(estimator: str) -> None:
    """Where all are the same they give the evidence of one limit."""
    censored = load_script("censored").Censored

    class Limited(censored):
        def validate(self, f_shape: Sequence[int], y: Tensor) -> None:
            assert f_shape[1] == 2

        def log_prob(self, f: Tensor, y: Tensor) -> Tensor:
            self.limit = f[:, 1:]
            return super().log_prob(f[:, :1], y)

        def hessian(self, f: Tensor) -> Tensor:
            self.limit = f[:, 1:]
            return nn.functional.pad(super().hessian(f[:, :1]), (0, 1, 0, 1))

    class Model(nn.Module):
        def __init__(self, outputs: int) -> None:
            super().__init__()
            self.layer, self.outputs = nn.Linear(2, 1), outputs

        def forward(self, x: Tensor) -> Tensor:
            return torch.cat([self.layer(x[:, :2]), x[:, 2:]], dim=1)[:, : self.outputs]

    x = torch.randn(9, 3, generator=torch.Generator().manual_seed(0)).double()
    x[:, 2], y = 0.7, x[:, :1].clamp(max=0.7)
    numbers = []
    for outputs, likelihood in ((1, censored(0.7)), (2, Limited(0.0))):
        torch.manual_seed(0)
        evidence = evigrad.Evidence(
            Model(outputs).double(), likelihood, GaussianPrior(), estimator=estimator, num_data=9
        )
        numbers.append(evidence.backward(x, y).log_evidence)
        gradients = [p.grad for p in evidence.hyperparameters().values()]
        numbers += [float(gradient.sum()) for gradient in gradients if gradient is not None]
    assert numbers[: len(numbers) // 2] == pytest.approx(numbers[len(numbers) // 2 :], rel=1e-9)


@pytest.mark.long
def test_saying_what_is_censored_gains() -> None:
    means = {way: fmean(values) for way, values in load_script("censored").main([]).items()}
    assert means["censored"] > means["as recorded"] + 0.5 > means["left out"]


@pytest.mark.long
def test_the_noise_of_a_head_is_learned_from_the_evidence_only() -> None:
    script = load_script("two_heads")
    results = script.main([])
    noise = {
        name: result.evidence.likelihood.reported()["depth/noise"]
        for name, result in results.items()
    }
    assert noise[script.ON_LOSS] < 0.05
    assert noise[script.LEARNED] == pytest.approx(script.NOISE, abs=0.03)
    for head in ("depth", "kind"):
        values = [result.test_metrics[f"{head}/log_likelihood"] for result in results.values()]
        assert values[0] < values[1]


@pytest.mark.long
def test_exposures_and_dispersion_gain() -> None:
    exposed, poisson, ignoring = (
        fmean(values) for values in load_script("counts").main([]).values()
    )
    assert exposed > ignoring + 0.1 and exposed > poisson + 0.1


@pytest.mark.long
def test_a_threshold_replaces_class_weights() -> None:
    results = load_script("rare_classes").main([])
    plain, weighted = results["no weights, 0.04"], results["balanced, 0.50"]
    assert plain["balanced accuracy"] > weighted["balanced accuracy"] - 0.02
    assert weighted["recall"] > results["no weights, 0.50"]["recall"] + 0.2
    divided = results["balanced, divided, 0.50"]
    assert plain["log likelihood"] > divided["log likelihood"] > weighted["log likelihood"]


@pytest.mark.long
def test_ordered_classes_gain_on_ordered_ratings() -> None:
    means = {
        method: fmean(value for value, _ in values)
        for method, values in load_script("ratings").main(["--data", "synthetic"]).items()
    }
    assert means["ordered classes"] == max(means.values())


@pytest.mark.long
def test_fine_tuning_gains_by_the_mean() -> None:
    means = {name: fmean(values) for name, values in load_script("fine_tuning").main([]).items()}
    assert means["initial"] >= means["zero"] + 0.01


@pytest.mark.long
def test_sequences_converge() -> None:
    for result in load_script("sequences").main([]).values():
        assert result.test_metrics["accuracy"] >= 0.9
        assert result.test_metrics["log_likelihood"] >= -0.4


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "ahead", "metric", "least"),
    [
        ("mnist5k", 0.05, "accuracy", 0.93),
        ("digits", -0.01, "accuracy", 0.97),
        ("autompg", 5.0, "r_squared", 0.87),
    ],
)
def test_the_first_experiments_show_learning_ahead_of_map_or_level(
    name: str, ahead: float, metric: str, least: float, tmp_path: Path
) -> None:
    pytest.importorskip("jsonargparse")
    pytest.importorskip("mlxtend")
    from evigrad.cli import main

    config = EXAMPLES.parent / "experiments" / f"{name}.yaml"
    run = ["train", "--config", str(config), "--run-dir", str(tmp_path / name), "--no-progress"]
    assert main(run) == 0
    results = json.loads((tmp_path / name / "results.json").read_text())
    fixed, learned = (results[method]["test"] for method in results)
    assert learned["log_likelihood"] >= fixed["log_likelihood"] + ahead
    if metric == "r_squared":
        assert learned["squared_error"] <= fixed["squared_error"]
    else:  # ahead, or level
        assert learned[metric] >= fixed[metric] - 0.005
    # Targets have a variance near one, those of the training data exactly.
    value = 1 - learned["squared_error"] if metric == "r_squared" else learned[metric]
    assert value >= least
