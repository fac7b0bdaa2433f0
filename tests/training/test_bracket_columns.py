"""Bounds on the exact log evidence beside a run."""

import pytest
from training.small_runs import SMALL, net, without_estimator

from evigrad.errors import ConfigurationError
from evigrad.measure import evaluate_evidence
from evigrad.training import fit, history
from evigrad.training.progress import summary
from evigrad.training.settings import grouped


@pytest.mark.one_in(2)
@pytest.mark.parametrize("estimator", [None, "kfac-20-1", "ntk-20-rows-anchored"])
def test_bounds_on_the_evidence_of_any_run(blobs, estimator, monkeypatch):
    monkeypatch.setattr(history, "BRACKET_ROWS", 60)
    options = without_estimator(SMALL) if estimator is None else SMALL | {"estimator": estimator}
    options["bracket_every"] = 4
    result = fit(net(), blobs[0], **grouped(options))
    bracketed = [row for row in result.history if row["bracket_lower"] is not None]
    last = result.history[-1]
    assert [int(row["epoch"] or 0) for row in bracketed] == sorted(
        {*range(4, 10**3, 4)} & {int(row["epoch"] or 0) for row in result.history}
        | {int(last["epoch"] or 0)}
    )
    exact = evaluate_evidence(result.evidence, blobs[0], "full-N-C").per_datum
    lower, error, upper = (last[f"bracket_{name}"] for name in ("lower", "lower_sem", "upper"))
    assert lower is not None and error is not None and upper is not None
    assert lower - 4 * error <= exact <= upper + 1e-5
    assert upper - lower < 2.0
    assert f"exact in {lower:.3f}..{upper:.3f}" in summary(last, 1.0)


def test_bounds_change_nothing_in_a_run(blobs, monkeypatch):
    monkeypatch.setattr(history, "BRACKET_ROWS", 20)
    options = {**SMALL, "estimator": "ntk-20-rows-anchored"}
    plain = fit(net(), blobs[0], **grouped(options)).history
    beside = fit(net(), blobs[0], **grouped(dict(**options, bracket_every=1))).history
    for one, other in zip(plain, beside, strict=True):
        assert {n: v for n, v in one.items() if n != "seconds"} == {
            n: v for n, v in other.items() if n != "seconds" and "bracket" not in n
        }


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"bracket_every": -1}, "bracket_every must be an integer of at least 0"),
        ({"bracket_every": 2, "estimator": "diag-20-1-ef"}, "got 'ef'"),
    ],
)
def test_what_cannot_be(blobs, options, words):
    with pytest.raises(ConfigurationError, match=words):
        fit(net(), blobs[0], **grouped({**SMALL, **options}))
