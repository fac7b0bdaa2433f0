"""Several processes share the work: the numbers are those of one process, and few bytes travel.

A group of ranks runs once, on Gloo, and writes what it computed; the claims compare it with one
process that evaluates the same blocks. `make test` runs two ranks, and `make check-long` four.
"""

import copy
import math
import os
import shutil
import socket
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from itertools import islice, product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, distributed, nn
from torch.multiprocessing.spawn import start_processes
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from evigrad import (
    Anchoring,
    Block,
    Estimate,
    Evidence,
    FitResult,
    Learner,
    Optimization,
    Schedule,
    bracket,
    fit,
)
from evigrad.core.curvature.dense import BlockDiagonal
from evigrad.distributed import Ranks
from evigrad.errors import ConfigurationError, EvigradError
from evigrad.invariances import AdditiveNoise, Averaged, InputScale
from evigrad.likelihoods import Categorical, Gaussian
from evigrad.priors import GaussianPrior

pytestmark = pytest.mark.converges
N, SIZE, OUTPUTS, DRAWS = 11, 3, 3, 36
STEPS = 1  # that are compared


def data(kind: str = "classes") -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(N, SIZE, generator=generator, dtype=torch.float64)
    if kind == "classes":
        return x, torch.arange(N) % OUTPUTS
    return x, torch.randn(N, OUTPUTS, generator=generator, dtype=torch.float64)


def network(noisy: bool = False) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        net = nn.Sequential(InputScale(SIZE), nn.Linear(SIZE, 4), nn.Tanh(), nn.Linear(4, OUTPUTS))
        if noisy:
            net = Averaged(net, AdditiveNoise(SIZE, 0.3), num_samples=2)
    return net.double()


def made(estimator: str, group: Any = None, noisy: bool = False, **options: Any) -> Evidence:
    kind = options.pop("likelihood", None)
    noise, learnable = options.pop("noise", 0.7), kind != "fixed"
    likelihood = Gaussian(noise=noise, learnable=learnable) if kind else Categorical()
    structure = options.pop("prior", "layerwise")
    hyperparameters, model = options.pop("hyperparameters", ["0"]), network(noisy)
    if noisy and not hyperparameters:
        model.get_submodule("invariance").requires_grad_(False)
    return Evidence(
        model,
        likelihood,
        GaussianPrior(structure, precision=0.5),
        estimator=estimator,
        num_data=N,
        hyperparameters=hyperparameters,
        generator=options.pop("generator", 3),
        process_group=group,
        **options,
    )


def fields(estimate: Estimate) -> list[float]:
    names = ("log_evidence", "log_likelihood", "log_prior", "log_det", "log_hyperprior", "is_bound")
    return [float(getattr(estimate, name)) for name in names]


def gradients(evidence: Evidence) -> list[Tensor]:
    collected = [p.grad for p in evidence.hyperparameters().values()]
    for parameter in evidence.hyperparameters().values():
        parameter.grad = None
    return [torch.zeros(()) if g is None else g for g in collected]


# Estimators of every structure: blocks of a rank's own, where no two ranks have the same.
OWN: dict[str, dict[str, Any]] = {
    "ntk-3-1": {},
    "ntk-4-C": {"root": "eigen"},
    "ntk-5-rows": {},
    "ntk-12-rows-anchored": {"anchoring": Anchoring(share=0.5)},
    "ntk-3-1-grouped": {"hyperparameters": []},
    "ntk-N-1": {},
    "ntk-N-C": {},
    "full-2-C": {},
    "full-7-1": {"root": "fisher"},
    "blockdiag-4-1-iid": {"parameter_partition": "module"},
    "kfac-5-1": {},
    "kfac-3-1-ef": {"hyperparameters": [], "temperature": 2.0, "log_det_weight": 3.0},
    "diag-3-1": {"prior": "diagonal"},
    "diag-4-2-mc": {"noisy": True, "hyperparameters": ["invariance"]},
    "ntk-2-C": {"likelihood": "gaussian", "noisy": True, "hyperparameters": []},
    "kfac-2-C": {"likelihood": "gaussian", "hyperparameters": []},
}
# Shares of all data.
SPLIT: dict[str, dict[str, Any]] = {
    "kfac-N-C": {},
    "kfac-N-1": {"sharing": "reduce"},
    "diag-N-C": {"noisy": True, "hyperparameters": ["invariance"]},
    "diag-N-1-iid": {"prior": "diagonal", "hyperparameters": []},
    "blockdiag-N-C": {"likelihood": "gaussian"},
    "full-N-C": {},
    "kfac-N-C-kept": {"likelihood": "gaussian", "hyperparameters": []},
}
# Subsets, anchors, kept rows and sums over all data: four ranks may differ from two in these.
FOUR = ["ntk-4-C", "ntk-12-rows-anchored", "kfac-5-1", "ntk-N-C"]
FOUR += ["kfac-N-C", "diag-N-C", "blockdiag-N-C", "full-N-C"]
CASES: dict[int, list[str]] = {2: [*OWN, *SPLIT], 4: FOUR}
EVERY = {**OWN, **SPLIT}


def data_of(options: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    return data("numbers" if options.get("likelihood") else "classes")


def made_for(case: str, group: Any = None) -> Evidence:
    """The evidence of one of ``EVERY`` case."""
    return made(case.removesuffix("-kept"), group, **EVERY[case])


def of_ranks(case: str, group: Any) -> dict[str, Any]:
    """What a rank has of some steps: estimates, gradients, bytes, and the generator at the end."""
    evidence, options = made_for(case, group), EVERY[case]
    blocks = iter(evidence.blocks(data_of(options)))
    pairs, sent = [], 0
    for block in islice(blocks, STEPS):
        before = evidence.ranks.sent
        if "-kept" in case:
            estimate = evidence.backward_kept(evidence.collect(block))
        else:
            estimate = evidence.backward(block)
        pairs.append((fields(estimate), gradients(evidence)))
        sent += evidence.ranks.sent - before
    value = fields(evidence.estimate(next(blocks)))
    return {"steps": pairs, "sent": sent, "value": value, "state": evidence.generator.get_state()}


def of_one(case: str, count: int) -> dict[str, Any]:
    """The same in one process: the mean over as many blocks as there are ranks."""
    evidence, options = made_for(case), EVERY[case]
    at_once = 1 if case in SPLIT else count

    def mean(blocks: list[Any], backward: bool = True) -> tuple[list[float], list[Tensor]]:
        call = evidence.backward if backward else evidence.estimate
        values = torch.tensor([fields(call(block)) for block in blocks], dtype=torch.float64)
        return values.mean(0).tolist(), [g / len(blocks) for g in gradients(evidence)]

    def drawn(stream: Iterator[Block]) -> list[Block]:
        blocks = list(islice(stream, at_once))
        if evidence.estimator.curvature != "mc":  # labels are drawn by the seed of a block
            return blocks
        seeds = [torch.randint(2**62, (), generator=evidence.generator) for _ in blocks]
        return [replace(b, seed=int(seed)) for b, seed in zip(blocks, seeds, strict=True)]

    stream = iter(evidence.blocks(data_of(options)))
    outcomes = [mean(drawn(stream)) for _ in range(STEPS)]
    value, _ = mean(drawn(stream), backward=False)
    return {"steps": outcomes, "value": value, "state": evidence.generator.get_state()}


# ------------------------------------------------------------ what ranks run

Claim = Callable[[Any], Any]
CLAIMS: dict[str, Claim] = {}


def claim(function: Claim) -> Claim:
    CLAIMS[function.__name__] = function
    return function


@claim
def steps(group: Any) -> Any:
    return {case: of_ranks(case, group) for case in CASES[Ranks(group).count]}


@claim
def whole_partitions(group: Any) -> Any:
    """Means over the blocks of one partition, of which the ranks may not have as many."""
    totals = {}
    for name in ("ntk-5-1", "ntk-12-rows-anchored"):  # 9 blocks, for one
        evidence = made(name, group)
        blocks = list(evidence.blocks(data()).epoch())
        total = sum(evidence.estimate(block).log_det * count_of(block, group) for block in blocks)
        totals[name] = (len(blocks), total / sum(count_of(block, group) for block in blocks))
    return totals


def count_of(block: Block, group: Any) -> float:
    """How many ranks have a block."""
    return float(Ranks(group).sum([torch.tensor(float(len(block.indices) > 0))])[0])


@claim
def learning(group: Any) -> Any:
    """Hyperparameters after rounds of every kind: kept passes, few parts, one for each step."""
    hyperparameters = {}
    for name, settings in LEARNED.items():
        hyperparameters[name] = learned(name, group, settings)
    return hyperparameters


LEARNED: dict[str, dict[str, Any]] = {
    "kfac-N-C": {},
    "ntk-N-C": {},
    "ntk-4-C": {"prior_blocks": 2},
    "ntk-12-rows-anchored": {},
    "ntk-12-rows-anchored whole": {"prior_blocks": 3},
    "ntk-18-rows-anchored few": {"prior_blocks": 2},  # three parts, for any number of ranks
    "ntk-40-rows-anchored": {},  # all rows are anchors
}


def learned(case: str, group: Any, settings: Mapping[str, Any]) -> list[Tensor]:
    evidence = made(case.split()[0], group, hyperparameters=[])
    schedule = Schedule(epochs=2, burn_in=1, every=1, steps=2, **settings)
    learner = Learner(evidence, data(), schedule)
    for _ in range(2):
        learner.step()
    return [p.detach().clone() for p in evidence.hyperparameters().values()]


@claim
def given_data(group: Any) -> Any:
    """Data themselves: all of them at once or in batches, and each rank's own subset."""
    x, y = data()
    estimates = {}
    for name in ("kfac-N-C", "diag-N-1", "ntk-N-C"):
        pairs = [(x[i : i + 3], y[i : i + 3]) for i in range(0, N, 3)]
        evidence = made(name, group)
        estimates[name] = [fields(evidence.estimate(x, y)), fields(evidence.estimate(pairs))]
    share = slice(Ranks(group).rank, None, 4)
    estimates["ntk-2-C"] = fields(made("ntk-2-C", group).estimate(x[share], y[share]))
    evidence = made("ntk-2-1", group)
    evidence.estimate(x[share], y[share])  # of other sizes on other ranks
    estimates["state"] = evidence.generator.get_state()
    return estimates


@claim
def posteriors(group: Any) -> Any:
    x, _ = data()
    return [
        made("ntk-3-1", group).posterior(data(), structure=structure)(x).variance
        for structure in ("kfac", "diag", "full", "ntk")
    ]


def in_float32(group: Any) -> Evidence:
    """One layer's precision is so small that rounding hides pivots of its block."""
    evidence = Evidence(
        network().float(),
        Categorical(),
        GaussianPrior("layerwise"),
        estimator="blockdiag-N-C",
        num_data=N,
        hyperparameters=["0"],
        process_group=group,
    )
    (precisions,) = evidence.prior.parameters()
    with torch.no_grad():
        precisions[list(evidence.weights()).index("3.weight")] = math.log(1e-9)
    return evidence


def in_every_way(evidence: Evidence) -> list[Callable[[], Any]]:
    x, y = data()
    x = x.to(next(evidence.model.parameters()))
    return [
        lambda: evidence.estimate(x, y),
        lambda: evidence.backward(x, y),
        lambda: evidence.backward(x, y, wrt="prior"),
        lambda: evidence.estimate_kept(evidence.collect(x, y, wrt="prior")),
    ]


@claim
def rounding(group: Any) -> Any:
    """Estimates in float32, and whether each log-determinant was refused or not."""
    evidence, refused, results = in_float32(group), [], []

    def watched(*arguments: Any) -> Tensor:
        refused.append(True)
        value = log_det(*arguments)
        refused[-1] = False
        return value

    log_det = BlockDiagonal.log_det
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(BlockDiagonal, "log_det", watched)
        for call in in_every_way(evidence):
            value = fields(call())
            results.append((value, gradients(evidence), refused.copy()))
            refused.clear()
    return results


@claim
def draws(group: Any) -> Any:
    evidence = made("ntk-1-1", group, hyperparameters=[])
    return [evidence.estimate(block).log_det for block in evidence.blocks(data()).take(DRAWS)]


@claim
def failures(group: Any) -> Any:
    """The error of each rank if only the last one is given a NaN; and then all is well."""
    ranks, (x, y) = Ranks(group), data()
    bad = x.clone()
    if ranks.rank == ranks.count - 1:
        bad[-1] = torch.nan
    errors = []
    for name in ("ntk-11-C", "kfac-N-C"):
        evidence = made(name, group)
        with pytest.raises(EvigradError) as caught:
            evidence.backward(bad, y)
        errors.append((type(caught.value).__name__, str(caught.value)))
        assert all(p.grad is None for p in evidence.hyperparameters().values())
        assert evidence.backward(x, y).log_evidence < 0
    with pytest.raises(EvigradError) as caught:
        made("ntk-2-1", group, prior="scalar" if ranks.rank else "layerwise")
    errors.append((type(caught.value).__name__, str(caught.value)))
    # Where the others wait for an answer, or compare what they have; and before anything is drawn.
    wrong = y.clone()
    if ranks.rank == ranks.count - 1:
        wrong[-1] = OUTPUTS
    for call in (
        lambda: ranks.any(False) if (wrong < OUTPUTS).all() else full_memory(),
        lambda: made("ntk-2-1", group).blocks((x, wrong)),
        lambda: Learner(made("ntk-2-1", group), (x, wrong), ROUNDS),
        lambda: made("ntk-2-1", group).posterior((x, wrong)),
        lambda: made("ntk-2-1", group).posterior((x, wrong), structure="ntk"),
        lambda: bracket(made("ntk-2-1", group), (x, wrong), rows=12),
    ):
        with pytest.raises(Exception) as caught, ranks.together():
            call()
        errors.append((type(caught.value).__name__, str(caught.value)))
    return errors


@claim
def differences(group: Any) -> Any:
    """What the error names, where the last rank has something else than the others."""
    ranks, messages = Ranks(group), []
    last = ranks.rank == ranks.count - 1
    (x, y), folded = data(), torch.arange(N).roll(1)
    order = folded if last else torch.arange(N)
    lists = [(x[i], y[i]) for i in order.split(3)]
    optimizers = [lambda w: torch.optim.Adam(w.values(), 1e-3), named_adam]
    for names, call in {
        "the likelihood": lambda: made("ntk-2-C", group, likelihood="fixed", noise=0.7 + last),
        "the anchoring": lambda: made(
            "ntk-9-rows-anchored", group, anchoring=Anchoring(share=0.8 if last else 0.5)
        ),
        "the parameters": lambda: made_with_frozen(group, 1.0 + last),
        "the data": lambda: made("ntk-2-1", group).blocks((x[order], y[order])),
        "the batches (": lambda: made("kfac-N-C", group).estimate(lists),
        "the steps": lambda: Learner(
            made("ntk-2-1", group), data(), replace(ROUNDS, steps=2 + last)
        ),
        "the data.": lambda: Learner(
            made("ntk-2-1", group), [(x[i], y[i]) for i in order.tolist()], ROUNDS
        ),
        "the seed, lr": lambda: fitted(
            "map", group, seed=int(last), optimization=Optimization(lr=0.1 if last else 0.2)
        ),
        "the optimizer": lambda: fitted(
            "map", group, optimization=Optimization(optimizer=optimizers[last])
        ),
        "the test data": lambda: fitted("map", group, test=(x[order], y[order])),
    }.items():
        with pytest.raises(ConfigurationError) as caught:
            call()
        messages.append((names, str(caught.value)))
    return messages


def named_adam(weights: Mapping[str, Tensor]) -> torch.optim.Optimizer:
    return torch.optim.Adam(weights.values(), 1e-3)


def made_with_frozen(group: Any, value: float) -> Evidence:
    scale, layer = InputScale(SIZE), nn.Linear(SIZE, OUTPUTS)
    scale.requires_grad_(False)
    with torch.no_grad():
        scale.log_scale.fill_(value)
        layer.weight.zero_()
        layer.bias.zero_()
    return Evidence(
        nn.Sequential(scale, layer),
        Categorical(),
        GaussianPrior(),
        estimator="ntk-2-1",
        num_data=N,
        process_group=group,
    )


def full_memory(*_: Any) -> None:
    raise MemoryError("no memory left")


ROUNDS = Schedule(epochs=3, burn_in=1, every=1, steps=2)
FEW = replace(ROUNDS, batch_size=5)
PLAIN = Schedule(epochs=3, batch_size=5)
# Runs of ``fit``: name -> the network, and what differs in the settings.
FITS: dict[str, tuple[Callable[[], nn.Module], dict[str, Any]]] = {
    "map": (lambda: network(), {"estimator": None, "schedule": PLAIN}),
    "map-noise": (
        lambda: network(),
        {
            "estimator": None,
            "schedule": PLAIN,
            "likelihood": "gaussian",
            "optimization": Optimization(noise_on_loss=True),
        },
    ),
    "all data": (lambda: network(), {"estimator": "kfac-N-C", "hyperparameters": ["0"]}),
    "positions": (lambda: Positions(), {"estimator": None, "schedule": PLAIN}),
    "anchored": (lambda: network(), {"estimator": "ntk-12-rows-anchored"}),
    "norm": (lambda: norm(), {"estimator": "diag-3-1", "schedule": Schedule(epochs=2, burn_in=1)}),
}


class Positions(nn.Module):
    """The inputs are sequences of SIZE steps, each with a target of its own, or none."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.net = nn.Sequential(nn.Linear(1, 4), nn.Tanh(), nn.Linear(4, OUTPUTS)).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x[..., None])


def norm() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(Ranks(distributed.group.WORLD).rank)  # those of the first count
        layers = nn.Linear(SIZE, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, OUTPUTS)
        return nn.Sequential(*layers).double()


def fitted(name: str, group: Any, folder: Path | None = None, **options: Any) -> FitResult:
    make, settings = FITS[name]
    x, y = data("numbers" if settings.get("likelihood") == "gaussian" else "classes")
    if name == "positions":
        y = (torch.arange(N)[:, None] + torch.arange(SIZE)) % OUTPUTS
        y[:5, 1:] = -100  # some have one target, others three
    arguments = {"schedule": FEW, "run_dir": folder, "test": (x, y), **settings, **options}
    if name == "norm":
        y, x = y.repeat(4), x.repeat(4, 1)
        arguments["test"] = x, y
    return fit(make(), (x, y), progress=False, process_group=group, **arguments)


def outcome(result: FitResult) -> dict[str, Any]:
    rows = [{k: v for k, v in row.items() if k != "seconds"} for row in result.history]
    hyperparameters = {n: p.detach().clone() for n, p in result.evidence.hyperparameters().items()}
    state = {name: value.clone() for name, value in result.model.state_dict().items()}
    return {"rows": rows, "learned": hyperparameters, "model": state, "test": result.test_metrics}


@claim
def fits(group: Any) -> Any:
    return {name: outcome(fitted(name, group)) for name in FITS}


class Full(Exception):
    pass


def full_disk(row: Any) -> None:
    if row["epoch"] == 2:
        raise Full("no space left")


@claim
def interrupted_fits(group: Any) -> Any:
    """A run that ends with an error of the first rank after its second epoch, and goes on."""
    ranks = Ranks(group)
    folder = Path(ranks.shared(os.environ["FOLDER"])) / f"run{ranks.count}"
    with pytest.raises(Exception) as caught:
        fitted("anchored", group, folder, callbacks=[full_disk])
    distributed.barrier(group)
    if ranks.is_first:
        shutil.copytree(folder, folder.with_name(f"{folder.name}-half"))
    resumed = fitted("anchored", group, folder, resume=True)
    return {
        "error": (type(caught.value).__name__, str(caught.value)),
        "resumed": outcome(resumed),
        "run_dir": None if resumed.run_dir is None else str(resumed.run_dir),
    }


@claim
def training_in_shards(group: Any) -> Any:
    """The loop of docs/scale.md: weights and precisions after three epochs, all data a batch."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    ranks, num_data = Ranks(group), 8
    x, y = (tensor[:num_data] for tensor in data())
    layers = list(network().children())[1:]
    model = nn.Sequential(*layers)
    evidence = Evidence(
        model,
        Categorical(),
        GaussianPrior("layerwise"),
        estimator="kfac-N-C",
        num_data=num_data,
        process_group=group,
    )
    learner = Learner(evidence, (x, y), Schedule(epochs=3, burn_in=1, every=1, steps=2))
    trained = copy.deepcopy(model)
    if group is None:
        trained = model
    else:
        fully_shard(trained, mesh=init_device_mesh("cpu", (ranks.count,)))
    optimizer, part = torch.optim.SGD(trained.parameters(), lr=0.5), ranks.part(num_data)
    for _ in range(3):
        optimizer.zero_grad()
        cross_entropy(trained(x[part]), y[part]).backward()
        for name, decay in evidence.weight_decay().items():
            shard = trained.get_parameter(name)
            assert shard.grad is not None
            shard.grad.add_(shard.detach(), alpha=float(decay))
        optimizer.step()
        if group is not None:
            options = StateDictOptions(full_state_dict=True)
            model.load_state_dict(get_model_state_dict(trained, options=options))
        learner.step()
    learned = {name: p.detach().clone() for name, p in evidence.hyperparameters().items()}
    return learned | {name: p.detach().clone() for name, p in model.named_parameters()}


@claim
def seam(group: Any) -> Any:
    """Sums and gathered tensors, and their bytes: by the count, and by the operating system."""
    ranks, records = Ranks(group), []
    generator = torch.Generator().manual_seed(ranks.rank)
    big = torch.randn(100_003, generator=generator, dtype=torch.float64)
    calls: list[Callable[[], Any]] = [
        lambda: ranks.sum([big, torch.ones(2, 3), torch.tensor(ranks.rank)]),
        lambda: ranks.gather(big[: 10_000 * (ranks.rank + 1)].float()),
        lambda: ranks.gather(torch.zeros(0, 2)),
        lambda: ranks.shared({"a": [big, None], "b": "text"}),
    ]
    for call in calls:
        before, at = ranks.sent, written()
        value = call()
        distributed.barrier(group)
        records.append((value, ranks.sent - before, written() - at))
    return records


def written() -> float:
    """Bytes that this process has written to files and sockets; NaN where no Linux says it."""
    io = Path("/proc/self/io")
    lines = io.read_text().splitlines() if io.exists() else []
    return next((int(line.split()[1]) for line in lines if line.startswith("wchar")), math.nan)


def _rank(rank: int, folder: Path, port: int, count: int) -> None:
    warnings.simplefilter("ignore")
    os.environ["FOLDER"] = str(folder)
    begin(rank, port, count)
    claims = {name: run_claim(distributed.group.WORLD) for name, run_claim in CLAIMS.items()}
    torch.save(claims, folder / f"{rank}.pt")
    distributed.destroy_process_group()


def begin(rank: int, port: int, count: int) -> None:
    address = f"tcp://127.0.0.1:{port}"
    distributed.init_process_group("gloo", address, rank=rank, world_size=count)


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.long)])
def count(request: pytest.FixtureRequest) -> int:
    """The number of ranks."""
    return request.param


@pytest.fixture(scope="module")
def alone(count: int) -> dict[str, dict[str, Any]]:
    """What one process finds in place of so many ranks, by the estimator."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return {case: of_one(case, count) for case in CASES[count]}


@pytest.fixture(scope="module")
def ran(count: int, alone: Any, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each rank found.

    Forked after one process has done the same, whose imports and checks of types they have.
    """
    folder = tmp_path_factory.mktemp(f"ranks{count}")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of forks, which save the time of imports
        arguments = (folder, free_port(), count)
        start_processes(_rank, arguments, nprocs=count, start_method="fork")
    return [torch.load(folder / f"{rank}.pt") for rank in range(count)]


def assert_equal(one: Any, other: Any) -> None:
    """To the last bit."""
    torch.testing.assert_close(one, other, rtol=0, atol=0)


def test_ranks_find_what_one_process_finds(alone: Any, ran: Any) -> None:
    for estimator, one in alone.items():
        for rank in ran:
            several = rank["steps"][estimator]
            assert_equal(several["steps"], ran[0]["steps"][estimator]["steps"])
            for (value, gradients_of_rank), (expected, oracle) in zip(
                several["steps"], one["steps"], strict=True
            ):
                torch.testing.assert_close(value, expected, rtol=1e-12, atol=1e-12, msg=estimator)
                for got, true in zip(gradients_of_rank, oracle, strict=True):
                    scale = max(float(true.abs().max()), 1e-3)
                    torch.testing.assert_close(got, true, rtol=0, atol=1e-12 * scale, msg=estimator)
            torch.testing.assert_close(several["value"], one["value"], rtol=1e-12, atol=1e-12)
            assert_equal(several["state"], one["state"])


def test_a_partition_that_ranks_share_is_whole(ran: Any, count: int) -> None:
    for name, (number, mean) in ran[0]["whole_partitions"].items():
        evidence = made(name)
        blocks = list(evidence.blocks(data()).epoch())
        estimates = [evidence.estimate(block).log_det for block in blocks]
        assert number == -(-len(blocks) // count)
        assert mean == pytest.approx(sum(estimates) / len(blocks), rel=1e-12)
        assert all(rank["whole_partitions"][name] == (number, mean) for rank in ran)


@pytest.mark.parametrize("name", LEARNED)
def test_ranks_learn_the_same(ran: Any, name: str, count: int) -> None:
    hyperparameters = [rank["learning"][name] for rank in ran]
    for rank in hyperparameters[1:]:
        assert_equal(rank, hyperparameters[0])
    start = made(name.split()[0], hyperparameters=[])
    assert (hyperparameters[0][0] != next(iter(start.hyperparameters().values()))).all()
    # All data, however many ranks.
    if name in ("kfac-N-C", "ntk-N-C", "ntk-40-rows-anchored"):
        alone = learned(name, None, LEARNED[name])
        torch.testing.assert_close(hyperparameters[0], alone, rtol=1e-12, atol=0)
    if name.endswith("few"):  # each part once, whoever has it, and a rank maybe none
        alone = learned(name, None, {"prior_blocks": 2 * count})
        torch.testing.assert_close(hyperparameters[0], alone, rtol=1e-12, atol=0)


def test_data_that_are_no_blocks(ran: Any, count: int) -> None:
    x, y = data()
    for rank in ran:
        estimates = rank["given_data"]
        assert_equal(estimates["state"], ran[0]["given_data"]["state"])
        for name in ("kfac-N-C", "ntk-N-C"):
            one = fields(made(name).estimate(x, y))
            torch.testing.assert_close(estimates[name], [one, one], rtol=1e-12, atol=0)
        assert estimates["diag-N-1"] == ran[0]["given_data"]["diag-N-1"]
        subsets = [made("ntk-2-C").estimate(x[r::4], y[r::4]) for r in range(count)]
        mean = torch.tensor([fields(e) for e in subsets], dtype=torch.float64).mean(0)
        torch.testing.assert_close(estimates["ntk-2-C"], mean.tolist(), rtol=1e-12, atol=0)


def test_the_posterior_of_ranks(ran: Any) -> None:
    alone = posteriors(None)
    for rank in ran:
        torch.testing.assert_close(rank["posteriors"], alone, rtol=1e-10, atol=1e-14)


def test_the_variance_falls_as_one_over_the_ranks(ran: Any, count: int) -> None:
    ratio = float(torch.tensor(draws(None)).var() / torch.tensor(ran[0]["draws"]).var())
    assert 0.6 * count < ratio < 1.7 * count


def test_an_error_of_one_rank_is_one_of_all(ran: Any, count: int) -> None:
    *well, ill = (rank["failures"] for rank in ran)
    for number in range(2):
        name, text = ill[number]
        assert name == "InputError" and "NaN" in text
        for errors in well:
            assert errors[number] == ("RankError", f"Rank {count - 1} failed with {name}: {text}")
    for errors in (*well, ill):
        name, text = errors[2]
        assert name == "ConfigurationError" and "differ in the prior. All" in text
    assert ill[3] == ("MemoryError", "no memory left")
    assert len(ill) == 9 and all(name == "InputError" for name, _ in ill[4:])
    assert all(f"Target {OUTPUTS}" in text for _, text in ill[4:])
    for errors in well:
        for (name, text), (theirs, words) in zip(errors[3:], ill[3:], strict=True):
            assert name == "RankError"
            assert text.endswith(f"Rank {count - 1} failed with {theirs}: {words}")


def test_ranks_with_something_else_are_refused_by_name(ran: Any, count: int) -> None:
    for rank in ran:
        assert rank["differences"] == ran[0]["differences"]
        for names, text in rank["differences"]:
            assert f"The {count} ranks differ in {names}" in text


def test_sums_are_equal_on_all_ranks_and_their_bytes_are_counted(ran: Any, count: int) -> None:
    length, slack = 100_003, 4000  # of headers, and of the barrier
    generators = [torch.Generator().manual_seed(rank) for rank in range(count)]
    tensors = [torch.randn(length, generator=g, dtype=torch.float64) for g in generators]
    for number, rank in enumerate(ran):
        of_calls = [(value, (sent, kernel)) for value, sent, kernel in rank["seam"]]
        (sums, of_sums), (parts, of_parts), (none, of_none), (plain, of_plain) = of_calls
        assert_equal(sums, ran[0]["seam"][0][0])
        torch.testing.assert_close(sums[0], torch.stack(tensors).sum(0), rtol=1e-13, atol=1e-13)
        assert sums[1].tolist() == [[count] * 3] * 2 and sums[2] == count * (count - 1) // 2
        assert [len(part) for part in parts] == [10_000 * (r + 1) for r in range(count)]
        assert all(torch.equal(p, o[: len(p)].float()) for p, o in zip(parts, tensors, strict=True))
        assert [tuple(tensor.shape) for tensor in none] == [(0, 2)] * count
        assert torch.equal(plain["a"][0], tensors[0]) and plain["b"] == "text"
        # A ring: 2 (R - 1)/R of what is summed, R - 1 of the longest tensor that is gathered.
        assert of_sums[0] == sum(2 * n * (count - 1) // count for n in (8 * length, 24, 8))
        assert of_parts[0] == (count - 1) * (8 + 4 * 10_000 * count)
        assert of_none[0] == (count - 1) * 8
        assert number == 0 or of_plain[0] == 0
        for counted, kernel in (of_sums, of_parts, of_none):
            assert math.isnan(kernel) or counted <= kernel <= counted + slack


def test_a_step_sends_what_the_formula_says(ran: Any, count: int) -> None:
    """Of H hyperparameters: a word of two numbers, and a sum of H + 7 of them."""
    others = count - 1
    for name in CASES[count]:
        if name not in OWN:
            continue
        options = OWN[name]
        numbers = 7 + sum(p.numel() for p in made(name, **options).hyperparameters().values())
        for rank in ran:
            num_bytes = 16 * others + 2 * 8 * numbers * others // count
            num_bytes += others * (8 + 24) if "anchored" in name else 0  # one draw
            assert rank["steps"][name]["sent"] == STEPS * num_bytes
    # Shares of all data: diagonals or blocks are summed up.
    for name in ("diag-N-C", "blockdiag-N-C", "full-N-C"):
        evidence = made_for(name)
        numbers = 7 + sum(p.numel() for p in evidence.hyperparameters().values())
        sizes = [w.numel() for w in evidence.weights().values()]
        squares = {"diag": sum(sizes), "full": sum(sizes) ** 2}
        of_data = 8 * squares.get(evidence.estimator.structure, sum(size**2 for size in sizes))
        num_bytes = (
            2 * 16 * others + 2 * 8 * numbers * others // count + 2 * of_data * others // count
        )
        for rank in ran:
            assert rank["steps"][name]["sent"] == STEPS * num_bytes
    # The counts of kfac are summed too.
    numbers = sum(size**2 for sizes in SIZES.values() for size in sizes)
    for rank in ran:
        step = 2 * 16 * others + 2 * 8 * (7 + 4 + SIZE) * others // count
        step += 2 * 2 * 16 * others // count + 2 * 8 * numbers * others // count
        assert rank["steps"]["kfac-N-C"]["sent"] == STEPS * step


# Of each parameter of the network the sizes of its matrices.
SIZES = {"1.weight": (SIZE, 4), "1.bias": (4,), "3.weight": (4, OUTPUTS), "3.bias": (OUTPUTS,)}


def test_all_ranks_repeat_in_float64_what_one_has_to(ran: Any) -> None:
    alone = rounding(None)
    for number, (value, grads, refused) in enumerate(alone):
        assert refused[:2] == [True, False] and not any(refused[2:])
        for rank in ran:
            values, rank_gradients, rank_refused = rank["rounding"][number]
            torch.testing.assert_close(values, value, rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(rank_gradients, grads, rtol=1e-4, atol=1e-5)
            assert rank_refused == refused


@pytest.mark.parametrize("name", FITS)
def test_ranks_train_one_network(ran: Any, name: str) -> None:
    """Batches of four, which four ranks share unevenly; the sums are rounded differently."""
    outcomes = [rank["fits"][name] for rank in ran]
    for rank in outcomes[1:]:
        assert_equal(rank, outcomes[0])
    if name not in ("anchored", "norm"):  # others average other blocks, or other batch statistics
        one = outcome(fitted(name, None))
        torch.testing.assert_close(outcomes[0], one, rtol=1e-7, atol=1e-9)


def test_weights_in_shards(ran: Any) -> None:
    alone = training_in_shards(None)
    for rank in ran:
        torch.testing.assert_close(rank["training_in_shards"], alone, rtol=1e-9, atol=1e-12)


def test_a_run_goes_on_with_any_number_of_ranks(ran: Any) -> None:
    first, *others = (rank["interrupted_fits"] for rank in ran)
    assert first["error"] == ("Full", "no space left")
    for rank in others:
        assert rank["error"] == ("RankError", "Rank 0 failed with Full: no space left")
        assert rank["run_dir"] is None
    folder = Path(first["run_dir"])
    assert {path.name for path in folder.iterdir()} == {
        "checkpoint.pt",
        "config.json",
        "metrics.csv",
    }
    assert not folder.with_name(f"{folder.name}-2").exists()
    for rank in (first, *others):
        assert_equal(rank["resumed"], ran[0]["fits"]["anchored"])
    alone = fitted("anchored", None, folder.with_name(f"{folder.name}-half"), resume=True)
    assert [row["epoch"] for row in alone.history] == [1, 2, 3]


def test_parts_cover_everything_once() -> None:
    ranks = Ranks()
    for count, total in product((1, 2, 3, 7), (0, 1, 5, 12)):
        parts = []
        for number in range(count):
            ranks.rank, ranks.count = number, count
            parts.append(list(range(total))[ranks.part(total)])
        assert sum(parts, []) == list(range(total))
        assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_what_is_no_group_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="init_process_group first"):
        made("ntk-2-1", group=object())
    begin(0, free_port(), 1)
    try:
        with pytest.raises(ConfigurationError, match="a process group that .*, got 3"):
            made("ntk-2-1", group=3)
        mesh = distributed.device_mesh.init_device_mesh("cpu", (1, 1), mesh_dim_names=("a", "b"))
        with pytest.raises(ConfigurationError, match="must have one dimension, got 2"):
            made("ntk-2-1", group=mesh)
        assert Ranks(mesh["a"]).count == Ranks(distributed.group.WORLD).count == 1
        with pytest.raises(ConfigurationError, match="model.module"):
            model = DistributedDataParallel(network())
            Evidence(model, Categorical(), GaussianPrior(), estimator="ntk-2-1", num_data=N)
    finally:
        distributed.destroy_process_group()
