"""Outputs that share backward passes, against each output by itself."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from evigrad import Evidence, Memory
from evigrad.core.curvature.coloring import MOST_RECORDS, Coloring, Reach
from evigrad.likelihoods import Gaussian
from evigrad.priors import GaussianPrior

LAYERS = {"first": 7, "second": 4}


@st.composite
def gradients(draw) -> dict[str, Tensor]:
    """Gradients (m, C, G, T, o) of each output, zero at random positions of each layer."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    num_outputs, share = draw(st.integers(1, 12)), draw(st.floats(0.0, 1.0))
    result = {}
    for name, positions in LAYERS.items():
        reached = torch.rand(num_outputs, positions, generator=generator) < share
        values = torch.randn(3, num_outputs, 2, positions, 2, generator=generator).double()
        result[name] = values * reached[None, :, None, :, None]
    return result


def reached(of_layers: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: (values != 0).any(4).any(2).any(0) for name, values in of_layers.items()}


@settings(max_examples=50, deadline=None)
@given(gradients())
def test_colored_gradients_are_those_of_their_owners(of_layers):
    coloring = Coloring.of(reached(of_layers))
    num_outputs = len(coloring.colors)
    root = torch.rand(3, num_outputs, dtype=torch.float64) + 0.5
    rebuilt: dict[str, Tensor] = {name: torch.zeros_like(v) for name, v in of_layers.items()}
    for start in range(0, coloring.num_colors, 2):
        colors = slice(start, min(start + 2, coloring.num_colors))
        vectors, multiplied = (coloring.vectors(root, colors, factors) for factors in (False, True))
        chosen = ((coloring.colors >= start) & (coloring.colors < colors.stop)).nonzero()[:, 0]
        for name, values in of_layers.items():
            plain, other = (
                torch.einsum("mkc,mcgto->mkgto", v, values) for v in (vectors, multiplied)
            )
            assert coloring.agrees(name, colors, plain, other)
            owners = coloring.owners[name][colors]
            for color, position in (owners >= 0).nonzero().tolist():
                output = owners[color, position]
                rebuilt[name][:, output, :, position] += plain[:, color, :, position]
            terms = plain.transpose(2, 3).flatten(3)
            expected = (values * root[:, :, None, None, None]).sum(3).flatten(2)
            torch.testing.assert_close(coloring.rows(name, colors, terms), expected[:, chosen])
    for name, values in of_layers.items():
        torch.testing.assert_close(rebuilt[name], values * root[:, :, None, None, None])


@settings(max_examples=50, deadline=None)
@given(gradients(), st.data())
def test_another_output_at_a_position_is_noticed(of_layers, data):
    pattern = reached(of_layers)
    coloring = Coloring.of(pattern)
    name = data.draw(st.sampled_from(list(LAYERS)))
    hidden = (~pattern[name]).nonzero().tolist()
    if not hidden:
        return
    output, position = data.draw(st.sampled_from(hidden))
    values = of_layers[name].clone()
    values[1, output, 0, position, 1] = 0.01
    root = torch.ones(3, len(coloring.colors), dtype=torch.float64)
    color = int(coloring.colors[output])
    colors = slice(color, color + 1)
    plain, multiplied = (
        torch.einsum("mkc,mcgto->mkgto", coloring.vectors(root, colors, factors), values)
        for factors in (False, True)
    )
    assert not coloring.agrees(name, colors, plain, multiplied)


def test_one_output_for_each_position_takes_one_color():
    assert Coloring.of({"layer": torch.eye(9, dtype=torch.bool)}).num_colors == 1
    assert Coloring.of({"layer": torch.ones(9, 1, dtype=torch.bool)}).num_colors == 9


def recorded(reach: Reach, values: Tensor) -> None:
    reach.start()
    for part in values.split(4, 1):
        reach.add("layer", part, values.shape[1])
    if reach.is_local:
        reach.finish()


def test_positions_of_several_records_are_joined_and_dense_layers_are_left():
    reach = Reach()
    first, second = torch.zeros(2, 1, 8, 1, 8, 1)
    first[0, torch.arange(8), 0, torch.arange(8)] = 1.0
    second[0, torch.arange(8), 0, torch.arange(8).roll(1)] = -1.0
    recorded(reach, first)
    assert reach.coloring is not None and reach.coloring.num_colors == 1
    recorded(reach, second)
    assert reach.coloring is not None and reach.coloring.num_colors == 2
    for _ in range(MOST_RECORDS - 2):
        assert reach.records
        recorded(reach, first)
    assert not reach.records
    dense = Reach()
    recorded(dense, torch.ones(1, 8, 1, 8, 1))
    assert not dense.records and dense.coloring is None


@settings(max_examples=30, deadline=None)
@given(gradients())
def test_a_record_restores_what_examples_have_shown(of_layers):
    reach = Reach()
    for _ in range(2):
        reach.start()
        for name, values in of_layers.items():
            reach.add(name, values, values.shape[1])
        reach.finish()
    restored = Reach.from_record(reach.as_record(), torch.device("cpu"))
    assert (restored.num_records, restored.is_local) == (reach.num_records, reach.is_local)
    assert (restored.coloring is None) == (reach.coloring is None)
    if reach.coloring is not None and restored.coloring is not None:
        assert restored.coloring.colors.equal(reach.coloring.colors)
        for name, owners in reach.coloring.owners.items():
            assert restored.coloring.owners[name].equal(owners)
        assert restored.as_record()["num_outputs"] == len(reach.coloring.colors)


@pytest.mark.parametrize("network", ["local", "dense"])
def test_a_resumed_evidence_continues_bit_for_bit(network: str, tmp_path) -> None:
    def build() -> Evidence:
        torch.manual_seed(0)
        layers = (
            [nn.Conv1d(1, 3, 3, padding=1), nn.Tanh(), nn.Conv1d(3, 1, 3, padding=1), nn.Flatten()]
            if network == "local"
            else [nn.Flatten(), nn.Linear(100, 6), nn.Tanh(), nn.Linear(6, 100)]
        )
        prior = GaussianPrior("layerwise")
        model = nn.Sequential(*layers)
        return Evidence(
            model,
            Gaussian(),
            prior,
            estimator="kfac-N-C",
            num_data=20,
            memory=Memory(micro_batch=7),
        )

    def gradient(evidence: Evidence) -> Tensor:
        evidence.prior.zero_grad()
        evidence.backward(x, y)
        log_precision = evidence.hyperparameters()["prior.log_precision"]
        assert log_precision.grad is not None
        return log_precision.grad.clone()

    x = torch.randn(20, 1, 100, generator=torch.Generator().manual_seed(1))
    y = x[:, 0].sin()
    evidence = build()
    first = gradient(evidence)
    torch.save(evidence.state_dict(), tmp_path / "state.pt")
    expected = gradient(evidence)
    resumed = build()
    resumed.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    assert gradient(resumed).equal(expected)
    if network == "local":  # otherwise nothing above would show whether the state is complete
        assert not first.equal(expected)
        fresh = build()
        state = torch.load(tmp_path / "state.pt", weights_only=True)
        del state["reaches"]  # as of an older version
        fresh.load_state_dict(state)
        assert not gradient(fresh).equal(expected)
