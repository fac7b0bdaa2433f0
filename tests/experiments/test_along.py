"""Bounds along a hyperparameter, for a trained model."""

import json

import pytest
import torch

from evigrad import Evidence
from evigrad.core.curvature import Ntk
from evigrad.errors import ConfigurationError
from evigrad.invariances import AffineInvariance, Averaged
from evigrad.likelihoods import Categorical
from evigrad.likelihoods.weighted import Weighted
from evigrad.priors import GaussianPrior
from experiments import along
from experiments.along import curves_along, evidence_along, make_grid, served_together
from experiments.times import time_steps


@pytest.fixture
def images():
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(12, 1, 6, 6, generator=generator)
    return x, torch.randint(3, (12,), generator=generator)


@pytest.fixture
def evidence():
    torch.manual_seed(0)
    network = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(36, 3))
    model = Averaged(network, AffineInvariance({"rotation": 0.3}), num_samples=2)
    prior = GaussianPrior("layerwise", precision=3.0)
    return Evidence(
        model,
        Categorical(),
        prior,
        estimator="ntk-4-C",
        num_data=12,
        hyperparameters=["invariance"],
    )


def test_a_curve_is_the_mean_over_a_partition_at_each_point(evidence, images):
    curve = evidence_along(evidence, images, "diag-4-C", "rotation", [0.0, 2.0])
    assert curve["blocks"] == 3 and all(sem > 0 for sem in curve["sem"])
    along.set_hyperparameter(evidence, "rotation", 0.0)  # where nothing is drawn
    one = evidence.with_estimator("diag-4-C", generator=0)
    values = [one.estimate(block).per_datum for block in one.blocks(images).epoch()]
    assert curve["mean"][0] == pytest.approx(sum(values) / 3, rel=1e-5)


def test_a_curve_along_the_precision_has_one_for_all_weights(evidence, images):
    along.set_hyperparameter(evidence, "rotation", 0.0)
    curve = evidence_along(evidence, images, "ntk-N-C", "precision", [0.5, 2.0])
    for value, mean in zip([0.5, 2.0], curve["mean"], strict=True):
        prior = GaussianPrior("scalar", precision=value)
        one = evidence.with_estimator("full-N-C", prior=prior)
        assert mean == pytest.approx(one.estimate(*images).per_datum, rel=1e-4)
    assert curve["sem"] == [0.0, 0.0]


def test_a_curve_along_the_precision_keeps_the_mean(evidence, images):
    along.set_hyperparameter(evidence, "rotation", 0.0)
    tuned = evidence.with_estimator("ntk-4-C", prior=GaussianPrior(mean="initial"))
    start = {name: w.detach().clone() for name, w in tuned.weights().items()}
    with torch.no_grad():
        for w in tuned.weights().values():
            w.add_(0.3)
    curve = evidence_along(tuned, images, "ntk-N-C", "precision", [2.0])
    prior = GaussianPrior("scalar", precision=2.0, mean=start)
    one = evidence.with_estimator("full-N-C", prior=prior).estimate(*images)
    assert one.log_prior == pytest.approx(-0.5 * 2.0 * 0.09 * (36 * 3 + 3), rel=1e-5)
    assert curve["mean"][0] == pytest.approx(one.per_datum, rel=1e-4)


def test_the_model_stays_as_it_was(evidence, images):
    before = {name: value.clone() for name, value in evidence.model.state_dict().items()}
    curve = evidence_along(evidence, images, "ntk-4-C", "rotation", [0.0, 3.0], blocks=1)
    after = evidence.model.state_dict()
    assert all((after[name] == value).all() for name, value in before.items())
    assert curve["mean"][0] != curve["mean"][1] and curve["blocks"] == 1
    with pytest.raises(ConfigurationError, match=r"precision, or a range .*rotation.*not 'shere'"):
        evidence_along(evidence, images, "ntk-4-C", "shere", [0.0])


def test_an_interrupted_curve_goes_on_to_the_same_numbers(evidence, images, monkeypatch, tmp_path):
    partial = tmp_path / "partial.json"
    arguments = (evidence, images, "ntk-2-1", "rotation", [0.0, 1.0])
    whole = evidence_along(*arguments)
    monkeypatch.setattr(along, "_SAVE_EVERY", 0.0)
    count, real = 0, along.set_hyperparameter

    def stop(*arguments):
        nonlocal count
        count += 1
        if count > 6:
            raise KeyboardInterrupt
        real(*arguments)

    monkeypatch.setattr(along, "set_hyperparameter", stop)
    with pytest.raises(KeyboardInterrupt):
        evidence_along(*arguments, partial=partial)
    assert len(json.loads(partial.read_text())) == 3
    monkeypatch.setattr(along, "set_hyperparameter", real)
    assert evidence_along(*arguments, partial=partial) == whole
    assert not partial.exists()


MANY = [
    *("ntk-N-C", "ntk-4-C", "ntk-5-1", "ntk-4-2-iid", "ntk-7-rows", "ntk-N-1", "ntk-4-C-grouped"),
    *("blockdiag-4-C", "blockdiag-N-C", "blockdiag-3-1", "kfac-4-C", "ntk-6-rows-anchored"),
]


@pytest.mark.each(1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("is_weighted", [False, True])
def test_one_kernel_serves_many_estimators(evidence, images, dtype, is_weighted, monkeypatch):
    """Where nothing is drawn it gives the numbers of each estimator alone."""
    x, y = images[0].to(dtype), images[1]
    model, likelihood = evidence.model.to(dtype), Categorical()
    if is_weighted:
        likelihood = Weighted(likelihood)
        y = likelihood.targets(y, torch.rand(12, generator=torch.Generator().manual_seed(1)))
    tempered = Evidence(
        model,
        likelihood,
        GaussianPrior("layerwise"),
        estimator="ntk-N-C",
        num_data=12,
        hyperparameters=["invariance"],
        temperature=0.7,
    )
    log_precision = tempered.prior.log_precision
    assert log_precision is not None
    log_precision.data.copy_(torch.tensor([0.3, -0.5]))
    names = [name for name in MANY if not is_weighted or "grouped" not in name]
    expected = {n: evidence_along(tempered, (x, y), n, "rotation", [0.0]) for n in names}
    alone = []
    monkeypatch.setattr(along, "evidence_along", lambda e, d, n, *_, **__: alone.append(n))
    curves = curves_along(tempered, (x, y), names, "rotation", [0.0])
    assert alone == ["kfac-4-C", "ntk-6-rows-anchored"] and list(curves) == names
    for name in names:
        if name not in alone:
            tolerance = 1e-5 if dtype == torch.float32 else 1e-10
            assert curves[name]["mean"] == pytest.approx(expected[name]["mean"], rel=tolerance)
            assert curves[name]["sem"] == pytest.approx(expected[name]["sem"], rel=1e-3, abs=1e-9)
            assert curves[name]["blocks"] == expected[name]["blocks"]


def test_narrow_tensors_are_rows(evidence, images, monkeypatch):
    names = ["ntk-N-C", "blockdiag-N-C", "blockdiag-4-C", "blockdiag-2-1"]
    expected = curves_along(evidence, images, names, "rotation", [0.5])
    kept, real = [], along._Kernels.estimates
    monkeypatch.setattr(Ntk, "_caches_grams", lambda self, num_rows: False)

    def estimates(self, drawn):
        kept.append([part.ndim for part in self.of_tensors])
        return real(self, drawn)

    monkeypatch.setattr(along._Kernels, "estimates", estimates)
    curves = curves_along(evidence, images, names, "rotation", [0.5])
    assert kept == [[4, 3]]  # 108 weights, and 3 biases, against 36 rows
    for name in names:
        assert curves[name]["mean"] == pytest.approx(expected[name]["mean"], rel=1e-5)


def test_bounds_of_one_kernel_are_in_order_where_transforms_are_drawn(evidence, images):
    names = ["ntk-N-C", "ntk-6-C", "ntk-3-C", "blockdiag-N-C", "blockdiag-6-C"]
    curves = curves_along(evidence, images, names, "rotation", [0.5, 2.0], seed=3)
    for point in range(2):
        value = {name: curves[name]["mean"][point] for name in names}
        assert value["ntk-N-C"] > value["ntk-6-C"] > value["ntk-3-C"]
        assert value["ntk-N-C"] > value["blockdiag-N-C"] > value["blockdiag-6-C"]
        assert value["ntk-6-C"] > value["blockdiag-6-C"]
    assert curves == curves_along(evidence, images, names, "rotation", [0.5, 2.0], seed=3)
    assert curves != curves_along(evidence, images, names, "rotation", [0.5, 2.0], seed=4)


@pytest.mark.parametrize("names", [["ntk-4-C", "ntk-2-C"], ["ntk-N-C"]])
def test_estimators_alone_where_no_kernel_serves(evidence, images, names):
    along_what = "precision" if "ntk-N-C" in names else "rotation"
    curves = curves_along(evidence, images, names, along_what, [0.5])
    for name in names:
        assert curves[name] == evidence_along(evidence, images, name, along_what, [0.5])


def test_a_kernel_that_rounds_too_much_is_made_in_float64(evidence, images, monkeypatch):
    with torch.no_grad():
        evidence.prior.log_precision.fill_(-21.0)
    twice = (torch.cat([images[0][:6]] * 2), torch.cat([images[1][:6]] * 2))
    names, types, real = ["ntk-N-C", "ntk-6-C"], [], along._Kernels.of

    def of(*arguments):
        types.append(arguments[4:])
        return real(*arguments)

    monkeypatch.setattr(along._Kernels, "of", of)
    curves = curves_along(evidence, twice, names, "rotation", [0.0])
    assert types == [(None,), (torch.float64,)]
    for name in names:
        expected = evidence_along(evidence, twice, name, "rotation", [0.0])
        assert curves[name]["mean"] == pytest.approx(expected["mean"], rel=1e-4)


def test_many_curves_go_on_to_the_same_numbers(evidence, images, monkeypatch, tmp_path):
    partial, grid = tmp_path / "partial.json", [0.0, 1.0000001, 1.0000004]
    arguments = (evidence, images, ["diag-4-C", "ntk-N-C", "ntk-4-1"], "rotation", grid)
    whole = curves_along(*arguments)
    real, alone = along.set_hyperparameter, along.evidence_along
    count, names = 0, []

    def stop(one, name, value):
        nonlocal count
        count += 1
        if count > 3 * 3 + 2:  # diagonal blocks at each point, then the kernel at two points
            raise KeyboardInterrupt
        real(one, name, value)

    def recorded(*arguments, **options):
        names.append(arguments[2])
        return alone(*arguments, **options)

    monkeypatch.setattr(along, "set_hyperparameter", stop)
    monkeypatch.setattr(along, "evidence_along", recorded)
    with pytest.raises(KeyboardInterrupt):
        curves_along(*arguments, partial=partial)
    assert list(json.loads(partial.read_text())) == ["diag-4-C"]
    begun = json.loads((tmp_path / "together-partial.json").read_text())
    assert list(begun) == ["0.0", "1.0000001"]
    monkeypatch.setattr(along, "set_hyperparameter", real)
    assert curves_along(*arguments, partial=partial) == whole
    assert names == ["diag-4-C"]  # which is not evaluated again
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("kind", ["diagonal prior", "positions"])
def test_no_kernel_where_it_would_be_wrong(images, kind):
    layers = [torch.nn.Flatten(), torch.nn.Linear(36, 6 if kind == "positions" else 3)]
    if kind == "positions":
        layers.append(torch.nn.Unflatten(1, (2, 3)))
    model = Averaged(torch.nn.Sequential(*layers), AffineInvariance({"rotation": 0.3}), 2)
    prior = GaussianPrior("diagonal" if kind == "diagonal prior" else "layerwise")
    names, (x, y) = ["ntk-N-C", "ntk-4-C"], images
    y = torch.stack([y, y], 1) if kind == "positions" else y
    evidence = Evidence(
        model,
        Categorical(),
        prior,
        estimator="ntk-N-C",
        num_data=y.numel(),
        hyperparameters=["invariance"],
    )
    assert served_together(evidence, (x, y), names, "rotation") == []
    assert served_together(evidence, (x, y), names, "precision") == []


def test_half_precision_has_a_kernel_in_single(evidence, images):
    half = Evidence(
        evidence.model.bfloat16(),
        Categorical(),
        GaussianPrior("layerwise"),
        estimator="ntk-N-C",
        num_data=12,
        hyperparameters=["invariance"],
    )
    data = (images[0].bfloat16(), images[1])
    curves = curves_along(half, data, ["ntk-N-C", "ntk-4-C"], "rotation", [0.0])
    for name, curve in curves.items():
        alone = evidence_along(half, data, name, "rotation", [0.0])
        assert curve["mean"] == pytest.approx(alone["mean"], rel=0.02)


def test_times_are_positive(evidence, images, monkeypatch):
    monkeypatch.setattr("evigrad.measure.judging.SECONDS", 0.0)
    seconds = time_steps(evidence, images, batch_size=4, steps=2)
    # An estimate has its part of the draw that its round begins with.
    assert seconds.estimate > seconds.draw / 2 > 0 and seconds.step > 0


def test_grids():
    assert make_grid(0.01, 100.0, 5, log=True) == [0.01, 0.1, 1, 10, 100]
    assert make_grid(0.0, 1.0, 3) == [0, 0.5, 1]


@pytest.mark.parametrize(
    "wrong", [(1.0, 0.0, 3), (0.0, 1.0, 1), (0.0, 1.0, 3, True), (0.0, float("inf"), 3)]
)
def test_grids_that_are_none(wrong):
    with pytest.raises(ConfigurationError, match="grid"):
        make_grid(*wrong)
