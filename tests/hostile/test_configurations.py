"""Files of options: what is in them is read as plain values, and runs nothing."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("jsonargparse")
pytest.importorskip("rich")
pytest.importorskip("sklearn")

import yaml
from hostile.cases import errors_of_ours, hostile, mutated, texts, values
from hypothesis import strategies as st

from evigrad.cli import main, train
from evigrad.cli.parser import KEYS, PARTS
from evigrad.cli.train import make_parser
from evigrad.configuration import LONGEST, check_plain
from evigrad.errors import ConfigurationError

VALID = Path("experiments/mnist5k.yaml").read_bytes()
OPTIONS = sorted({*make_parser().types, *KEYS, *PARTS})


class Parsed(BaseException):
    """The end of what these tests look at: the options were read, and a run would begin."""


@pytest.fixture(autouse=True)
def no_training(monkeypatch: pytest.MonkeyPatch) -> None:
    parser = make_parser()  # which takes longer than reading a file

    def begin(*arguments: Any) -> int:
        raise Parsed

    monkeypatch.setattr(train, "make_parser", lambda: parser)
    monkeypatch.setattr(train, "run", begin)


def read(folder: Path, content: bytes) -> bool:
    """Whether a run would begin; else the command has ended with the code of a mistake."""
    file = folder / "options.yaml"
    file.write_bytes(content)
    try:
        assert main(["train", "--config", str(file)]) == 2
    except Parsed:
        return True
    return False


def test_what_is_no_plain_value_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    for content, words in [
        ("data: !!python/object/apply:os.mkdir [executed]", "has a tag"),
        ("data: !!python/object/new:os.mkdir [executed]", "has a tag"),
        ("data: !!python/name:os.mkdir", "has a tag"),
        ("data: {class_path: os.mkdir, init_args: {path: executed}}", "--data must be text"),
        ("memory: {rows_device: {class_path: os.mkdir, init_args: {path: x}}}", "nested too"),
        ("optimizer: os.mkdir", "must be adam or sgd"),
        ("optimization: {optimizer: torch.optim.SGD}", "must be adam or sgd"),
        ("prior: {class_path: os.mkdir, init_args: {path: executed}}", "must be scalar, layerwise"),
        ("data: &a digits\nmodel: *a", "'a', which is not supported"),
        ("epochs: 3\nlr: 0.1\nepochs: 4", "'epochs' is set twice"),
        ("schedule: {epochs: 3, epochs: 4}", "'epochs' is set twice"),
        ("epochs: " + "9" * 5000, "Exceeds the limit"),
        ("data: " + "[" * 3000 + "]" * 3000, "nested too deeply"),
        ("config: options.yaml", "loop"),
        ("epochs: 3\n---\nepochs: 4", "single document"),
        ("", "Unexpected config"),
        ("epochs:\n\t3", "cannot start any token"),
    ]:
        monkeypatch.chdir(tmp_path)
        assert not read(tmp_path, content.encode())
        assert words in capsys.readouterr().err
        assert os.listdir(tmp_path) == ["options.yaml"]


def test_a_few_lines_that_stand_for_billions_of_values_are_refused_at_once() -> None:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 30)]
    with pytest.raises(ConfigurationError, match="line 1 has an anchor"):
        check_plain("\n".join(lines))
    with pytest.raises(ConfigurationError, match="at most 1,000,000 characters"):
        check_plain("#" * (LONGEST + 1))


def test_plain_values_are_read(tmp_path: Path) -> None:
    assert read(tmp_path, VALID)
    assert read(tmp_path, b"epochs: 3\nlr: 1e-3\ndata: 'yes'\ncompare_map: no\nlikelihood: null\n")


@hostile(mutated(VALID), 60, 4_000, 0.15)
def test_mutated_files(tmp_path: Path, content: bytes) -> bool:
    return read(tmp_path, content)


@hostile(st.dictionaries(st.sampled_from(OPTIONS), values(), max_size=3), 20, 4_000, 0.05)
def test_options_of_any_value(tmp_path: Path, options: dict[str, Any]) -> bool:
    begins = read(tmp_path, json.dumps(options).encode())
    with errors_of_ours():
        content = yaml.safe_dump(options, allow_unicode=False)
        read(tmp_path, content.encode(errors="surrogatepass"))
    return begins


@hostile(
    st.lists(st.one_of(texts(), st.sampled_from(["--data", "--lr", "=", "--no-", "--"]))),
    30,
    3_000,
    0.01,
)
def test_words_behind_the_command(tmp_path: Path, words: list[str]) -> bool:
    try:
        assert main(["train", *words]) in (0, 2)
    except Parsed:
        return True
    return False
