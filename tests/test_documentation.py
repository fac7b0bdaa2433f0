"""The code that the documentation shows runs to its end, and what it promises holds."""

import ast
import inspect
import operator
import re
import tomllib
import warnings
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import distributed

ROOT = Path(__file__).parent.parent
NUMBER = r"-?\d+(?:\.\d+)?"
# Functions whose keywords are checked on every page.
CHECKED = ("evigrad.fit", "evigrad.Evidence", "evigrad.Schedule", "evigrad.Optimization")
CHECKED += ("evigrad.Memory", "evigrad.load", "evigrad.tune", "evigrad.Learner")

pytest.importorskip("sklearn")


def run_blocks(page: str, changes: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Run the Python blocks of a page, one after the other, and return their variables."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)
    code = "\n".join(blocks)
    assert code
    for old, new in (changes or {}).items():
        assert code.count(old) == 1, old
        code = code.replace(old, new)
    names: dict[str, Any] = {"__name__": page}
    exec(compile(code, page, "exec"), names)
    return names


def test_the_first_block_of_the_readme_runs(capsys: pytest.CaptureFixture[str]) -> None:
    short = "schedule=evigrad.Schedule(epochs=2, burn_in=1, every=1, steps=1)"
    plain = "schedule=evigrad.Schedule(epochs=2)"
    gaussian = 'likelihood="gaussian"'
    changes = {
        f"{gaussian})": f"{gaussian}, {short})",
        "estimator=None": f"{plain}, estimator=None",
    }
    assert run_blocks("README.md", changes)["result"].history[-1]["log_evidence"] < 0
    assert "weight decay 5e-4" in capsys.readouterr().out


def test_the_changed_loop_of_the_readme_runs(capsys: pytest.CaptureFixture[str]) -> None:
    """With the marked lines, and without them: what the reader has is a training loop."""
    import evigrad
    from evigrad.data import load
    from evigrad.likelihoods import Categorical
    from evigrad.priors import GaussianPrior

    (diff,) = re.findall(r"```diff\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    for words, short in {
        "Schedule(epochs=40)": "Schedule(epochs=4, burn_in=1, every=2, steps=2)",
        "in range(40)": "in range(4)",
    }.items():
        assert diff.count(words) == 1
        diff = diff.replace(words, short)
    train = torch.utils.data.TensorDataset(*load("digits", subset=100).train)
    names: dict[str, Any] = {
        "torch": torch,
        "cross_entropy": torch.nn.functional.cross_entropy,
        "model": torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10)),
        "train": train,
        "loader": torch.utils.data.DataLoader(train, batch_size=50),
    }
    new = {"evigrad": evigrad, "Categorical": Categorical, "GaussianPrior": GaussianPrior}
    for marks, imported in ((" -", {}), (" +", new)):
        lines = [line[1:] for line in diff.splitlines() if line[0] in marks]
        variables = names | imported
        exec(compile("\n".join(lines), "README.md", "exec"), variables)
    assert variables["learner"].hyper_steps > 0
    assert variables["optimizer"].param_groups[0]["weight_decay"] == 0
    assert not capsys.readouterr().out


def test_every_extra_is_on_the_page_of_the_installation() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    page = (ROOT / "docs" / "install.md").read_text()
    listed = set(re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE))
    assert listed == set(extras["optional-dependencies"])


@pytest.mark.long
def test_the_first_page_runs(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("mlxtend")
    short = "schedule=evigrad.Schedule(epochs=2, burn_in=1, every=1, steps=1)"
    changes = {"subset=500": "subset=100", "train, test=": f"train, {short}, test="}
    plain = "schedule=evigrad.Schedule(epochs=2)"
    changes["train, estimator=None"] = f"train, {plain}, estimator=None"
    names = run_blocks("docs/index.md", changes)
    assert names["predictive"].probabilities.shape == (1000, 10)
    assert "5.bias" in capsys.readouterr().out


def test_the_inequalities_on_theory_hold(capsys: pytest.CaptureFixture[str]) -> None:
    names = run_blocks("docs/theory.md")
    exact, refined, by_parameters = names["exact"], names["refined"], names["by_parameters"]
    assert refined == sorted(refined) and refined[0] == pytest.approx(exact, rel=1e-12)
    assert by_parameters == sorted(by_parameters)
    assert by_parameters[0] == pytest.approx(exact, rel=1e-9)
    assert min(names["rows"]) > exact
    assert capsys.readouterr().out


@pytest.mark.long
def test_the_blocks_on_choosing_run(capsys: pytest.CaptureFixture[str]) -> None:
    short = "schedule=evigrad.Schedule(epochs=6, burn_in=1, every=1, steps=1)"
    fraction = "validation_fraction=0.5"
    names = run_blocks("docs/choosing.md", {fraction: f"{fraction}, {short}, progress=False"})
    assert names["result"].weight_choice.num_held_out == 719
    bracket = names["bracket"]
    assert bracket.lower < names["exact"] < bracket.upper
    assert "gram" in capsys.readouterr().out


def test_the_example_on_the_marginal_likelihood_agrees_with_test_data(
    capsys: pytest.CaptureFixture[str],
) -> None:
    table = run_blocks("docs/marginal_likelihood.md")["table"]
    best = max(table, key=lambda row: row[1])
    assert best == min(table, key=lambda row: row[3])
    assert [row[2] for row in table] == sorted(row[2] for row in table)
    page = (ROOT / "docs" / "marginal_likelihood.md").read_text()
    assert capsys.readouterr().out in page


@pytest.mark.long
def test_the_blocks_on_layers_and_structures_run(capsys: pytest.CaptureFixture[str]) -> None:
    from evigrad.network.layers import RULES

    rules = dict(RULES)
    try:
        names = run_blocks("src/evigrad/network/README.md")
    finally:
        RULES.clear()
        RULES.update(rules)
    (value, paths), (again, closed) = names["generic"], names["closed"]
    assert value == pytest.approx(again, rel=1e-6)
    assert "generic" in paths["mixed.weight"] and closed["mixed.weight"] == "bilinear"
    assert list(names["log_dets"].values()) == sorted(names["log_dets"].values())
    assert names["scaled_paths"]["scale"] == "channel-scale"
    assert capsys.readouterr().out


@pytest.mark.long
def test_the_first_block_of_the_readme_converges(capsys: pytest.CaptureFixture[str]) -> None:
    run_blocks("README.md")
    printed = re.findall(NUMBER, capsys.readouterr().out)
    text = (ROOT / "README.md").read_text()
    shown = re.findall(NUMBER, text.partition("```text\n")[2].partition("```")[0])
    assert list(map(float, printed)) == pytest.approx(list(map(float, shown)), abs=0.1, rel=0.05)


def _check_effective_parameters(names: dict[str, Any]) -> None:
    """The product of precision and squared weights is close to the exact γ."""
    from evigrad.training.fixed_point import FixedPoint

    exact = names["result"].evidence.with_estimator("ntk-N-C")
    exact.backward(names["x"], names["y"])
    gamma = FixedPoint(exact).effective_parameters().tolist()
    assert list(names["effective"].values()) == pytest.approx(gamma, rel=0.2, abs=0.01)


# A few epochs, and one step in each round.
BRIEF = "schedule=evigrad.Schedule(epochs=4, steps=1)"
# Pages with scripts that take a minute and more: what makes them short.
SHORT = {
    "docs/fit.md": {
        "(x, y), progress=False": f"(x, y), {BRIEF}, progress=False",
        "pairs, progress=False": f"pairs, {BRIEF}, progress=False",
        "cars.likelihood, progress=False": f"cars.likelihood, {BRIEF}, progress=False",
    },
    "docs/likelihoods.md": {
        "epochs=300": "epochs=2, steps=1",
        "epochs=200": "epochs=2, steps=1",
        "epochs=250": "epochs=2, steps=1",
        "(x, y), likelihood=likelihood, progress": (
            f"(x, y), likelihood=likelihood, {BRIEF}, progress"
        ),
        "(x, targets), likelihood=likelihood, progress": (
            f"(x, targets), likelihood=likelihood, {BRIEF}, progress"
        ),
        "likelihood=Ordinal(4), progress": (f"likelihood=Ordinal(4), {BRIEF}, progress"),
        "(x, visits), likelihood=likelihood, progress": (
            f"(x, visits), likelihood=likelihood, {BRIEF}, progress"
        ),
        "EvidenceClassifier(random_state=0)": "EvidenceClassifier(random_state=0, epochs=4)",
        'class_weight="balanced", random': 'class_weight="balanced", epochs=4, random',
        "(items, chosen), progress": (f"(items, chosen), {BRIEF}, progress"),
        "NoisyLabels(0.15), progress": f"NoisyLabels(0.15), {BRIEF}, progress",
    },
    "docs/inputs.md": {
        "Schedule(epochs=2)": "Schedule(epochs=2, steps=2)",
        "epochs=60, batch_size=10": "epochs=2, batch_size=10, burn_in=0, every=1, steps=1",
        "epochs=60, batch_size=30": "epochs=2, batch_size=30, burn_in=0, every=1, steps=1",
        "epochs=60, burn_in=10": "epochs=2, burn_in=1",
        "epochs=100, batch_size": "epochs=60, batch_size",
    },
    "docs/fine_tuning.md": {
        "epochs=30": "epochs=2",
        "epochs=60, batch_size=25": "epochs=2, batch_size=25, steps=1",
        "epochs=500": "epochs=2",
        "subset=200": "subset=60",  # 600 rows instead of 2000
        "epochs=50, batch": "epochs=5, batch",
        "epochs=4, batch": "epochs=2, batch",
    },
}


def run_short(page: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Run the blocks of a page for a few epochs, in a folder for the files that it writes."""
    monkeypatch.chdir(folder)
    return run_blocks(page, SHORT[page])


@pytest.mark.one_in(len(SHORT))
@pytest.mark.parametrize("page", SHORT)
def test_the_blocks_of_the_guides_run(
    page: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """For a few epochs; what they come to takes longer."""
    names = run_short(page, tmp_path, monkeypatch)
    match page.removeprefix("docs/").removesuffix(".md"):
        case "fit":
            assert names["result"].history[-1]["log_evidence"] < 0
        case "likelihoods":
            assert names["slope"].shape == (1, 3)
        case "inputs":
            assert names["angle"] != pytest.approx(0.1)
            assert names["width"] > 1.5
            rotation = names["model"].invariance.named_ranges()["rotation"]
            assert names["learner"].hyper_steps == 4 and rotation != pytest.approx(0.1)
        case "fine_tuning":
            assert list(names["tuned"].evidence.prior.means())[-1] == "output.bias"
            assert names["run"].epoch == 2
            loaded = names["network"].state_dict()
            for name, weight in names["model"].state_dict().items():
                assert torch.equal(weight, loaded[name])
    assert capsys.readouterr().out


@pytest.mark.long
def test_the_blocks_of_the_guides_converge(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = run_blocks("docs/fit.md")
    assert names["result"].train_metrics["accuracy"] >= 0.95
    _check_effective_parameters(names)
    names = run_blocks("docs/likelihoods.md")
    slope = names["slope"]
    assert slope.flatten().tolist() == pytest.approx([1.0, -0.5, 0.0], abs=0.2)
    assert names["joint"].history[-1]["likelihood/depth/noise"] == pytest.approx(0.2, abs=0.03)
    assert names["known"].history[-1]["noise"] == pytest.approx(0.2, abs=0.05)
    assert names["lifetimes"].model.weight.item() == pytest.approx(1.0, abs=0.15)
    thresholds = names["ratings"].evidence.likelihood.thresholds - names["ratings"].model.bias
    assert thresholds.tolist() == pytest.approx([-1.0, 0.0, 2.0], abs=0.25)
    dispersion = names["counted"].history[-1]["dispersion"]
    assert dispersion == pytest.approx(0.5, abs=0.15)
    assert names["is_rare"][names["label"] == 1].mean() > 0.8
    assert names["divided"][:, 1].mean() == pytest.approx(names["label"].mean(), abs=0.02)
    rewards = torch.stack([names["learned"].flatten(), names["reward"].flatten()])
    assert float(torch.corrcoef(rewards)[0, 1]) > 0.95
    names = run_blocks("docs/inputs.md")
    assert names["majority"].train_metrics["accuracy"] >= 0.9
    assert names["counting"].train_metrics["accuracy"] >= 0.98
    # Digits rotated by up to 90 degrees, ±1.57 radians: half of that is plainly learned.
    assert 0.8 <= names["angle"] <= 2.4
    assert names["turned"].test_metrics["accuracy"] >= 0.85
    monkeypatch.chdir(tmp_path)
    names = run_blocks("docs/fine_tuning.md")
    assert names["tuned"].test_metrics["accuracy"] >= 0.9
    x, y = names["old"]
    assert (names["continued"](x) - y).square().mean().sqrt() < 0.4
    assert capsys.readouterr().out


@pytest.mark.long
def test_the_blocks_on_scale_run(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With one process."""
    environment = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    short = {
        "epochs=10, epoch_size=5000, every=3": "epochs=4, epoch_size=1000, every=1, steps=1",
        "for _ in range(20)": "for _ in range(2)",
        "for epoch in range(20)": "for epoch in range(2)",
        "epochs=20": "epochs=2, steps=1",
        "range(30)": "range(2)",
        "epochs=30": "epochs=2, steps=1",
        "batch_size=50": "batch_size=100",
    }
    try:
        names = run_blocks("docs/scale.md", short)
    finally:
        distributed.destroy_process_group()
    assert names["learner"].hyper_steps == 2  # of the last block, on sharded weights
    for name, weight in names["model"].named_parameters():
        assert torch.equal(weight, names["sharded"].get_parameter(name).to_local())
    assert capsys.readouterr().out.endswith("1 ranks, 0 bytes sent by this one\n")


def pages() -> list[Path]:
    return [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def test_what_blocks_import_and_call_exists() -> None:
    """Names and keywords, also on pages whose blocks are long."""
    import evigrad

    for page in [*pages(), ROOT / "src/evigrad/network/README.md"]:
        code = "\n".join(re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL))
        imported: dict[str, Any] = {"evigrad": evigrad}
        for node in ast.walk(ast.parse(code)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("evigrad"):
                names = [alias.name for alias in node.names]
                module = pytest.importorskip(node.module or "")
                imported |= {name: getattr(module, name) for name in names}
        for node in ast.walk(ast.parse(code)):
            if isinstance(node, ast.Call) and (name := ast.unparse(node.func)) in CHECKED:
                function = operator.attrgetter(name)(SimpleNamespace(**imported))
                parameters = inspect.signature(function).parameters
                named = {keyword.arg for keyword in node.keywords} - {None}
                assert named <= set(parameters), f"{page.name}: {ast.unparse(node)}"


def title(page: Path) -> str:
    """Return the heading of a page, without marks of code."""
    return page.read_text().partition("\n")[0].removeprefix("# ").replace("`", "")


def test_every_page_with_code_is_run() -> None:
    """Somewhere in this file."""
    source = Path(__file__).read_text()
    for page in pages()[1:]:
        if "```python" in page.read_text():
            assert f'"docs/{page.name}"' in source, page.name


def test_the_site_is_small() -> None:
    texts = [page.read_text() for page in pages()[1:]]
    assert len(texts) <= 22
    assert sum(len(text.split()) for text in texts) <= 32_000


def test_a_page_has_one_name() -> None:
    """The navigation takes it from the heading. A link to a page that reads as a name has it too.

    Links to sections, and phrases within a sentence, which begin in lower case, say what they are
    about.
    """
    navigation = (ROOT / "mkdocs.yml").read_text().partition("\nnav:\n")[2]
    listed = re.findall(r"^ +- (?:(.*): )?(\w+\.md)$", navigation, re.MULTILINE)
    assert sorted(name for _, name in listed) == sorted(
        ["changelog.md", *(page.name for page in pages()[1:])]
    )
    assert not [name for words, name in listed if words]
    names = [title(page) for page in pages()[1:]]
    assert len(set(names)) == len(names)
    wrong = []
    for page in pages():
        for words, target in re.findall(r"\[([^\]\[]+)\]\(([^)#:]+\.md)\)", page.read_text()):
            linked = page.parent / target
            if linked.parent == ROOT / "docs" and linked.is_file() and words[0].isupper():
                if words.replace("`", "") != title(linked):
                    wrong.append(f"{page.name}: [{words}]({target}) is {title(linked)!r}")
    assert not wrong, "\n".join(wrong)


def test_the_picture_of_the_layers_is_the_import_contract() -> None:
    """Boxes of one height are the modules of one layer, and the top layer is the first."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    (contract,) = settings["contracts"]
    layers = [
        sorted(name.strip().removeprefix("evigrad.") for name in layer.split("|"))
        for layer in contract["layers"]
    ]
    picture = (ROOT / "docs" / "images" / "architecture.svg").read_text()
    assert "images/architecture.svg" in (ROOT / "docs" / "architecture.md").read_text()
    boxes = re.findall(
        r'<rect class="\w" x="(\d+)" y="(\d+)" width="(\d+)".*<text class="name" x="(\d+)"'
        r' y="(\d+)">(\w+)<',
        picture,
    )
    drawn: dict[int, list[str]] = {}
    for left, top, width, x, y, name in boxes:
        # A name stands inside its box.
        assert 0 < int(x) - int(left) < int(width) and 0 < int(y) - int(top) < 26
        drawn.setdefault(int(top), []).append(name)
    assert [sorted(drawn[top]) for top in sorted(drawn)] == layers


def test_links_lead_somewhere() -> None:
    for page in [*pages(), ROOT / "src/evigrad/network/README.md"]:
        for target in re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name}: {target}"


@pytest.mark.long
def test_the_blocks_on_the_posterior_run(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("botorch")
    pytest.importorskip("torch_pruning")
    monkeypatch.chdir(tmp_path)
    short = "evigrad.Schedule(epochs=2, burn_in=1, every=1, steps=1)"
    changes = {"data.train, progress": f"data.train, schedule={short}, progress"}
    names = run_blocks("docs/posterior.md", {**changes, "epochs=300": "epochs=3, burn_in=1"})
    epistemic = names["predictive"].epistemic_variance.squeeze(1).tolist()
    assert epistemic == sorted(epistemic)
    assert "monte-carlo" in capsys.readouterr().out


@pytest.mark.filterwarnings("ignore::UserWarning:laplace", "ignore::DeprecationWarning")
def test_the_numbers_are_those_of_laplace_torch(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("laplace")
    names = run_blocks("docs/from_laplace_torch.md")
    theirs, ours = names["evidences"]
    assert ours == pytest.approx(theirs, rel=1e-10)
    theirs, ours = names["probabilities"]
    assert (ours - theirs).abs().max() < 1e-10
    assert capsys.readouterr().out


@pytest.mark.long
def test_the_blocks_on_scikit_learn_run(capsys: pytest.CaptureFixture[str]) -> None:
    short = {"epochs": 4, "settings": {"burn_in": 1, "every": 3, "steps": 1}}
    names = run_blocks(
        "docs/sklearn.md",
        {
            "EvidenceRegressor(random_state=0)": "EvidenceRegressor(**short)",
            "epochs=60, random_state=0": "**short",
            "epochs=40, random_state=0": "**short",
            "epochs=80, random_state=0": "**short",
            "epochs=20, random_state=0": "**short",
            "EvidenceClassifier(random_state=0)": "EvidenceClassifier(**short)",
            'settings={"prior_lr": 0.05}': 'epochs=4, settings={"prior_lr": 0.05, "burn_in": 1}',
            "import numpy as np\n": f"import numpy as np\nshort = {short}\n",
        },
    )
    assert names["std"].shape == (100,)
    assert "kfac-N-C" in capsys.readouterr().out


@pytest.mark.long
def test_the_blocks_on_other_trainers_run(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("accelerate")
    pytest.importorskip("lightning")
    pytest.importorskip("tensorboard")
    pytest.importorskip("wandb")
    monkeypatch.chdir(tmp_path)
    for folder in ("CACHE", "CONFIG", "DATA"):
        monkeypatch.setenv(f"WANDB_{folder}_DIR", str(tmp_path / folder))
    monkeypatch.setenv("WANDB_SILENT", "true")
    short = {"range(40)": "range(2)", "epochs=40": "epochs=2", "range(20)": "range(2)"}
    short |= {"range(80)": "range(4)", "epoch >= 40": "epoch >= 2"}
    short |= {"(own, train, evigrad.Schedule(epochs=20)": "(own, train, evigrad.Schedule(epochs=2)"}
    two = "(epochs=2, burn_in=1, every=1, steps=1), "
    short |= {"(epochs=20), callbacks": f"{two}callbacks", "max_epochs=20": "max_epochs=1"}
    short |= {'"ntk-400-rows-anchored", num': '"ntk-50-1", num', "epochs=30": "epochs=1"}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module="lightning")
        warnings.filterwarnings("ignore", "The model has normalization layers")
        names = run_blocks("docs/trainers.md", short)
    assert names["estimate"].is_bound
    assert names["learned"].history[-1]["step"] == 8
    assert names["rounds"].hyper_steps == 20
    assert names["tuning"].history[-1]["step"] == 10
    assert "log_evidence" in capsys.readouterr().out
    reader: Any = import_module("tensorboard.backend.event_processing.event_accumulator")
    accumulator = reader.EventAccumulator(str(tmp_path / "board")).Reload()
    columns = accumulator.Tags()["scalars"]
    assert {"loss", "log_evidence", "test_accuracy", "hyper_steps"} <= set(columns)
    assert [event.step for event in accumulator.Scalars("loss")] == [1, 2]
    (offline,) = (tmp_path / "board").glob("wandb/offline-run-*/*.wandb")
    written = offline.read_bytes()
    assert not [name for name in columns if name.encode() not in written]
