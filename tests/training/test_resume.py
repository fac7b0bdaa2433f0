"""A run that is killed and resumed is the run that was not, to the last bit."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from training.interrupted import (
    Death,
    assert_same_runs,
    dying_at_call,
    killed,
    metrics_of,
    state_of,
)
from training.small_runs import CASES, RECORDED, SMALL, net, train

from evigrad.errors import ConfigurationError
from evigrad.evidence import Evidence
from evigrad.priors import GaussianPrior
from evigrad.training import FitResult, RunDirectory, Settings, fit, load, prepare
from evigrad.training.settings import grouped


@pytest.fixture(scope="module")
def whole(blobs, tmp_path_factory) -> Callable[[str], Path]:
    """The run of a case without any interruption, trained once."""
    folders: dict[str, Path] = {}

    def of(case: str) -> Path:
        if case not in folders:
            folders[case] = tmp_path_factory.mktemp("whole") / "run"
            train(case, blobs, folders[case])
        return folders[case]

    return of


# In the middle of an epoch of the weights, and, gone on from there, of a round of steps.
MOMENTS = [(Evidence, "map_loss", 11), (Evidence, "_add_gradients", 2)]


@pytest.mark.one_in(5)
@pytest.mark.parametrize("case", CASES)
def test_what_was_killed_while_it_computed_ends_the_same(case, blobs, tmp_path, whole):
    # The weights of other seeds: a state that is incomplete would show.
    folder, deaths = tmp_path / "run", 0
    for seed, moment in enumerate(MOMENTS):
        with dying_at_call(*moment):
            deaths += killed(
                lambda seed=seed: train(case, blobs, folder, seed=seed, resume=seed > 0)
            )
    train(case, blobs, folder, seed=9, resume=True)
    assert_same_runs(folder, whole(case))
    # Plain training takes no gradient of the evidence to die in.
    assert deaths == (1 if case.startswith("map") else 2)


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("estimator", "update"), [("ntk-20-1", "adam"), ("kfac-N-C", "fixed_point")]
)
def test_groups_that_are_not_learned_keep_their_precision(estimator, update, blobs, tmp_path):
    groups = {"first": ["0"], "last": ["3"]}
    start = 3.0 if update == "adam" else 1.0  # the fixed point allows only the default

    def run(folder: Path, **changes: Any) -> FitResult:
        prior = GaussianPrior(
            groups, precision={"first": 2.0, "last": start}, learnable={"first": False}
        )
        options = {"prior": prior, "estimator": estimator, "prior_update": update}
        return train("ntk", blobs, folder, **options, **changes)

    result = run(tmp_path / "whole")
    learned = result.evidence.hyperparameters()["prior.log_precision"]
    assert learned.shape == (1,) and not torch.isclose(learned.exp(), torch.tensor(start))
    values = torch.stack(list(result.evidence.prior.precisions().values())).detach()
    two, learned = torch.tensor(2.0), learned.detach().exp()[0]
    torch.testing.assert_close(values, torch.stack([two, two, learned, learned]))
    with dying_at_call(Evidence, "_add_gradients", 4):
        assert killed(lambda: run(tmp_path / "cut"))
    run(tmp_path / "cut", seed=9, resume=True)
    assert_same_runs(tmp_path / "cut", tmp_path / "whole")


@pytest.mark.one_in(2)
@pytest.mark.parametrize("update", ["fixed_point", "adam"])
def test_a_mean_of_initial_weights_is_that_of_the_beginning(update, blobs, tmp_path):
    def run(folder: Path, mean: Any = None, **changes: Any) -> FitResult:
        options = {"prior": GaussianPrior(mean=mean or {"0": "initial"}), "prior_update": update}
        return train("ntk", blobs, folder, **options, **changes)

    run(tmp_path / "whole")
    for seed, moment in enumerate(MOMENTS):  # a network that goes on has the weights of its seed
        with dying_at_call(*moment):
            assert killed(lambda seed=seed: run(tmp_path / "cut", seed=seed, resume=seed > 0))
    result = run(tmp_path / "cut", seed=9, resume=True)
    assert_same_runs(tmp_path / "cut", tmp_path / "whole")
    loaded = load(tmp_path / "cut", net(7), prior=GaussianPrior(mean={"0": "initial"}))
    for evidence in (result.evidence, loaded.evidence):
        means = evidence.prior.means()
        assert list(means) == ["0.weight", "0.bias"]
        assert all(torch.equal(mean, net(0).get_parameter(n)) for n, mean in means.items())
    with pytest.raises(ConfigurationError, match="mean"):
        run(tmp_path / "cut", mean="initial", resume=True)


def test_a_run_from_before_there_were_means_goes_on_with_mean_zero(blobs, tmp_path):
    train("ntk", blobs, tmp_path / "whole")
    with dying_at_call(Evidence, "_add_gradients", 4):
        assert killed(lambda: train("ntk", blobs, tmp_path / "cut"))
    path = tmp_path / "cut" / "checkpoint.pt"
    state = torch.load(path, weights_only=True)
    del state["settings"]["prior_mean"], state["evidence"]["prior"]["_extra_state"]["mean_of"]
    RunDirectory(tmp_path / "cut", resume=True).write_checkpoint(state)
    assert load(tmp_path / "cut", net(3)).evidence.prior.means() == {}
    options = {name: value for name, value in RECORDED.items() if name != "progress"}
    settings = Settings(**grouped({**state["settings"], **options, "prior_mean": "initial"}))
    with pytest.raises(ConfigurationError, match="for no weight, and this prior for '0.weight'"):
        prepare(net(), blobs[0], settings, test=blobs[1]).train(tmp_path / "cut", resume=True)
    train("ntk", blobs, tmp_path / "cut", seed=3, resume=True)
    assert metrics_of(tmp_path / "cut") == metrics_of(tmp_path / "whole")


def test_a_run_by_the_former_name_map_noise_goes_on(blobs, tmp_path):
    case = "map, learned noise"
    train(case, blobs, tmp_path / "whole")
    with dying_at_call(Evidence, "map_loss", 8):
        assert killed(lambda: train(case, blobs, tmp_path / "cut"))
    state = torch.load(tmp_path / "cut" / "checkpoint.pt", weights_only=True)
    del state["settings"]["noise_on_loss"]
    state["settings"] |= {"estimator": "map-noise", "augerino_weight": 0.01}
    RunDirectory(tmp_path / "cut", resume=True).write_checkpoint(state)
    assert load(tmp_path / "cut", net(3)).evidence.likelihood.name == "gaussian"
    with pytest.raises(ConfigurationError, match="noise_on_loss=True, not False"):
        train(case, blobs, tmp_path / "cut", resume=True, noise_on_loss=False)
    train(case, blobs, tmp_path / "cut", seed=3, resume=True)
    assert metrics_of(tmp_path / "cut") == metrics_of(tmp_path / "whole")


@pytest.mark.one_in(2)
@pytest.mark.parametrize("every", [1, 2])
def test_every_moment_at_which_a_file_changes(every, blobs, tmp_path):
    def run(folder: Path, **changes: Any) -> FitResult:
        return train("map", blobs, folder, epochs=every + 1, checkpoint_every=every, **changes)

    with Death().watching() as none:
        run(tmp_path / "whole")
    assert {"in checkpoint.pt", "in a row", "before config.json"} <= set(none.what)
    for moment in range(none.count):
        folder = tmp_path / str(moment)
        with Death(moment).watching():
            assert killed(lambda folder=folder: run(folder))
        run(folder, resume=True)
        left = {p.name for p in folder.iterdir()}
        assert left == {"config.json", "metrics.csv", "checkpoint.pt"}, none.what[moment]
        assert_same_runs(folder, tmp_path / "whole")


@pytest.mark.long
def test_dying_again_and_again(blobs, tmp_path, whole):
    folder = tmp_path / "run"
    deaths = 0
    with dying_at_call(Evidence, "map_loss", 4):
        killed(lambda: train("ntk", blobs, folder, resume=True))
    for _ in range(30):
        with dying_at_call(Evidence, "map_loss", 5):
            if not killed(lambda: train("ntk", blobs, folder, seed=4, resume=True)):
                break
        deaths += 1
    assert deaths >= 3
    assert_same_runs(folder, whole("ntk"))


def test_the_result_of_a_run_that_is_complete_is_read(blobs, tmp_path, capsys):
    seen: list[int] = []
    first = train("dropout", blobs, tmp_path / "run")
    before = {p.name: p.stat().st_mtime_ns for p in (tmp_path / "run").iterdir()}
    again = train(
        "dropout",
        blobs,
        tmp_path / "run",
        seed=5,
        resume=True,
        progress=True,
        callbacks=[lambda row: seen.append(1)],
    )
    assert capsys.readouterr().err == "evigrad: all 5 epochs are done\n"
    assert {p.name: p.stat().st_mtime_ns for p in (tmp_path / "run").iterdir()} == before
    assert seen == []
    assert again.history == first.history
    assert (again.train_metrics, again.test_metrics) == (first.train_metrics, first.test_metrics)
    assert (again.seconds, again.run_dir) == (first.seconds, first.run_dir)
    assert not again.model.training
    x = blobs[1][0]
    assert torch.equal(again.model(x), first.model(x))
    assert again.evidence.describe() == first.evidence.describe()


def test_what_is_lost_of_the_metrics_is_written_again(blobs, tmp_path, whole):
    train("ntk", blobs, tmp_path / "run")
    (tmp_path / "run" / "metrics.csv").unlink()
    train("ntk", blobs, tmp_path / "run", resume=True)
    assert metrics_of(tmp_path / "run") == metrics_of(whole("ntk"))


def test_resuming_in_an_empty_folder_begins_there(blobs, tmp_path, whole):
    (tmp_path / "run").mkdir()
    result = train("ntk", blobs, tmp_path / "run", resume=True)
    assert result.run_dir == tmp_path / "run"
    assert_same_runs(tmp_path / "run", whole("ntk"))
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "letter.txt").write_text("Dear")
    with pytest.raises(ConfigurationError, match="mine holds no run"):
        train("ntk", blobs, tmp_path / "mine", resume=True)
    with pytest.raises(ConfigurationError, match="requires the folder of a run"):
        fit(net(), blobs[0], resume=True, **grouped(SMALL))


def test_time_goes_on_where_it_stopped(blobs, tmp_path):
    with dying_at_call(Evidence, "map_loss", 8):
        assert killed(lambda: train("ntk", blobs, tmp_path / "run"))
    state = state_of(tmp_path / "run")
    assert state["epoch"] == 2
    result = train("ntk", blobs, tmp_path / "run", resume=True)
    seconds = [float(row["seconds"] or 0) for row in result.history]
    assert seconds == sorted(seconds)
    assert seconds[1] == pytest.approx(state["seconds"])


def test_callbacks_belong_to_the_epoch_that_is_saved(blobs, tmp_path):
    """A callback that draws from the evidence's generator, and dies in the third epoch."""
    dead = False

    def run(folder: Path, resume: bool = False, dies: bool = False) -> FitResult:
        model = net()

        def draw(row: Any) -> None:
            nonlocal dead
            with torch.no_grad():
                model.get_parameter("0.bias").add_(0.01)
            if dies and row["epoch"] == 3:
                dead = True
                raise KeyboardInterrupt

        return fit(
            model, blobs[0], run_dir=folder, resume=resume, callbacks=[draw], **grouped(RECORDED)
        )

    run(tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt) as interruption:
        run(tmp_path / "run", dies=True)
    assert dead
    assert (
        "To resume from the last checkpoint, make the same call" in interruption.value.__notes__[0]
    )
    assert "resume=True" in interruption.value.__notes__[0]
    run(tmp_path / "run", resume=True)
    assert_same_runs(tmp_path / "run", tmp_path / "whole")


def test_stopping_after_an_epoch_leaves_its_checkpoint(blobs, tmp_path, whole):
    rows: list[Any] = []

    def make(seed: int) -> Any:
        options = {name: value for name, value in SMALL.items() if name != "progress"}
        defaults = state_of(whole("ntk"))["settings"]
        return prepare(
            net(seed),
            blobs[0],
            Settings(**grouped({**defaults, **options, "checkpoint_every": 100})),
            test=blobs[1],
        )

    with pytest.raises(KeyboardInterrupt, match="Stopped after epoch 3 of 5"):
        make(0).train(
            tmp_path / "run", progress=False, callbacks=[rows.append], stop=lambda: len(rows) == 3
        )
    assert state_of(tmp_path / "run")["epoch"] == 3
    make(7).train(tmp_path / "run", resume=True, progress=False, stop=lambda: False)
    assert_same_runs(tmp_path / "run", whole("ntk"))
