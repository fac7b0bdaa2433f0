"""Weights that FSDP2 trains in shards: numbers are those of whole weights, bytes are counted.

Groups of two and of four ranks run once each, on Gloo; of the network's tensors some have fewer
rows than ranks. The claims compare with one process, or with DistributedDataParallel.
"""

import copy
import math
import re
import socket
import warnings
from collections.abc import Callable, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.multiprocessing.spawn import start_processes
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from evigrad import Evidence, Learner, Schedule, fit
from evigrad.distributed import Ranks
from evigrad.errors import ConfigurationError, EvigradError
from evigrad.invariances import InputScale
from evigrad.likelihoods import Categorical
from evigrad.priors import GaussianPrior

N, SIZE, HIDDEN, OUTPUTS = 12, 3, 5, 3
RANKS = (2, 4)
ESTIMATORS = ("ntk-3-1", "kfac-3-1", "kfac-N-C")


def data() -> tuple[Tensor, Tensor]:
    own = torch.Generator().manual_seed(0)
    return torch.randn(N, SIZE, generator=own, dtype=torch.float64), torch.arange(N) % OUTPUTS


def network(norm: bool = False) -> nn.Sequential:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        layers = [InputScale(SIZE), nn.Linear(SIZE, HIDDEN, bias=not norm), nn.Tanh()]
        layers += [nn.BatchNorm1d(HIDDEN)] if norm else []
        return nn.Sequential(*layers, nn.Linear(HIDDEN, OUTPUTS)).double()


def shard(model: nn.Sequential, mesh: Any) -> nn.Sequential:
    """A sharded copy, which has the hyperparameters in common with the model."""
    trained = copy.deepcopy(model)
    trained[0] = model[0]
    kept = set(model[0].parameters())
    fully_shard(trained[1], mesh=mesh)
    fully_shard(trained, mesh=mesh, ignored_params=kept)
    return trained


def made(model: nn.Module, group: Any, estimator: str = "ntk-3-1", **options: Any) -> Evidence:
    return Evidence(
        model,
        Categorical(),
        options.pop("prior", None) or GaussianPrior("layerwise", precision=0.5),
        estimator=estimator,
        num_data=N,
        hyperparameters=options.pop("hyperparameters", ["0"]),
        generator=3,
        process_group=group,
        **options,
    )


def own_part_of_data(group: Any) -> tuple[Tensor, Tensor]:
    part = slice(distributed.get_rank(), None, distributed.get_world_size())
    return data()[0][part], data()[1][part]


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


# ------------------------------------------------------------ what ranks run

CLAIMS: dict[str, Callable[[Any], Any]] = {}


def claim(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    CLAIMS[function.__name__] = function
    return function


def value_and_gradient(evidence: Evidence, blocks: Any) -> list[Tensor]:
    """The mean over the blocks."""
    for parameter in evidence.hyperparameters().values():
        parameter.grad = None
    values = [torch.tensor(evidence.backward(b).log_evidence, dtype=torch.float64) for b in blocks]
    found = [p.grad for p in evidence.hyperparameters().values()]
    gradients = [torch.zeros(()) if g is None else g / len(values) for g in found]
    return [torch.stack(values).mean(), *gradients]


def descend(trained: nn.Module, x: Tensor, y: Tensor, steps: int = 3) -> None:
    weights = [p for n, p in trained.named_parameters() if not n.startswith("0.")]
    optimizer = torch.optim.SGD(weights, lr=0.5)
    for _ in range(steps):
        optimizer.zero_grad()
        cross_entropy(trained(x), y).backward()
        optimizer.step()


@claim
def estimates(mesh: Any) -> Any:
    """After some steps in shards, of all structures that are compared; and the bytes."""
    found: dict[str, Any] = {}
    for estimator in ESTIMATORS:
        model = network()
        evidence, trained = made(model, mesh, estimator), shard(model, mesh)
        descend(trained, *own_part_of_data(mesh))
        with torch.no_grad():
            trained(data()[0])  # leaves the last layer whole
        before = evidence.ranks.sent
        evidence.take_weights(trained)
        sent = evidence.ranks.sent - before
        blocks = iter(evidence.blocks(data()))
        value = value_and_gradient(evidence, [next(blocks)])
        found[estimator] = {"weights": weights_of(model), "value": value, "sent": sent}
        found[estimator]["gradients"] = [p.grad for p in evidence.weights().values()]
    return found


def priors() -> dict[str, GaussianPrior]:
    mean = torch.arange(HIDDEN * OUTPUTS, dtype=torch.float64).view(OUTPUTS, HIDDEN)
    return {
        "layerwise": GaussianPrior("layerwise", {"1.weight": 2.0, "1.bias": 3.0, **LAST}),
        "diagonal": GaussianPrior("diagonal"),
        "initial": GaussianPrior("scalar", 0.7, mean="initial"),
        "diagonal mean": GaussianPrior("diagonal", mean={"3.weight": mean}),
    }


LAST = {"3.weight": 0.1, "3.bias": 40.0}


@claim
def decays(mesh: Any) -> Any:
    """Gradients of a step in shards, and those of ``map_loss``, with whole weights."""
    found = {}
    for name, prior in priors().items():
        model = network()
        evidence, trained = made(model, mesh, prior=prior, temperature=2.0), shard(model, mesh)
        if name.startswith("diagonal"):
            with torch.no_grad():
                assert prior.log_precision is not None
                prior.log_precision.copy_(torch.linspace(-2, 2, len(prior.log_precision)))
        descend(trained, *own_part_of_data(mesh))
        evidence.take_weights(trained)
        sent = evidence.ranks.sent
        trained.zero_grad()
        cross_entropy(trained(own_part_of_data(mesh)[0]), own_part_of_data(mesh)[1]).backward()
        with torch.no_grad():
            trained(data()[0])  # leaves the last layer whole, with no gradient
        evidence.add_weight_decay(of=trained)
        loss = evidence.map_loss(*data())
        true = torch.autograd.grad(loss, list(evidence.weights().values()))
        found[name] = (whole_gradients(trained), list(true))
        # Where the loss has left no gradient; the decay is at most 1/lr, and of a scaled loss.
        trained.zero_grad()
        optimizer = torch.optim.SGD(trained.parameters(), lr=2.0)
        evidence.add_weight_decay(optimizer, scale=3.0, of=trained)
        evidence.add_weight_decay(torch.optim.SGD(evidence.weights().values(), lr=2.0), scale=3.0)
        whole = [p.grad for p in evidence.weights().values()]
        found[f"{name} alone"] = (whole_gradients(trained), whole)
        assert evidence.ranks.sent == sent
    return found


def whole_gradients(trained: nn.Module) -> list[Tensor]:
    named = {n: p.grad for n, p in trained.named_parameters() if not n.startswith("0.")}
    return [whole(gradient) for gradient in named.values()]


def whole(sharded: Any) -> Tensor:
    return sharded.full_tensor()


@claim
def trainings(mesh: Any) -> Any:
    """Some epochs with rounds, in shards and on whole weights."""
    return {kind: training(mesh, kind) for kind in ("ddp", "fsdp")}


def training(mesh: Any, kind: str) -> Any:
    model = network(norm=True)
    evidence = made(model, mesh)
    trained = DistributedDataParallel(model) if kind == "ddp" else shard(model, mesh)
    of = None if kind == "ddp" else trained
    weights = [p for n, p in trained.named_parameters() if p is not model[0].log_scale]
    optimizer = torch.optim.Adam(weights, lr=0.01)
    learner = Learner(evidence, data(), Schedule(epochs=3, burn_in=1, every=1, steps=2))
    for epoch in range(3):
        x, y = own_part_of_data(mesh)
        for half in (slice(0, None, 2), slice(1, None, 2)) if len(x) > 4 else (slice(None),):
            optimizer.zero_grad()
            cross_entropy(trained(x[half]), y[half]).backward()
            evidence.add_weight_decay(optimizer, of=of)
            optimizer.step()
        if of is None:
            evidence.ranks.share(list(model.buffers()))  # running statistics: each rank has its own
        elif learner.is_due(epoch + 1):
            evidence.take_weights(of)
        learner.step()
    return {
        "learned": weights_of(evidence.prior) | weights_of(model[0]),
        "model": {n: t.clone() for n, t in model.state_dict().items()},
        "state": learner.state_dict(),
    }


@claim
def refusals(mesh: Any) -> list[str]:
    """Each text, in the order of ``REFUSED``."""
    count = distributed.get_world_size()
    model = network()
    evidence, trained = made(model, mesh), shard(model, mesh)
    other, wide = shard(network(norm=True), mesh), network()
    wide[1], wide[3] = nn.Linear(SIZE, 6), nn.Linear(6, OUTPUTS)
    wide[0] = model[0]
    copied = copy.deepcopy(model)
    fully_shard(copied, mesh=mesh)
    rank = distributed.get_rank()
    unlike = copy.deepcopy(model)
    unlike[0] = model[0]
    if rank == count - 1:
        with torch.no_grad():
            next(unlike[1].parameters()).add_(1.0)
    old: Any = FullyShardedDataParallel(network(), device_id=torch.device("cpu"))
    evaluated = shard(model, mesh)
    with torch.no_grad():
        evaluated(data()[0])
    part = nn.Linear(SIZE, 2).double()
    part.weight = nn.Parameter(distribute_tensor(part.weight, mesh))
    lone = made(network(), None, hyperparameters=[])
    after = made(network(), mesh)
    fully_shard(after.model, mesh=mesh)
    calls: list[Callable[[], Any]] = [
        lambda: made(trained, mesh),
        lambda: made(evaluated, mesh),
        lambda: made(part, mesh, hyperparameters=[]),
        lambda: fit(trained, data(), estimator="map", progress=False, process_group=mesh),
        lambda: made(old, mesh),
        lambda: evidence.take_weights(old),
        lambda: evidence.take_weights(other),
        lambda: evidence.add_weight_decay(of=other),
        lambda: evidence.take_weights(shard(wide, mesh)),
        lambda: evidence.take_weights(copied),
        lambda: evidence.take_weights(other if rank == 0 else trained),
        lambda: evidence.take_weights(unlike),
        lambda: evidence.estimate(data()[0][:2], data()[1][:2]),
        lambda: lone.take_weights(shard(network(), mesh)),
        lambda: after.take_weights(after.model),
    ]
    texts = []
    for call in calls:
        with pytest.raises(EvigradError) as caught:
            call()
        texts.append(f"{type(caught.value).__name__}: {caught.value}")
    evidence.take_weights(trained)
    evidence.estimate(data()[0][:2], data()[1][:2])
    evidence.add_weight_decay(of=trained)
    for stale in (evidence.estimate, evidence.backward, evidence.collect):
        with pytest.raises(ConfigurationError, match="take_weights"):
            stale(data()[0][:2], data()[1][:2])
    return texts


REFUSED = [
    r"shards \(FSDP2\).*copy\.deepcopy\(model\).*take_weights\(copy\)",
    r"shards \(FSDP2\)",
    r"shards \(DTensor\)",
    r"shards \(FSDP2\).*fit trains whole weights",
    r"FSDP1.*fully_shard",
    r"FSDP1.*fully_shard",
    r"other parameters.*missing: '1\.bias'; more: '4\.weight', '4\.bias'",
    r"other parameters.*missing",
    r"'1\.weight' is \(5, 3\) in the model of the evidence and \(6, 3\)",
    r"learns '0\.log_scale'.*the model's own '0'.*ignored_params",
    r"other parameters",
    r"differ in the weights",
    r"take_weights\(module\) before an estimate",
    r"sharded over \d processes, and the evidence works on 1",
    r"shards \(FSDP2\)",
]


class Wrapped(nn.Module):
    """As what ``torch.compile`` returns."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._orig_mod = model


@claim
def replicas(mesh: Any) -> Any:
    """Shards over two ranks, and replicas of them; under a wrapper of another name."""
    shape = (distributed.get_world_size() // 2, 2)
    both = init_device_mesh("cpu", shape, mesh_dim_names=("replicas", "shards"))
    model = network()
    evidence, trained = made(model, distributed.group.WORLD), shard(model, both)
    descend(trained, *own_part_of_data(mesh))
    before = evidence.ranks.sent
    evidence.take_weights(Wrapped(trained))
    found = {"weights": weights_of(model), "sent": evidence.ranks.sent - before}
    if shape[0] > 1:
        with torch.no_grad():
            shards: Any = next(trained[1].parameters())
            shards.to_local().add_(float(distributed.get_rank() > 1))
        with pytest.raises(ConfigurationError, match="differ in the weights"):
            evidence.take_weights(trained)
    return found


@claim
def rounded_passes(mesh: Any) -> None:
    """Weights that passes see in bfloat16, and that stay whole after one, are taken in float32."""
    model = network().float()
    evidence, trained = made(model, mesh, hyperparameters=[]), copy.deepcopy(model)
    fully_shard(trained, mesh=mesh, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    before = weights_of(model)
    with torch.no_grad():
        next(model[1].parameters()).zero_()
        trained(data()[0].float())
    evidence.take_weights(trained)
    torch.testing.assert_close(weights_of(model), before, rtol=0, atol=0)


BIG = (1001, 203)
LAYOUTS = {
    "rows": [Shard(0)],
    "columns": [Shard(1)],
    "replicas": [Replicate(), Shard(0)],
    "shards of shards": [Shard(0), Shard(0)],
    "both": [Shard(1), Shard(0)],
}


@claim
def gathered(mesh: Any) -> Any:
    """Bytes by the count and by the operating system; all of a tensor arrives everywhere."""
    both = init_device_mesh("cpu", (distributed.get_world_size() // 2, 2))
    whole = torch.arange(math.prod(BIG)).view(BIG)
    found = {}
    for name, placements in LAYOUTS.items():
        on = mesh if len(placements) == 1 else both
        own, ranks = distribute_tensor(whole, on, placements, src_data_rank=None), Ranks(mesh)
        at = written()
        assert torch.equal(ranks.whole(own), whole)
        found[name] = (ranks.sent, written() - at)
    return found


def written() -> float:
    """Bytes that this process has written to files and sockets; NaN where no Linux says it."""
    io = Path("/proc/self/io")
    lines = io.read_text().splitlines() if io.exists() else []
    return next((int(line.split()[1]) for line in lines if line.startswith("wchar")), math.nan)


def begin(rank: int, port: int, count: int) -> Any:
    address = f"tcp://127.0.0.1:{port}"
    distributed.init_process_group("gloo", address, rank=rank, world_size=count)
    return init_device_mesh("cpu", (count,))


def _rank(rank: int, folder: Path, port: int, count: int) -> None:
    warnings.simplefilter("ignore")
    mesh = begin(rank, port, count)
    torch.save({name: own(mesh) for name, own in CLAIMS.items()}, folder / f"{rank}.pt")
    distributed.destroy_process_group()


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[dict[str, Any]]]:
    """What each rank of each group found, by the number of ranks.

    Forked after one process has done the same, whose imports and checks of types they have.
    """
    found = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of forks, which save the time of imports
        estimates(begin(0, free_port(), 1))
        distributed.destroy_process_group()
        for count in RANKS:
            folder = tmp_path_factory.mktemp(f"ranks{count}")
            arguments = (folder, free_port(), count)
            start_processes(_rank, arguments, nprocs=count, start_method="fork")
            found[count] = [torch.load(folder / f"{rank}.pt") for rank in range(count)]
    return found


def close(one: Any, other: Any, tolerance: float = 1e-12) -> None:
    torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("count", RANKS)
@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_estimates_are_those_of_whole_weights(ran: Any, estimator: str, count: int) -> None:
    model = network()
    descend(model, *data())
    evidence = made(model, None, estimator)
    at_once = 1 if "N" in estimator else count
    expected = value_and_gradient(evidence, islice(iter(evidence.blocks(data())), at_once))
    for rank in ran[count]:
        found = rank["estimates"][estimator]
        close(found["weights"], weights_of(model))
        close(found["value"], expected)
        assert found["gradients"] == [None] * 4  # nothing but the whole weights is kept


def of_gathered(count: int) -> int:
    """Bytes that a rank sends: its longest possible shard of each tensor to each other rank."""
    rows = {HIDDEN: SIZE + 1, OUTPUTS: HIDDEN + 1}
    return (count - 1) * 8 * sum(-(-n // count) * length for n, length in rows.items())


@pytest.mark.parametrize("count", RANKS)
def test_the_bytes_are_those_of_the_shards(ran: Any, count: int) -> None:
    for rank in ran[count]:
        for found in rank["estimates"].values():
            assert found["sent"] == of_gathered(count) + 2 * 16 * (count - 1)
        # Over two ranks, however many replicas there are.
        assert rank["replicas"]["sent"] == of_gathered(2) + 2 * 16 * (count - 1)


@pytest.mark.parametrize("count", RANKS)
def test_the_bytes_are_those_of_the_operating_system(ran: Any, count: int) -> None:
    slack = 4000  # of headers
    for rank in ran[count]:
        for name in LAYOUTS:
            sent, kernel = rank["gathered"][name]
            assert math.isnan(kernel) or sent <= kernel <= sent + slack, name
        # Of P numbers 8P(R - 1)/R, but for rows that fill up the last shard.
        assert rank["gathered"]["rows"][0] == 8 * -(-BIG[0] // count) * BIG[1] * (count - 1)


@pytest.mark.parametrize("count", RANKS)
def test_replicas_of_shards_are_taken_up(ran: Any, count: int) -> None:
    model = network()
    descend(model, *data())
    for rank in ran[count]:
        close(rank["replicas"]["weights"], weights_of(model))


@pytest.mark.parametrize("count", RANKS)
def test_the_decay_of_shards_is_that_of_map_loss(ran: Any, count: int) -> None:
    for rank in ran[count]:
        assert len(rank["decays"]) == 2 * len(priors())
        for found, true in rank["decays"].values():
            close(found, true)
            assert all(gradient.abs().max() > 1e-3 for gradient in true)


@pytest.mark.parametrize("count", RANKS)
def test_shards_learn_what_replicas_learn(ran: Any, count: int) -> None:
    start = weights_of(network(norm=True)[0])
    for rank in ran[count]:
        sharded, whole = (rank["trainings"][kind] for kind in ("fsdp", "ddp"))
        close(sharded["learned"], whole["learned"], 1e-9)
        close(sharded["model"], whole["model"], 1e-9)
        assert sharded["learned"]["log_scale"].sub(start["log_scale"]).abs().min() > 1e-4
        assert sharded["learned"]["log_precision"].std() > 0.1
        torch.testing.assert_close(
            sharded["learned"], ran[count][0]["trainings"]["fsdp"]["learned"], rtol=0, atol=0
        )


@pytest.mark.filterwarnings("ignore:The model has normalisation layers")
@pytest.mark.parametrize("count", RANKS)
def test_a_state_does_not_know_of_shards(ran: Any, count: int) -> None:
    """It has been read by ``torch.load`` of plain tensors; one process goes on with it."""
    sharded, whole = (ran[count][0]["trainings"][kind]["state"] for kind in ("fsdp", "ddp"))
    assert tensors(sharded).keys() == tensors(whole).keys()
    close(tensors(sharded), tensors(whole), 1e-9)
    evidence = made(network(norm=True), None)
    evidence.model.load_state_dict(ran[count][0]["trainings"]["fsdp"]["model"])
    learner = Learner(evidence, data(), Schedule(epochs=3, burn_in=1, every=1, steps=2))
    learner.load_state_dict(sharded)
    for name, found in evidence.hyperparameters().items():
        own = ran[count][0]["trainings"]["fsdp"]["learned"].get(name.split(".", 1)[1])
        assert own is None or torch.equal(found, own)


def tensors(state: Any, at: str = "") -> dict[str, Tensor]:
    """All numbers of a nested state, by where they are."""
    if isinstance(state, Mapping):
        state = list(state.items())
    elif isinstance(state, list | tuple):
        state = list(enumerate(state))
    else:
        return {at: torch.as_tensor(state)} if isinstance(state, Tensor | float | int) else {}
    return {n: t for key, value in state for n, t in tensors(value, f"{at}.{key}").items()}


@pytest.mark.parametrize("count", RANKS)
def test_what_does_not_fit_is_refused(ran: Any, count: int) -> None:
    for number, rank in enumerate(ran[count]):
        for text, expected in zip(rank["refusals"], REFUSED, strict=True):
            assert re.search(expected, text), text
        kinds = [text.partition(":")[0] for text in rank["refusals"]]
        at = REFUSED.index("other parameters")  # which rank 0 alone is given
        assert kinds.pop(at) == ("RankError" if number else "ConfigurationError")
        assert set(kinds) == {"ConfigurationError"}
