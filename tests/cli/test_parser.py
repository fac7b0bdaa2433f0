"""Options, their shorter names, configuration files, and mistakes in them."""

import inspect
import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("jsonargparse")
pytest.importorskip("rich")
pytest.importorskip("sklearn")

import yaml

from evigrad.cli import doctor, main, train
from evigrad.cli.help import COMMANDS
from evigrad.cli.parser import KEYS, PARTS, by_key, by_name, flag
from evigrad.cli.setup import set_up
from evigrad.errors import ConfigurationError, nearest
from evigrad.training import fit

PARSERS = {"train": train.make_parser(), "doctor": doctor.make_parser()}
DEFAULTS = dict(PARSERS["train"].get_defaults().items())


@pytest.fixture(autouse=True)
def parsers(monkeypatch: pytest.MonkeyPatch) -> None:
    for module, name in ((train, "train"), (doctor, "doctor")):
        monkeypatch.setattr(module, "make_parser", lambda name=name: PARSERS[name])


def run(*arguments: Any, code: int = 0) -> None:
    assert main([str(argument) for argument in arguments]) == code


def error_of(capsys: Any, *arguments: Any) -> str:
    run(*arguments, code=2)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: ")
    assert captured.err.count("\n") == 1  # one line, no traceback
    return captured.err


@pytest.mark.parametrize("command", COMMANDS)
def test_the_help_is_one_screen_of_options_that_exist(capsys, command):
    run(command, "--help")
    text = capsys.readouterr().out
    lines = text.splitlines()
    assert len(lines) <= 40 and max(map(len, lines)) <= 100
    parser = PARSERS[command]
    shown = re.findall(r"--[a-z][a-z.-]*[a-z]", text)
    assert shown
    options = {"--config", "--print-config", "--help-all", *map(flag, parser.types)}
    names = (KEYS.get(name[2:].replace("-", "_")) or name[2:] for name in shown)
    assert set(map(flag, names)) <= options
    # A default in parentheses ends the description of its option.
    of_option = r"^  (--[a-z-]+)(?:(?!^  --|\n\n)[\s\S])*\(([a-z0-9-]+)\)$"
    defaults = dict(re.findall(of_option, text, re.MULTILINE))
    assert defaults["--data"] == "digits" and defaults["--estimator"] == "auto"
    for name, value in defaults.items():
        assert value in (str(DEFAULTS[name[2:].replace("-", "_")]), "all"), name


@pytest.mark.parametrize("command", PARSERS)
def test_help_all_has_every_option_with_type_and_default(capsys, command):
    run(command, "--help-all")
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= 100
    for noise in ("``", "In Python", "Optimization(", "Laplace.", "None"):
        assert noise not in text
    words = " ".join(text.split())
    for key, default in PARSERS[command].get_defaults().items():
        if key not in ("config",):
            assert re.search(rf"{flag(key)} [^(]", words), key
            if isinstance(default, int | float | str):
                assert f"default: {default})" in words.replace("- ", "-"), key
    assert words.count("(type: ") == len(PARSERS[command].types)


def test_every_option_of_fit_is_on_the_command_line():
    # Those that only Python can give, or that the command gives itself.
    beside = {"model", "train", "test", "hyperparameters", "validation", "callbacks"}
    beside |= {"process_group", *PARTS}
    options = set(PARSERS["train"].types)
    assert set(inspect.signature(fit).parameters) - beside <= options
    assert set(inspect.signature(set_up).parameters) <= options
    for name, kind in PARTS.items():
        assert {f"{name}.{field.name}" for field in fields(kind)} <= options


# A value of each type, as text and as it is parsed.
VALUES: dict[Any, tuple[str, Any]] = {int: ("7", 7), float: ("0.25", 0.25)}


def value_of(key: str) -> tuple[str, Any]:
    kind = PARSERS["train"].types[key]
    if kind is bool:
        return str(not DEFAULTS[key]).lower(), not DEFAULTS[key]
    for plain, value in VALUES.items():
        if kind in (plain, plain | None) or plain in getattr(kind, "__args__", ()):
            return value
    names = [name for name in re.findall(r"'([a-z0-9_]+)'", str(kind)) if name != DEFAULTS[key]]
    return (names[0], names[0]) if names else ("x", "x")


def test_former_names_and_keys_mean_the_options_of_groups(tmp_path):
    parser, file = PARSERS["train"], tmp_path / "c.yaml"
    former = {field.name for name in PARTS if name != "anchoring" for field in fields(PARTS[name])}
    assert former <= set(KEYS) and set(KEYS.values()) <= set(parser.types)
    assert not former & {key for key in parser.types if "." not in key}
    texts = {key: value_of(key)[0] for key in KEYS.values()}
    values = {key: value_of(key)[1] for key in KEYS.values()}
    assert all(DEFAULTS[key] != value for key, value in values.items())

    def values_by(*arguments: str) -> dict[str, Any]:
        options = parser.read(arguments)
        return {key: options[key] for key in values}

    flat = {name: texts[key] for name, key in KEYS.items()}
    nested: dict[str, dict[str, str]] = {part: {} for part in PARTS}
    for key, text in texts.items():
        part, _, name = key.partition(".")
        nested[part][name] = text
    for content in (flat, texts, nested):
        file.write_text(re.sub("'(?!')", "", str(content)))  # YAML without quotes
        assert values_by("--config", str(file)) == values
    names = {**KEYS, **{key: key for key in values}}
    for change in (str, lambda name: name.replace("_", "-")):
        for typed in (names.items(), reversed(names.items())):
            assert values_by(*(f"--{change(name)}={texts[key]}" for name, key in typed)) == values
    words = (word for name, key in KEYS.items() for word in (f"--{name}", texts[key]))
    assert values_by(*words) == values
    assert by_key(by_name(parser.get_defaults())) == by_key(DEFAULTS) == DEFAULTS


@pytest.mark.parametrize(
    ("typed", "value"),
    [
        ("--compare-map", True),
        ("--compare_map --seed 1", True),
        ("--compare-map yes", True),
        ("--compare-map=false", False),
        ("--no-compare-map", False),
        ("--no_compare_map --seed 1", False),
        ("--compare-map --no-compare-map", False),
    ],
)
def test_switches(typed, value):
    assert PARSERS["train"].read(typed.split()).compare_map is value


def test_switches_of_groups():
    options = PARSERS["train"].read(["--no-anchoring.grouped", "--noise-on-loss"])
    assert options.anchoring.grouped is False and options.optimization.noise_on_loss is True


def test_options_after_a_file_replace_what_it_says(capsys, tmp_path):
    file = tmp_path / "c.yaml"
    file.write_text("schedule: {epochs: 50}\nlr: 0.5\ncompare_map: true\nmemory:\n")
    run("train", "--config", file, "--schedule.epochs", 7, "--lr_min=0.1", "--print_config")
    options = yaml.safe_load(capsys.readouterr().out)
    assert options["schedule"]["epochs"] == 7 and options["compare_map"] is True
    assert (options["optimization"]["lr"], options["optimization"]["lr_min"]) == (0.5, 0.1)
    assert options["estimator"] == "auto"


def test_several_starts_and_numbers_of_bytes(tmp_path):
    parser, file = PARSERS["train"], tmp_path / "c.yaml"
    assert parser.read(["--start-decay", "[0.1,1]"]).optimization.start_decay == [0.1, 1]
    file.write_text("micro_batch: 7\nmemory_budget: 1000000\nstart_decay: [0.1, 1.0]\n")
    options = parser.read(["--config", str(file)])
    assert (options.memory.micro_batch, options.memory.memory_budget) == (7, 1000000)
    assert options.optimization.start_decay == [0.1, 1]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("trian", "got 'trian'. Did you mean 'train'?"),
        ("train --estimater ntk-10-1", "no option --estimater. Did you mean '--estimator'?"),
        ("train --run_dri x", "no option --run-dri. Did you mean '--run-dir'?"),
        ("train --schedule.evry 3", "--schedule.evry. Did you mean '--schedule.every'?"),
        ("doctor --steps 3", "There is no option --schedule.steps."),
        ("train --epochs many", "--schedule.epochs must be a whole number, got 'many'"),
        ("train --lr fast", "--optimization.lr must be a number, got 'fast'"),
        ("train --optimizer sdg", "must be adam or sgd, got 'sdg'. Did you mean 'sgd'?"),
        ("train --prior layer", "--prior must be scalar, layerwise or diagonal, got 'layer'"),
        ("train --micro-batch some", "must be a whole number or auto, got 'some'"),
        ("train --micro-batch 0", "--memory.micro-batch must be a positive integer"),
        ("train --memory-budget 1GiB", "--memory.memory-budget has no effect without micro_batch"),
        (
            "train --micro-batch auto --memory-budget lots",
            "an amount such as 8GiB or 500MB, got 'lots'",
        ),
        ("train --autocast float64", "--memory.autocast must be bfloat16, got 'float64'"),
        ("train --compare-map perhaps", "--compare-map must be true or false, got 'perhaps'"),
        ("train --epochs", "--schedule.epochs needs a value"),
        ("train digits", "Options start with --, got 'digits'"),
        ("train --schedule.every 0", "--schedule.every must be an integer of at least 1, got 0"),
        ("train --anchoring.share 2", "--anchoring.share must lie in [0, 1), got 2"),
        ("train --subset 60 --anchoring.share 0.5 --estimator ntk-9-1", "ntk-9-1 has no anchors"),
        ("train --config nowhere.yaml", "--config: File does not exist"),
        ("train --data digit", "Did you mean 'digits'?"),
        ("train --model digitnet", "Did you mean 'digitsnet'?"),
        ("train --estimator nkt-100-1", "Did you mean 'ntk-100-1'?"),
        ("train --estimator ntk-auto-1", "Use 'ntk-400-rows-anchored'"),
        ("train --evaluate-with nkt-100-1", "Did you mean 'ntk-100-1'?"),
        ("train --likelihood categoricl", "Did you mean 'categorical'?"),
        ("train --likelihood gaussian", "--likelihood is only for tables"),
        ("train --subset 50 --estimator ntk-100-1", "num_data is 50"),
        (
            "train --epochs 3 --burn-in 10",
            "--schedule.burn-in must be at most epochs = 3, got 10",
        ),
        ("train --model mininet", "at least 28x28"),
        ("train --device gpu", "'gpu' is not available. A GPU's name is cuda."),
        ("train --threads 0", "--threads must be at least 1"),
        ("train --threads 1000000", "--threads must be at most 1024, got 1000000"),
        ("train --seed -1", "--seed must be at least 0, got -1"),
        (f"train --seed {2**64}", "--seed must be at most"),
        *[
            (f"train --flip --model cnn --{name} {10**22}", f"{name} must be at most 1000")
            for name in ("epochs", "steps", "every", "width", "depth", "samples")
        ],
        ("train --validation-fraction 2", "--validation-fraction must be a number between 0 and 1"),
        (
            "train --estimator none --validation-fraction 0.1",
            "--validation-fraction requires an estimator",
        ),
        ("train --estimator none --compare-map", "--compare-map needs an estimator"),
        ("doctor --estimator none", "Use a name such as ntk-100-1"),
        *[
            (f"{command} --estimator map", "For plain MAP training, use estimator=None")
            for command in ("train", "doctor")
        ],
        ("train --estimator augerino", "experiments/augerino"),
        ("doctor --batch-size 0", "--schedule.batch-size must be an integer of at least 1"),
    ],
)
def test_mistakes_are_one_clean_line(capsys, tmp_path, monkeypatch, arguments, words):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("EVIGRAD_DATA", raising=False)
    assert words in error_of(capsys, *arguments.split())
    assert list(tmp_path.iterdir()) == []  # and nothing was written


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("epoch: 4", "unknown key 'epoch'. Did you mean 'epochs'?"),
        ("schedule: {epoch: 4}", "unknown key 'schedule.epoch'. Did you mean 'schedule.epochs'?"),
        ("epochs: four", "--schedule.epochs must be a whole number, got 'four'"),
        ("schedule: 4", "schedule must contain options such as epochs, got 4"),
        ("epochs: 4\nschedule: {epochs: 5}", "'schedule.epochs' is set twice"),
        ("schedule: {epochs: 4, epochs: 5}", "'epochs' is set twice"),
        ("split_blocks: true", "'split_blocks' was removed. Delete it. To save memory, use"),
        ("prior_rate: 0.1", "'prior_rate' was removed. Delete it. It keeps its former default."),
        ("step_budget: 5", "'step_budget' was removed. Delete it. Omit estimator: auto, too"),
        ("batch_size: null", "--schedule.batch-size must not be null. Remove it to use the"),
        ("a: b: c", "config"),
        ("data: {a: 3}", "--data must be text, got '{'a': 3}'"),
    ],
)
def test_mistakes_in_a_file(capsys, tmp_path, content, words):
    file = tmp_path / "c.yaml"
    file.write_text(content + "\n")
    assert words in error_of(capsys, "train", "--config", file)


def test_a_file_in_another_encoding(capsys, tmp_path):
    file = tmp_path / "c.yaml"
    file.write_bytes("epochs: 4 # caf\xe9\n".encode("latin-1"))
    assert "must be a text file in UTF-8" in error_of(capsys, "train", "--config", file)


def test_options_of_older_versions_load_at_their_defaults(tmp_path):
    file = tmp_path / "c.yaml"
    file.write_text("split_blocks: false\naugerino_weight: 0.01\nevery: 2\n")
    assert PARSERS["train"].read(["--config", str(file)]).schedule.every == 2


# What would be ignored, with which other options, and words of the error.
IDLE = [
    ("initial_range", 0.2, "", "without random transforms of the images"),
    ("learn_invariance", "false", "", "without random transforms of the images"),
    ("samples", 3, "", "without random transforms of the images"),
    ("average", "probabilities", "", "without random transforms of the images"),
    ("initial_range", 0.2, "--flip", "without random transforms of the images"),
    ("hyper_every", 1, "", "unless the evidence learns parameters of the model"),
    ("hyper_lr", 0.1, "", "unless the evidence learns parameters of the model"),
    *[
        (name, value, "--estimator none", "without an estimator")
        for name, value in (
            *(("burn_in", 3), ("every", 2), ("steps", 7), ("prior_blocks", 2)),
            *(("prior_update", "fixed_point"), ("start_decay", 0.1), ("root", "fisher")),
            *(("hyper_lr", 0.1), ("hyper_every", 1), ("log_det_weight", 0.5), ("prior_lr", 0.3)),
        )
    ],
    ("noise_on_loss", "true", "", "is only for training without an estimator"),
    ("prior_lr", 0.3, "", "and a likelihood without a noise to learn"),
    ("prior_lr_min", 0, "--prior-update fixed_point", "and a likelihood without a noise"),
    ("start_decay", 0.1, "--prior-update adam", "which starts from the precision"),
    ("start_decay", "[0.1,1.0]", "--epochs 3", "too few rounds"),
    ("precision", 3.0, "", "Set start_decay"),
    ("rows_dtype", "bfloat16", "--estimator kfac-N-C", "only with ntk estimators"),
    ("root", "fisher", "--estimator kfac-N-C", "whose blocks contain all outputs"),
]


@pytest.mark.parametrize(("name", "value", "more", "words"), IDLE)
def test_what_would_be_ignored_is_refused(capsys, tmp_path, name, value, more, words):
    others = f"--run-dir {tmp_path / 'run'} --subset 60 --test-subset 9 {more}".split()
    error = error_of(capsys, "train", f"--{name}={value}", *others)
    assert words in error
    if name != "rows_dtype":  # an error of the evidence
        assert error.startswith(f"error: {flag(KEYS.get(name) or name)} ")
    assert not (tmp_path / "run").exists()


# Names that are nothing's misspelling, and such that are.
@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        *[(name, None) for name in ("dry-run", "learning-rate", "momentous", "hyper-x")],
        *[("epohcs", "epochs"), ("num-epochs", "epochs"), ("batchsize", "batch-size")],
        *[("hyper-stesp", "hyper-steps"), ("run-dri", "run-dir"), ("presicion", "precision")],
    ],
)
def test_hints_are_for_slips_alone(capsys, typed, meant):
    words = error_of(capsys, "train", f"--{typed}")
    assert (f"Did you mean '--{meant}'" in words) if meant else ("Did you mean" not in words)


def test_a_table_is_not_taken_for_another_one_in_its_folder():
    tables = ["uci/wine", "uci/kin8nm", "digits"]
    assert nearest("uci/wnie", tables) == " Did you mean 'uci/wine'?"
    assert nearest("uci/name", tables) == nearest("uci/NAME", tables) == ""


def test_an_error_names_the_option_if_it_begins_with_one():
    error = PARSERS["train"].named(ConfigurationError("hyper_lr must be positive, got 0."))
    assert str(error) == "--optimization.hyper-lr must be positive, got 0."
    other = ConfigurationError("Training failed, because lr is 3.")
    assert PARSERS["train"].named(other) is other


EXPERIMENTS = sorted((Path(__file__).parent.parent.parent / "experiments").glob("*.yaml"))


@pytest.mark.parametrize("file", EXPERIMENTS, ids=lambda file: file.stem)
def test_the_shipped_experiments_are_valid(file):
    options = PARSERS["train"].read(["--config", str(file)])
    written = yaml.safe_load(file.read_text())
    assert {name: options.as_dict()[name] for name in written if name not in PARTS} == {
        name: value for name, value in written.items() if name not in PARTS
    }
    for name in written.keys() & PARTS:  # nested like the options, by their full names
        assert {key: options[name][key] for key in written[name]} == written[name]
    assert not written.keys() & KEYS
