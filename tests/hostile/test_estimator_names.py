"""Names of estimators: every text is a name with a meaning, or an error that says what is one."""

from pathlib import Path
from typing import Any

import torch
from hostile.cases import errors_of_ours, hostile, texts, values
from hypothesis import strategies as st
from torch import nn

from evigrad import Evidence
from evigrad.core.names import STRUCTURES, Estimator
from evigrad.likelihoods import Categorical
from evigrad.priors import GaussianPrior

_WORDS = st.one_of(
    st.sampled_from([*STRUCTURES, "N", "C", "rows", "iid", "grouped", "anchored", "ef", "mc"]),
    st.sampled_from(
        ["hessian", "0", "1", "2", "3", "7", "-1", "1.5", "٣", "NTK", "", " ", "10" * 9]
    ),
    st.integers().map(str),
    texts(),
)
# Mostly of the right number of parts, in the right order.
NAMES = st.one_of(
    st.lists(_WORDS, min_size=1, max_size=6).map("-".join),
    st.tuples(st.sampled_from([*STRUCTURES]), _WORDS, _WORDS).map("-".join),
    st.tuples(
        st.sampled_from([*STRUCTURES]),
        st.sampled_from(["N", "1", "2", "3", "6", "7", "8", "99"]),
        st.sampled_from(["C", "rows", "1", "2", "3", "4"]),
        st.sampled_from(["iid", "grouped", "anchored", "ef", "mc", "hessian", "iid-anchored"]),
    ).map("-".join),
    texts(),
)


@hostile(NAMES, 500, 20_000, 0.03)
def test_a_name_that_is_read_is_written_the_same(tmp_path: Path, name: str) -> None:
    with errors_of_ours():
        spec = Estimator.parse(name)
        assert Estimator.parse(spec.name) == spec


X, Y = torch.linspace(-1, 1, 14).reshape(7, 2), torch.arange(7) % 3


@hostile(st.one_of(NAMES, values()), 200, 4_000, 0.015)
def test_a_name_estimates_a_finite_number_or_is_refused(tmp_path: Path, name: Any) -> None:
    model = nn.Sequential(nn.Linear(2, 3))
    with errors_of_ours():
        evidence = Evidence(
            model, Categorical(), GaussianPrior(), estimator=name, num_data=7, generator=0
        )
        for block in evidence.blocks((X, Y)).take(1):
            estimate = evidence.backward(block)
            assert torch.tensor(estimate.log_evidence).isfinite()
