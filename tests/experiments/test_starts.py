"""The preset ``paper`` of every experiment starts on a processor."""

import pytest
from torch.optim.optimizer import register_optimizer_step_post_hook

from experiments.__main__ import main
from experiments.definition import paper_experiments

STEPS = 2


@pytest.mark.long
@pytest.mark.parametrize("name", [name for name in paper_experiments() if name != "fig2"])
def test_a_paper_preset_starts(name, data_dir, tmp_path, capsys):
    taken = 0

    def interrupt(optimizer, *_):
        nonlocal taken
        taken += 1
        if taken == STEPS:
            raise KeyboardInterrupt

    where = ["--results", str(tmp_path), "--data-dir", str(data_dir), "--device", "cpu"]
    handle = register_optimizer_step_post_hook(interrupt)
    try:
        code = main([name, "--preset", "paper", "--threads", "1", *where])
    finally:
        handle.remove()
    words = capsys.readouterr().err
    assert (code, taken) == (130, STEPS)
    assert "0 of" in words and "failed" not in words
