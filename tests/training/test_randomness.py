import pytest
import torch

from evigrad.network.modes import seeded
from evigrad.training.data import derived_seed, stream


def test_streams_of_other_seeds_uses_and_epochs_differ():
    seeds = {
        derived_seed(seed, use, epoch)
        for seed in range(3)
        for use in ("shuffle", "model", "evidence", "evaluation")
        for epoch in range(4)
    }
    assert len(seeds) == 3 * 4 * 4
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_a_stream_can_be_had_again():
    first, again = stream(5, "shuffle", 2), stream(5, "shuffle", 2)
    assert torch.equal(torch.rand(4, generator=first), torch.rand(4, generator=again))


def test_seeded_gives_the_same_numbers_and_puts_the_global_state_back():
    torch.manual_seed(1)
    before = torch.get_rng_state()
    with seeded(3, torch.device("cpu")):
        first = torch.rand(4)
    assert torch.equal(torch.get_rng_state(), before)
    with pytest.raises(KeyError), seeded(3, torch.device("cpu")):
        assert torch.equal(torch.rand(4), first)
        raise KeyError
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_seeded_covers_the_models_gpu():
    device = torch.device("cuda")
    before = torch.cuda.get_rng_state()
    with seeded(3, device):
        first = torch.rand(4, device=device)
    with seeded(3, device):
        assert torch.equal(torch.rand(4, device=device), first)
    assert torch.equal(torch.cuda.get_rng_state(), before)
