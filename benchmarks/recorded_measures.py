"""A case of `record_numbers.py`, and how to take its numbers.

A case names the parts of its evidence and one of ``MEASURES``. It is plain data, so that a process
can receive it and a file can name it.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch
from recorded_networks import LIKELIHOODS, NETWORKS, PRIORS, ManyItems
from torch import Tensor, nn
from torch.multiprocessing.spawn import start_processes
from torch.utils._pytree import tree_map
from torch.utils.data import DataLoader, TensorDataset

import evigrad
from evigrad import Anchoring, Estimate, Evidence, Memory, Optimization, Schedule
from evigrad.errors import EvigradError
from evigrad.training import Settings, prepare

SEED, TEMPERATURE, DRAWS = 3, 0.8, 2
IGNORED = -100

# A list of numbers for each thing that was computed; the name of the error where it was refused.
Numbers = list[list[float] | str]


@dataclass(frozen=True, kw_only=True)
class Case:
    """One evidence and its measure, by the names of the tables."""

    estimator: str = "ntk-3-C"
    network: str = "gated"
    likelihood: str = "categorical"
    prior: str = "layerwise"
    dtype: str = "float64"
    measure: str = "draws"
    options: dict[str, Any] = field(default_factory=dict)  # other keywords of ``Evidence``
    memory: dict[str, Any] = field(default_factory=dict)  # fields of ``Memory``
    details: dict[str, Any] = field(default_factory=dict)  # what the measure takes

    @property
    def key(self) -> str:
        """Return the options that differ from the defaults, and the estimator."""
        defaults = asdict(Case())
        changed = {name: v for name, v in asdict(self).items() if v != defaults[name]}
        return json.dumps({"estimator": self.estimator, **changed})

    def record(self) -> Numbers:
        """Return the numbers, or the name of an error if the evidence raised it."""
        try:
            return MEASURES[self.measure](self)
        except EvigradError as error:
            return [type(error).__name__]


class Made(NamedTuple):
    """An evidence with its data and the generator of its draws."""

    evidence: Evidence
    x: Any
    y: Tensor
    generator: torch.Generator

    @property
    def data(self) -> tuple[Any, Tensor]:
        return self.x, self.y


def model_and_data(case: Case) -> tuple[nn.Module, Any, Any, Tensor]:
    """Return network, likelihood, inputs and targets of a fixed seed."""
    network, dtype = NETWORKS[case.network], getattr(torch, case.dtype)
    make_likelihood, outputs, targets = LIKELIHOODS[case.likelihood]
    likelihood = make_likelihood()
    torch.manual_seed(0)
    model = network.build(outputs).to(dtype)
    generator = torch.Generator().manual_seed(1)
    x = tree_map(lambda leaf: leaf.to(dtype) if leaf.is_floating_point() else leaf,
                 network.inputs(generator))  # fmt: skip
    count = len(x if isinstance(x, Tensor) else first_leaf(x))
    places = torch.Size(network.positions).numel()
    y = targets(likelihood, generator, count * places, outputs)
    if network.positions:
        if case.likelihood == "categorical":
            y[::5] = IGNORED
        y = y.unflatten(0, (count, *network.positions))
    return model, likelihood, x, y


def first_leaf(tree: Any) -> Tensor:
    while not isinstance(tree, Tensor):
        tree = next(iter(tree.values() if isinstance(tree, dict) else tree))
    return tree


def number_of_examples(case: Case, y: Tensor) -> int:
    """Return N, which counts positions with a target."""
    positions = NETWORKS[case.network].positions
    if positions and case.likelihood == "categorical":
        return int((y != IGNORED).sum())
    return y.shape[: 1 + len(positions)].numel()


def make(case: Case, **options: Any) -> Made:
    """Return the evidence of a case, its data and its generator."""
    model, likelihood, x, y = model_and_data(case)
    generator = torch.Generator().manual_seed(SEED)
    options = {"temperature": TEMPERATURE, **case.options, **options}
    options.setdefault("hyperparameters", NETWORKS[case.network].hyperparameters)
    if "anchoring" in options:
        options["anchoring"] = Anchoring(**options["anchoring"])
    evidence = Evidence(
        model,
        likelihood,
        PRIORS[case.prior](),
        estimator=case.estimator,
        num_data=number_of_examples(case, y),
        memory=Memory(**case.memory),
        generator=generator,
        **options,
    )
    if case.prior == "initial":  # or the weights would lie at their mean
        with torch.no_grad():
            for weight in evidence.weights().values():
                weight += 0.2 * torch.linspace(-1, 1, weight.numel()).to(weight).view_as(weight)
    return Made(evidence, x, y, generator)


# ------------------------------------------------------------ numbers


def terms_of(estimate: Estimate) -> list[float]:
    """Return the numbers of an estimate."""
    names = ("log_evidence", "log_likelihood", "log_prior", "log_det", "log_hyperprior", "is_bound")
    return [float(getattr(estimate, name)) for name in names]


def taken_gradients(evidence: Evidence) -> list[float]:
    """Return the gradients in the hyperparameters, and clear them."""
    values = list[float]()
    for parameter in evidence.hyperparameters().values():
        if parameter.grad is not None:
            values += flat(parameter.grad)
            parameter.grad = None
    return values


def flat(*tensors: Tensor) -> list[float]:
    return [value for tensor in tensors for value in tensor.detach().double().flatten().tolist()]


def next_draw(generator: torch.Generator) -> list[float]:
    """Return the next draw of a generator, which reveals the number of draws before it."""
    return [float(torch.randint(2**31, (), generator=generator))]


def kept_steps(evidence: Evidence, block: Any, names: Sequence[str], count: int = 2) -> Numbers:
    """Return steps of prior or noise on a stored pass, or the error if there is none."""
    try:
        block_pass = evidence.collect(block, wrt=names)
    except EvigradError as error:
        return [type(error).__name__]
    values: Numbers = []
    parameters = evidence.hyperparameters()
    for _ in range(count):
        values += [
            terms_of(evidence.backward_kept(block_pass, wrt=names)),
            taken_gradients(evidence),
        ]
        with torch.no_grad():
            for name in names:
                parameters[name] += 0.1
    return values


# ------------------------------------------------------------ measures


def draws(case: Case) -> Numbers:
    """Return estimates and gradients of several draws, and steps on stored passes."""
    evidence, x, y, generator = make(case)
    values: Numbers = []
    for block in evidence.blocks((x, y)).take(DRAWS):
        values += [terms_of(evidence.backward(block)), taken_gradients(evidence)]
    names = [name for name in evidence.hyperparameters() if not name.startswith("model.")]
    of_prior = [name for name in names if name.startswith("prior.")]
    for changing in dict.fromkeys([tuple(of_prior), tuple(names)]):
        if changing:
            (block,) = evidence.blocks((x, y)).take(1)
            values += kept_steps(evidence, block, changing)
    return [*values, next_draw(generator)]


def subsets(case: Case) -> Numbers:
    """Return numbers of the caller's draws: all data, a part, batches, an epoch, a mean."""
    evidence, x, y, generator = make(case)
    values: Numbers = [terms_of(evidence.backward(x, y)), taken_gradients(evidence)]
    batches = [(x[i : i + 3], y[i : i + 3]) for i in range(0, len(y), 3)]
    for attempt in (partial(evidence.backward, x[:3], y[:3]), partial(evidence.backward, batches)):
        try:
            values += [terms_of(attempt()), taken_gradients(evidence)]
        except EvigradError as error:
            values.append(type(error).__name__)
    blocks = list(evidence.blocks((x, y)).epoch())
    values += [terms_of(evidence.estimate(block)) for block in blocks]
    passes = [evidence.collect(block, wrt=["prior"]) for block in blocks]
    values += [terms_of(evidence.backward_kept(*passes, wrt=["prior"])), taken_gradients(evidence)]
    return [*values, next_draw(generator)]


def forms_of_data(case: Case) -> Numbers:
    """Return numbers of equal data as a data set and as a loader."""
    evidence, x, y, generator = make(case)
    pairs = TensorDataset(x, y)
    values: Numbers = []
    for form in (pairs, DataLoader(pairs, batch_size=3), [(x[i], y[i]) for i in range(len(y))]):
        for block in evidence.blocks(form).take(DRAWS):
            values.append(beside_the_control_variate(evidence.backward(block)))
            values.append(taken_gradients(evidence))
    return [*values, next_draw(generator)]


def kept(case: Case) -> Numbers:
    """Return numbers of many steps on a stored pass. Later steps may use eigenvalues."""
    evidence, x, y, generator = make(case)
    names = [name for name in evidence.hyperparameters() if not name.startswith("model.")]
    (block,) = evidence.blocks((x, y)).take(1)
    return [*kept_steps(evidence, block, names, count=6), next_draw(generator)]


def many_data(case: Case) -> Numbers:
    """Return draws from large data sets, which use other permutations, pools and tails."""
    model, likelihood, _, _ = model_and_data(case)
    count = case.details["count"]
    items = ManyItems(count, LIKELIHOODS[case.likelihood][1])
    generator = torch.Generator().manual_seed(SEED)
    evidence = Evidence(
        model,
        likelihood,
        PRIORS[case.prior](),
        estimator=case.estimator,
        num_data=count,
        hyperparameters=NETWORKS[case.network].hyperparameters,
        generator=generator,
        **case.options,
    )
    values: Numbers = []
    for block in evidence.blocks(items).take(DRAWS):
        values.append(beside_the_control_variate(evidence.backward(block)))
        values.append(taken_gradients(evidence))
    return [*values, next_draw(generator)]


def beside_the_control_variate(estimate: Estimate) -> list[float]:
    """Return the numbers of an estimate without the control variate of anchored draws."""
    return [estimate.log_likelihood, estimate.log_prior, *estimate.entropies]


def anchored(case: Case) -> Numbers:
    """Return draws and a whole partition of an anchored estimator.

    The value has a control variate of expectation zero, which no gradient contains. Only
    ``details={"values": True}`` records it, in a separate family: removing it changes these numbers
    and no others. ``bracket`` has it too, if it takes some of the blocks.
    """
    evidence, x, y, generator = make(case)
    with_values = case.details.get("values", False)

    def taken(estimate: Estimate) -> Numbers:
        if with_values:
            return [terms_of(estimate)]
        return [beside_the_control_variate(estimate), taken_gradients(evidence)]

    values: Numbers = []
    stream = evidence.blocks((x, y))
    for block in stream.take(4):
        values += taken(evidence.backward(block))
    for block in stream.epoch():
        values += taken(evidence.backward(block))
    for block in stream.drawn(4).blocks(2):
        both = evidence.collect(block, wrt=["prior"])
        values += taken(evidence.backward_kept(both, wrt=["prior"]))
        values += taken(evidence.backward_kept(*both.draws(), wrt=["prior"]))
    return [*values, next_draw(generator)]


def map_loss(case: Case) -> Numbers:
    """Return the training loss, its gradients in weights and hyperparameters, and the decay."""
    evidence, x, y, _ = make(case)
    optimizer = torch.optim.SGD(evidence.weights().values(), lr=1.5)
    values: Numbers = []
    settings: list[dict[str, Any]] = [{}, {"optimizer": optimizer, "scale": 0.5}]
    if NETWORKS[case.network].hyperparameters:
        settings.append({"wrt": ["model"]})
    for options in settings:
        loss = evidence.map_loss(x, y, **options)
        parameters = [p for p in evidence.model.parameters() if p.requires_grad]
        gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
        values += [flat(loss), flat(*(g for g in gradients if g is not None))]
    evidence.add_weight_decay(optimizer, scale=0.5)
    decays = [w.grad for w in evidence.weights().values() if w.grad is not None]
    return [*values, flat(*decays), flat(*evidence.weight_decay().values())]


def posterior(case: Case) -> Numbers:
    """Return covariances and predictions by every link, also from the saved state."""
    evidence, x, y, generator = make(case)
    fitted = evidence.posterior((x, y), **case.details)
    loaded = evidence.posterior(state=fitted.state_dict())
    is_classification = evidence.likelihood.is_classification
    if case.likelihood.startswith("weighted"):  # predictions have no weights
        y = y[:, 0].long() if is_classification else y[:, :-1]
    values: Numbers = []
    for link in ("monte-carlo", "plug-in", *(["probit"] if is_classification else [])):
        predictive = fitted(x, link=link, num_samples=20)
        values.append(flat(predictive.log_prob(y)))
        values.append(flat(predictive.mean, predictive.variance))
        if is_classification:
            values.append(flat(predictive.probabilities))
    predictive = loaded(x)
    values += [flat(predictive.outputs), flat(predictive.covariance)]
    samples = fitted.sample(x, 3, torch.Generator().manual_seed(5))
    return [*values, flat(samples), next_draw(generator)]


def bracket(case: Case) -> Numbers:
    """Return bounds on the log evidence, by some blocks and by all. See ``anchored``."""
    evidence, x, y, generator = make(case)
    some_blocks = evigrad.bracket(evidence, (x, y), rows=8, blocks=2)
    if case.details.get("values", False):
        return [[some_blocks.lower, some_blocks.lower_error]]
    all_blocks = evigrad.bracket(evidence, (x, y), rows=8, blocks=None)
    values: Numbers = [[some_blocks.upper], [all_blocks.lower, all_blocks.upper]]
    return [*values, next_draw(generator)]


# ------------------------------------------------------------ training

SCHEDULE = {"epochs": 3, "batch_size": 3, "burn_in": 1, "every": 1, "steps": 2, "eval_every": 0}


def training_options(case: Case) -> tuple[nn.Module, tuple[Any, Tensor], dict[str, Any]]:
    """Return the model, the data, and keywords that ``fit`` and ``tune`` share."""
    model, likelihood, x, y = model_and_data(case)
    options = {
        "likelihood": likelihood,
        "estimator": case.estimator,
        "prior": case.prior if case.prior in ("scalar", "diagonal") else PRIORS[case.prior](),
        "hyperparameters": list(NETWORKS[case.network].hyperparameters),
        "memory": Memory(**case.memory),
        **case.options,
    }
    if "optimization" in options:
        options["optimization"] = Optimization(**options["optimization"])
    if "anchoring" in options:
        options["anchoring"] = Anchoring(**options["anchoring"])
    return model, (x, y), options


def learned(evidence: Evidence) -> Numbers:
    """Return weights and hyperparameters, and the next draw of the evidence."""
    values = [flat(*evidence.weights().values()), flat(*evidence.hyperparameters().values())]
    return [*values, next_draw(evidence.generator)]


def fit(case: Case) -> Numbers:
    """Return learned values and metrics of three epochs of training."""
    model, data, options = training_options(case)
    schedule = Schedule(**{**SCHEDULE, **case.details})
    # Not by fit, because some cases have settings without effect.
    group = options.pop("process_group", None)
    settings = Settings(schedule=schedule, **options)
    trainer = prepare(model, data, settings, test=data, process_group=group)
    result = trainer.train(progress=False)
    metrics = [list(m.values()) for m in (result.train_metrics, result.test_metrics)]
    return [*learned(result.evidence), *metrics]


def tune(case: Case) -> Numbers:
    """Return numbers of rounds of hyperparameter steps with fixed weights."""
    model, data, options = training_options(case)
    result = evigrad.tune(model, data, rounds=2, steps=2, **options, **case.details)
    return learned(result.evidence)


def learner(case: Case) -> Numbers:
    """Return numbers of a custom training loop, with its state saved and loaded in the middle."""
    evidence, x, y, _ = make(case)
    optimizer = torch.optim.Adam(evidence.weights().values(), lr=0.05)
    rounds = evigrad.Learner(evidence, (x, y), Schedule(epochs=4, burn_in=1, every=1, steps=2))
    for _ in range(4):
        for start in range(0, len(y), 3):
            indices = torch.arange(start, min(start + 3, len(y)))
            loss = evidence.map_loss(x[indices], y[indices], indices=indices)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        rounds.step()
        rounds.load_state_dict(rounds.state_dict())
    return learned(evidence)


# ------------------------------------------------------------ two processes

RANK_CASES = (
    Case(estimator="ntk-3-1"),
    Case(estimator="ntk-3-C", network="averaged-gated"),
    Case(estimator="ntk-N-C"),
    Case(estimator="ntk-N-1"),
    Case(estimator="full-3-C", prior="scalar"),
    Case(estimator="full-N-C"),
    Case(estimator="blockdiag-3-1-iid", options={"parameter_partition": "module"}),
    Case(estimator="blockdiag-N-C", likelihood="gaussian"),
    Case(estimator="kfac-3-1", network="convolutional"),
    Case(estimator="kfac-N-C", likelihood="gaussian", options={"hyperparameters": []}),
    Case(estimator="kfac-N-1", options={"sharing": "reduce"}),
    Case(estimator="diag-3-2-mc", network="averaged-scaled"),
    Case(estimator="diag-N-C", prior="diagonal"),
    Case(estimator="diag-N-1-iid", memory={"micro_batch": 2}),
    Case(estimator="kfac-N-C", network="tagger"),
)
RANK_TRAINING = (
    Case(estimator="ntk-3-C", measure="fit"),
    Case(estimator="kfac-N-C", measure="fit", options={"hyperparameters": []}),
    Case(estimator="ntk-6-rows-anchored", measure="fit", options={"hyperparameters": []}),
)


def rank(number: int, folder: str) -> None:
    """Return the numbers of one of two processes. The first process is recorded."""
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo", f"file://{folder}/store", rank=number, world_size=2
    )
    group = torch.distributed.group.WORLD
    values: dict[str, Numbers] = {}
    for case in RANK_CASES:
        evidence, x, y, generator = make(case, process_group=group)
        numbers: Numbers = []
        blocks = evidence.blocks((x, y))
        for block in blocks.take(DRAWS):
            numbers += [terms_of(evidence.backward(block)), taken_gradients(evidence)]
        (block,) = blocks.take(1)
        block_pass = evidence.collect(block, wrt=["prior"])
        numbers += [
            terms_of(evidence.backward_kept(block_pass, wrt=["prior"])),
            taken_gradients(evidence),
        ]
        if "-N-" in case.estimator:
            numbers.append(terms_of(evidence.estimate(x, y)))
        if case.prior == "layerwise":
            numbers.append(flat(evidence.posterior((x, y), structure="kfac")(x).covariance))
        values[case.key] = [*numbers, next_draw(generator)]
    for case in RANK_TRAINING:
        options = {**case.options, "process_group": group}
        values[case.key] = fit(Case(**{**vars(case), "options": options}))
    if number == 0:
        torch.save(values, f"{folder}/numbers.pt")
    torch.distributed.destroy_process_group()


def two_ranks(_: Case) -> Numbers:
    """All of ``RANK_CASES`` by two processes of Gloo, a list for each of them."""
    with TemporaryDirectory() as folder:
        start_processes(rank, (folder,), nprocs=2, start_method="spawn")
        values = torch.load(Path(folder) / "numbers.pt")
    return [number for key in values for number in values[key]]


MEASURES: dict[str, Callable[[Case], Numbers]] = {
    measure.__name__: measure
    for measure in (
        draws, kept, subsets, forms_of_data, many_data, anchored, map_loss, posterior, bracket,
        fit, tune, learner, two_ranks,
    )
}  # fmt: skip
