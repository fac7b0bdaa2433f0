import pytest
import torch
from torch import nn

from evigrad import Evidence, Memory
from evigrad.errors import ConfigurationError, EvigradWarning
from evigrad.likelihoods import Categorical
from evigrad.measure import describe_estimator, evaluate_evidence, tight_estimator
from evigrad.priors import GaussianPrior


def make_evidence(net, num_data, **keywords):
    return Evidence(
        net, Categorical(), GaussianPrior(), estimator="ntk-10-1", num_data=num_data, **keywords
    )


def log_precision_of(evidence):
    return evidence.hyperparameters()["prior.log_precision"].detach()


@pytest.mark.parametrize(
    ("sizes", "name"),
    [
        ((6090, 1438, 10), "full-N-C"),  # few weights
        ((6090, 1438, 10, 100.0), "full-N-C"),  # and time for it
        ((6090, 1438, 10, 10.0), "ntk-200-C"),
        ((6090, 1438, 10, 1.0), "ntk-20-C"),
        ((100_000, 100, 3), "ntk-N-C"),  # few data
        ((14_538, 5000, 10), "ntk-100-C"),  # neither
        ((23_000_000, 100_000, 200), "ntk-1-C"),
    ],
)
def test_the_tight_estimator_is_exact_where_that_is_affordable(sizes, name):
    assert tight_estimator(*sizes) == name


@pytest.mark.usefixtures("by_h")
def test_the_exact_value_by_either_side(blobs, make_net):
    evidence = make_evidence(make_net().double(), 60)
    x, y = blobs[0]
    data = (x.double(), y)
    full = evaluate_evidence(evidence, data, "full-N-C")
    ntk = evaluate_evidence(evidence, data, "ntk-N-C", memory=Memory(micro_batch=7))
    assert full.per_datum == pytest.approx(ntk.per_datum, rel=1e-10)
    assert full.per_datum == pytest.approx(
        full.log_likelihood + full.log_prior + full.log_det_term, rel=1e-12
    )
    assert (full.blocks, full.is_bound) == (1, True)


def test_the_mean_over_a_partition_is_a_bound_with_the_whole_data_term(blobs, make_net):
    evidence = make_evidence(make_net(), 60)
    exact = evaluate_evidence(evidence, blobs[0], "ntk-N-C")
    parts = evaluate_evidence(evidence, blobs[0], "ntk-25-C")
    assert parts.blocks == 3
    assert parts.per_datum < exact.per_datum
    # Blocks of a ragged partition weigh their data so that the mean is the whole data term.
    assert parts.log_likelihood == pytest.approx(exact.log_likelihood, rel=1e-5)
    assert parts.log_prior == pytest.approx(exact.log_prior, rel=1e-6)


def test_the_evidence_is_left_as_it_is(blobs, make_net):
    evidence = make_evidence(make_net(dropout=0.5), 60)
    before = evidence.generator.get_state(), log_precision_of(evidence).clone()
    evaluate_evidence(evidence, blobs[0], "full-N-C")
    assert torch.equal(evidence.generator.get_state(), before[0])
    assert torch.equal(log_precision_of(evidence), before[1])
    assert all(p.grad is None for p in evidence.hyperparameters().values())
    assert evidence.model.training


def test_hyperparameters_of_the_model_have_no_prior(blobs):
    net = nn.Sequential(nn.Linear(4, 3), nn.PReLU())
    learned = make_evidence(net, 60, hyperparameters=["1"])
    exact = evaluate_evidence(learned, blobs[0], "full-N-C")
    oracle = Evidence(
        net,
        Categorical(),
        GaussianPrior(),
        estimator="full-N-C",
        num_data=60,
        hyperparameters=["1.weight"],
    ).estimate(*blobs[0])
    assert exact.per_datum == pytest.approx(oracle.per_datum, rel=1e-5)


def test_a_warning_about_the_model_is_not_repeated(blobs):
    net = nn.Sequential(nn.Linear(4, 3), nn.LayerNorm(3))
    with pytest.warns(EvigradWarning):
        evidence = make_evidence(net, 60)
    evaluate_evidence(evidence, blobs[0], "full-N-C")  # warnings are errors


def test_unknown_estimators(blobs, make_net):
    with pytest.raises(ConfigurationError, match="Did you mean"):
        evaluate_evidence(make_evidence(make_net(), 60), blobs[0], "ful-N-C")


def test_words_for_the_table():
    assert describe_estimator("full-N-C", 1) == "full-N-C, exact"
    assert describe_estimator("kfac-N-C", 1) == "kfac-N-C"
    assert describe_estimator("ntk-400-C", 4) == "ntk-400-C, mean over 4 blocks of a partition"
