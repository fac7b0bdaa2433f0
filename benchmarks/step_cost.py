"""Measure the cost of a hyperparameter gradient, in plain training steps on the same images.

The training step is the forward and backward pass of the training loss on m images, or on m times S
images if the network averages over S transforms. It runs in the same process and in turns with the
gradient. Both use equal micro-batches, with channels first in memory unless ``--channels-last`` is
given. "precisions" learns only layerwise precisions. "invariances" also learns the ranges of an
affine invariance, exactly, in two passes.

    python benchmarks/step_cost.py --model mininet --csv docs/results/step_cost_mininet.csv
    python benchmarks/step_cost.py --model wrn16-4 --data 64 --csv wrn.csv
    python benchmarks/step_cost.py --model vit bert gpt lstm gru --data 64 --samples 1 --threads 1

``--against`` compares with another source tree, case by case. Processes of both trees take turns,
and each ratio compares two neighbors. The training step is equal in both trees. Its ratio shows the
noise.

    python benchmarks/step_cost.py --model mininet --data 64 --against ../before/src --rounds 9

"vit", "bert" and "gpt" are small networks of the package transformers, with four blocks of 128
units, on images of 65 patches or 64 words. "lstm" and "gru" are PyTorch's, with 128 units and 32
words.
"""

import argparse
import json
import statistics
import warnings
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import torch
from measure import in_own_process, machine, paired, pass_checks, write_csv
from torch import Tensor, nn

import evigrad
from evigrad import Evidence, Memory
from evigrad.errors import EvigradWarning
from evigrad.invariances import AffineInvariance, Averaged
from evigrad.likelihoods import Categorical
from evigrad.models import make_model
from evigrad.priors import GaussianPrior

SHAPES = {"mininet": (1, 28, 28), "wrn16-4": (3, 32, 32)}
WORDS, PADDING = 1000, 0


class Reader(nn.Module):
    """A network of transformers for words, some of which are padding."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, words: Tensor) -> Tensor:
        return self.network(input_ids=words, attention_mask=(words != PADDING).long()).logits


class Recurrent(nn.Module):
    """The last output of a recurrent layer."""

    def __init__(self, layer: nn.RNNBase) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, layer.input_size)
        self.layer, self.head = layer, nn.Linear(layer.hidden_size, 10)

    def forward(self, words: Tensor) -> Tensor:
        return self.head(self.layer(self.words(words))[0][:, -1])


def vit() -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    settings: dict[str, Any] = {"image_size": 32, "patch_size": 4, "num_labels": 10}
    sizes = {"hidden_size": 128, "intermediate_size": 512}
    counts = {"num_hidden_layers": 4, "num_attention_heads": 4}
    return ViTForImageClassification(ViTConfig(**settings, **sizes, **counts))


def bert() -> nn.Module:
    from transformers import BertConfig, BertForSequenceClassification

    settings: dict[str, Any] = {"vocab_size": WORDS, "num_labels": 10}
    sizes = {"hidden_size": 128, "intermediate_size": 512, "max_position_embeddings": 64}
    counts = {"num_hidden_layers": 4, "num_attention_heads": 4}
    return Reader(BertForSequenceClassification(BertConfig(**settings, **sizes, **counts)))


def gpt() -> nn.Module:
    from transformers import GPT2Config, GPT2ForSequenceClassification

    tokens = {"pad_token_id": PADDING, "bos_token_id": 1, "eos_token_id": 2}
    settings: dict[str, Any] = {"vocab_size": WORDS, "num_labels": 10, **tokens}
    sizes = {"n_embd": 128, "n_layer": 4, "n_head": 4, "n_positions": 64}
    return Reader(GPT2ForSequenceClassification(GPT2Config(**settings, **sizes)))


# Networks without ``make_model``, and the shape of an example. Words have one dimension.
OTHERS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "vit": (vit, (3, 32, 32)),
    "bert": (bert, (64,)),
    "gpt": (gpt, (64,)),
    "lstm": (lambda: Recurrent(nn.LSTM(128, 128, batch_first=True)), (32,)),
    "gru": (lambda: Recurrent(nn.GRU(128, 128, batch_first=True)), (32,)),
}


def network_and_data(name: str, num_data: int) -> tuple[nn.Module, Tensor]:
    """Return a network and random inputs. A quarter of the sentences is padded to half."""
    if name not in OTHERS:
        return make_model(name, SHAPES[name], 10, seed=0), torch.rand(num_data, *SHAPES[name])
    build, shape = OTHERS[name]
    torch.manual_seed(0)
    network = build()
    if len(shape) > 1:
        return network, torch.rand(num_data, *shape)
    words = torch.randint(3, WORDS, (num_data, *shape))
    if name in ("bert", "gpt"):
        words[: num_data // 4, shape[0] // 2 :] = PADDING
    return network, words


STRUCTURES = {"ntk": {}, "kfac-expand": {"sharing": "expand"}, "kfac-reduce": {"sharing": "reduce"}}
NUM_DATA = 50_000
HERE = Path(evigrad.__file__).parent.parent


def training_step(model: nn.Module, x: Tensor, y: Tensor, micro_batch: int) -> Callable[[], None]:
    """Run forward and backward of the mean negative log likelihood, in micro-batches."""
    weights = [p for p in model.parameters() if p.requires_grad]

    def step() -> None:
        model.train()
        for start in range(0, len(x), micro_batch):
            part = slice(start, start + micro_batch)
            f = model(x[part])
            f = f if isinstance(f, Tensor) else f.logits
            loss = nn.functional.cross_entropy(f, y[part], reduction="sum")
            torch.autograd.grad(loss / len(x), weights)

    return step


def times_of(
    name: str,
    num_data: int,
    samples: int,
    micro_batch: int,
    arguments: argparse.Namespace,
) -> dict[str, float]:
    """Return seconds of the training step and of each structure's gradient."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    network, x = network_and_data(name, num_data)
    network, x = network.to(device), x.to(device)
    with torch.no_grad():  # Fixup starts with zeros, which would make most rows zero
        for p in network.parameters():
            if not p.any():
                p.normal_(std=0.05)
    y = torch.randint(10, (num_data,), device=device)
    layout = torch.channels_last if arguments.channels_last else torch.contiguous_format
    network = network.to(memory_format=layout)
    if x.dim() == 4:
        x = x.to(memory_format=layout)
    repeated = x.repeat_interleave(samples, 0)
    step = training_step(network, repeated, y.repeat_interleave(samples), micro_batch * samples)
    works: dict[str, Callable[[], object]] = {"step": step}
    for label in arguments.structures:
        model: nn.Module = network
        hyperparameters: list[str] = []
        if samples > 1:
            model = Averaged(network, AffineInvariance().to(device), num_samples=samples)
            hyperparameters = ["invariance"]
        structure, settings = label.split("-")[0], STRUCTURES[label]
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The model has normalization", EvigradWarning)
            evidence = Evidence(
                model,
                Categorical(),
                GaussianPrior("layerwise"),
                estimator=f"{structure}-{num_data}-1",
                num_data=NUM_DATA,
                hyperparameters=hyperparameters,
                memory=Memory(
                    micro_batch=micro_batch, autocast=torch.bfloat16 if arguments.autocast else None
                ),
                generator=0,
                **settings,
            )
        pass_checks(evidence, x[:3], y[:3], passes=1 + arguments.repeats)
        works[label] = lambda evidence=evidence: evidence.backward(x, y)
    return paired(works, arguments.repeats)


def measure(
    name: str, num_data: int, samples: int, arguments: argparse.Namespace
) -> list[dict[str, Any]]:
    """Return all structures on one network and size, relative to the training step."""
    micro_batch = micro_batch_of(num_data, samples, arguments)
    times = times_of(name, num_data, samples, micro_batch, arguments)
    kind = "precisions" if samples == 1 else "invariances"
    rows = []
    for label in arguments.structures:
        rows.append(
            {
                "model": name,
                "learned": kind,
                "samples": samples,
                "m": num_data,
                "micro_batch": micro_batch,
                "structure": label,
                "step_seconds": f"{times['step']:.4f}",
                "seconds": f"{times[label]:.4f}",
                "ratio": f"{times[label] / times['step']:.2f}",
                "machine": machine(),
            }
        )
        print(
            f"{name} {kind:11} S={samples} m={num_data:4} {label:12} {times[label]:8.3f} s"
            f" = {times[label] / times['step']:5.2f} steps of {times['step']:.3f} s",
            flush=True,
        )
    return rows


def micro_batch_of(num_data: int, samples: int, arguments: argparse.Namespace) -> int:
    """Return the number of examples per pass."""
    return max(1, (arguments.images or num_data * samples) // samples)


def compare(
    name: str, num_data: int, samples: int, structure: str, arguments: argparse.Namespace
) -> dict[str, Any]:
    """Return seconds of one case in two source trees, by processes that take turns."""
    case = ["--one", "--model", name, "--data", str(num_data), "--samples", str(samples)]
    case += ["--structures", structure, "--repeats", str(arguments.repeats)]
    case += ["--threads", str(arguments.threads)]
    case += ["--images", str(arguments.images)] if arguments.images else []
    case += ["--channels-last"] if arguments.channels_last else []
    case += ["--autocast"] if arguments.autocast else []
    trees = {"here": HERE, "there": arguments.against}
    seconds: dict[str, list[dict[str, float]]] = {tree: [] for tree in trees}
    for number in range(arguments.rounds):
        for tree in trees if number % 2 else reversed(trees):
            times = in_own_process(__file__, case, arguments.timeout, trees[tree])
            if "failed" in times:
                raise SystemExit(f"{' '.join(case)} with {trees[tree]}: {times['failed']}")
            if not Path(times["package"]).is_relative_to(trees[tree].resolve()):
                raise SystemExit(f"evigrad came from {times['package']}, not from {trees[tree]}.")
            seconds[tree].append(times["seconds"])
    row = {"model": name, "samples": samples, "m": num_data, "structure": structure}
    for key, label in (("", structure), ("step_", "step")):
        here, there = ([times[label] for times in seconds[tree]] for tree in trees)
        ratios = [a / b for a, b in zip(here, there, strict=True)]
        row |= {
            f"{key}seconds": f"{statistics.median(here):.4f}",
            f"{key}seconds_there": f"{statistics.median(there):.4f}",
            f"{key}ratio": f"{statistics.median(here) / statistics.median(there):.3f}",
            f"{key}ratio_low": f"{min(ratios):.3f}",
            f"{key}ratio_high": f"{max(ratios):.3f}",
        }
    print(
        f"{name} S={samples} m={num_data:4} {structure:12} {row['seconds']} s here,"
        f" {row['seconds_there']} s there, ratio {row['ratio']}"
        f" ({row['ratio_low']} to {row['ratio_high']}); training step {row['step_ratio']}"
        f" ({row['step_ratio_low']} to {row['step_ratio_high']})",
        flush=True,
    )
    return row | {"rounds": arguments.rounds, "machine": machine()}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    models = [*SHAPES, *OTHERS]
    parser.add_argument("--model", nargs="+", choices=models, default=["mininet"])
    parser.add_argument("--data", type=int, nargs="+", default=[16, 32, 64, 128, 256])
    parser.add_argument("--samples", type=int, nargs="+", default=[1, 5])
    names = list(STRUCTURES)
    parser.add_argument("--structures", nargs="+", choices=names, default=names)
    parser.add_argument("--images", type=int, help="images per micro-batch (default: all at once)")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--channels-last", action="store_true")
    parser.add_argument("--autocast", action="store_true", help="passes in bfloat16")
    parser.add_argument("--csv", type=Path)
    parser.add_argument(
        "--against", type=Path, help="source folder of another evigrad, such as ../before/src"
    )
    parser.add_argument("--rounds", type=int, default=5, help="number of processes per tree")
    parser.add_argument("--timeout", type=float, default=600, help="seconds of a process")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    cases = list(product(options.model, options.samples, options.data))
    if options.one:
        ((name, samples, num_data),) = cases
        size = micro_batch_of(num_data, samples, options)
        times = times_of(name, num_data, samples, size, options)
        print(json.dumps({"package": evigrad.__file__, "seconds": times}))
        return
    print(machine())
    rows: list[dict[str, Any]] = []
    for name, samples, num_data in cases:
        if options.against is None:
            rows += measure(name, num_data, samples, options)
        for structure in options.structures if options.against is not None else ():
            rows.append(compare(name, num_data, samples, structure, options))
        if options.csv:
            write_csv(options.csv, rows)


if __name__ == "__main__":
    main()
