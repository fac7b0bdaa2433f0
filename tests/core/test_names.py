from itertools import permutations, product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evigrad.core.names import (
    CURVATURES,
    DEFAULT_ESTIMATOR,
    GRAMMAR,
    MODIFIERS,
    ROOTS,
    STRUCTURES,
    Estimator,
)
from evigrad.errors import ConfigurationError

sizes = st.none() | st.integers(1, 10**9)
flags = st.booleans()
structures = st.sampled_from(list(STRUCTURES))


def is_valid(structure, subset, outputs, rows, iid, curvature, anchored=False, scaled=False):
    """The combination rules, as a table of what is allowed."""
    if anchored and not (rows and STRUCTURES[structure].keeps_rows):
        return False
    if scaled and (anchored or (subset is None and outputs is None)):
        return False
    if rows:
        return subset is not None and outputs is None and not iid and curvature == "ggn"
    return {
        "ggn": outputs is not None or not iid,
        "ef": outputs == 1 and not iid,
        "mc": outputs is not None and not iid,
    }[curvature]


@given(
    st.sampled_from(list(STRUCTURES)),
    sizes,
    sizes,
    flags,
    flags,
    flags,
    flags,
    st.sampled_from(CURVATURES),
)
def test_names_round_trip(structure, subset, outputs, iid, grouped, anchored, scaled, curvature):
    arguments = (structure, subset, outputs, False, iid, grouped, anchored, scaled, curvature)
    if not is_valid(structure, subset, outputs, False, iid, curvature, anchored, scaled):
        with pytest.raises(ConfigurationError):
            Estimator(*arguments)
        return
    spec = Estimator(*arguments)
    assert str(spec) == spec.name
    assert Estimator.parse(spec.name) == spec
    assert Estimator.parse(spec.name).name == spec.name


@given(st.lists(st.sampled_from([*STRUCTURES, *MODIFIERS, "N", "C", "1", "03", "rows", "x", ""])))
def test_whatever_is_parsed_is_valid_and_whatever_is_not_is_explained(words):
    name = "-".join(words)
    try:
        spec = Estimator.parse(name)
    except ConfigurationError as error:
        assert repr(name) in str(error)
        assert GRAMMAR in str(error)
        if "Did you mean '" in str(error):
            suggestion = str(error).split("Did you mean '")[1].split("'")[0]
            assert Estimator.parse(suggestion).name == suggestion
    else:
        assert sorted(spec.name.split("-")) == sorted(words)


@given(st.text(max_size=20))
def test_any_text_gets_an_answer_of_ours(text):
    with pytest.raises(ConfigurationError):
        Estimator.parse(text + "?")


def test_names_of_the_design():
    for name, spec in [
        ("kfac-150-1", Estimator("kfac", 150, 1)),
        ("ntk-500-1", Estimator("ntk", 500, 1)),
        ("kfac-N-C", Estimator("kfac", None, None)),
        ("full-1000-C", Estimator("full", 1000, None)),
        ("ntk-N-1-iid", Estimator("ntk", None, 1, iid=True)),
        ("ntk-400-rows-anchored", Estimator("ntk", 400, None, rows=True, anchored=True)),
        ("ntk-400-1-ef", Estimator("ntk", 400, 1, curvature="ef")),
        ("diag-400-5-mc", Estimator("diag", 400, 5, curvature="mc")),
    ]:
        assert Estimator.parse(name) == spec
        assert spec.name == name


def test_modifiers_come_in_any_order_and_leave_in_one():
    for order in list(permutations(("iid", "grouped"))):
        assert Estimator.parse("-".join(["ntk", "9", "2", *order])).name == ("ntk-9-2-iid-grouped")


def test_bad_names_say_what_and_how_to_mend_it():
    for name, words in [
        ("", ["unknown structure ''"]),
        ("gauss-100-1", ["unknown structure 'gauss'", "blockdiag"]),
        ("nkt-100-1", ["unknown structure 'nkt'", "Did you mean 'ntk-100-1'?"]),
        ("blockdiagonal-N-C", ["Did you mean 'blockdiag-N-C'?"]),
        ("ntk", ["SUBSET and OUTPUTS are missing", "'ntk-100-1'"]),
        ("ntk-400", ["OUTPUTS is missing", "'ntk-400-1'", "'ntk-400-C'"]),
        ("ntk-400-iid", ["OUTPUTS is missing", "Did you mean 'ntk-400-1-iid'?"]),
        ("ntk-400-anchored", ["OUTPUTS is missing", "Did you mean 'ntk-400-rows-anchored'?"]),
        ("ntk-0-1", ["SUBSET must be at least 1, got 0"]),
        ("ntk-5-0", ["OUTPUTS must be at least 1, got 0"]),
        ("ntk--5-1", ["SUBSET must be a positive integer or 'N', got ''", "'ntk-5-1'?"]),
        ("ntk-5.5-1", ["SUBSET must be a positive integer or 'N', got '5.5'"]),
        ("ntk-C-1", ["SUBSET must be a positive integer or 'N', got 'C'"]),
        ("ntk-5-N", ["OUTPUTS must be a positive integer, 'rows' or 'C', got 'N'"]),
        ("ntk-rows-5", ["SUBSET must be a positive integer"]),
        ("ntk-007-1", ["got '007'", "Did you mean 'ntk-7-1'?"]),
        ("ntk-\u0663-1", ["SUBSET must be a positive integer"]),
        (f"ntk-{'9' * 5000}-1", ["SUBSET must be a positive integer"]),
        ("ntk-n-c", ["got 'n'", "Did you mean 'ntk-N-C'?"]),
        ("KFAC-150-1", ["unknown structure 'KFAC'", "Did you mean 'kfac-150-1'?"]),
        ("ntk-9-Rows", ["Did you mean 'ntk-9-rows'?"]),
        ("ntk-9-row", ["Did you mean 'ntk-9-rows'?"]),
        ("ntk_9_1", ["Did you mean 'ntk-9-1'?"]),
        (" ntk-9-1 ", ["Did you mean 'ntk-9-1'?"]),
        ("ntk-9-1-grouepd", ["unknown modifier 'grouepd'", "Did you mean 'ntk-9-1-grouped'?"]),
        ("ntk-9-1-IID", ["unknown modifier 'IID'", "Did you mean 'ntk-9-1-iid'?"]),
        ("ntk-9-1-2", ["unknown modifier '2'"]),
        ("ntk-9-1-iid-iid", ["'iid' occurs more than once", "Did you mean 'ntk-9-1-iid'?"]),
        ("ntk-9-1-ef-mc", ["'ef' and 'mc' are mutually exclusive"]),
        ("kfac-N-rows", ["SUBSET is a number of rows", "'kfac-400-rows'", "'kfac-N-C'"]),
        ("ntk-9-rows-iid", ["'rows'", "cannot be combined with 'iid'"]),
        ("ntk-9-rows-grouped", ["cannot be combined with 'grouped'"]),
        ("ntk-9-rows-ef", ["cannot be combined with 'ef'"]),
        ("ntk-9-C-iid", ["'iid'", "OUTPUTS must be an integer"]),
        ("ntk-9-1-iid-ef", ["'iid'", "'ef' and 'mc' are not allowed"]),
        ("ntk-9-2-ef", ["OUTPUTS must be 1", "'ntk-9-1-ef'"]),
        ("ntk-N-C-ef", ["OUTPUTS must be 1", "'ntk-N-1-ef'"]),
        ("ntk-9-C-mc", ["OUTPUTS must be an integer", "'ntk-9-1-mc'"]),
        ("full-9-C-hessian", ["is not a modifier", "curvature=ExactHessian"]),
    ]:
        with pytest.raises(ConfigurationError) as caught:
            Estimator.parse(name)
        for word in words:
            assert word in str(caught.value)
        assert GRAMMAR in str(caught.value)


def test_a_spec_made_by_hand_is_checked_as_well():
    for arguments, word in [
        (("nkt", 1, 1), "Did you mean 'ntk'?"),
        (("ntk", 1, 1, False, False, False, False, False, "gnn"), "Did you mean 'ggn'?"),
        (("kfac", None, None, False, False, False, False, True), "integer SUBSET or OUTPUTS"),
        (("ntk", 3, 1, True), "either 'rows' or a number"),
    ]:
        with pytest.raises(ConfigurationError, match=word):
            Estimator(*arguments)


BOUNDS = {  # name -> roots with which it is a bound, for a Hessian that couples the outputs
    "ntk-N-C": set(ROOTS),
    "full-5-C": set(ROOTS),
    "blockdiag-5-C-grouped": set(ROOTS),
    "diag-N-C": set(ROOTS),
    "ntk-5-1": {"fisher", "eigen"},
    "full-5-2-iid": {"fisher", "eigen"},
    "diag-N-1": {"fisher", "eigen"},
    "ntk-5-rows": {"fisher", "eigen"},
    "ntk-5-1-ef": set(ROOTS),
    "diag-5-1-mc": set(),
    "ntk-N-9-mc": set(),
    "kfac-N-C": set(),
    "kfac-5-1": set(),
    "kfac-5-1-ef": set(),
}


def test_is_bound():
    for name, root in list(product(BOUNDS, ROOTS)):
        spec = Estimator.parse(name)
        assert spec.is_bound(root, couples_outputs=True) == (root in BOUNDS[name])
        never = spec.structure == "kfac" or spec.curvature == "mc"
        assert spec.is_bound(root, couples_outputs=False) != never


def test_an_unknown_root_is_refused():
    with pytest.raises(ConfigurationError, match="Did you mean 'fisher'"):
        Estimator.parse("ntk-5-1").is_bound("fischer", True)


def test_the_default_root_is_the_papers_but_for_rows():
    assert Estimator.parse("ntk-5-1").default_root == "subblock"
    assert Estimator.parse("ntk-5-rows").default_root == "eigen"


def test_auto_is_no_name_and_the_default_is_named():
    for name in ["auto", "ntk-auto-1", "kfac-auto-C", "ntk-auto"]:
        with pytest.raises(
            ConfigurationError, match="only fit .* accept 'auto'.*'ntk-400-rows-anchored'"
        ):
            Estimator.parse(name)
        assert Estimator.parse(DEFAULT_ESTIMATOR).name == DEFAULT_ESTIMATOR
