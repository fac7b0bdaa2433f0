"""Inputs of several tensors, against the same network on one tensor."""

from collections import UserDict
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, RandomSampler, WeightedRandomSampler

import evigrad
from evigrad.errors import InputError
from evigrad.inputs import Tree, as_inputs, called
from evigrad.invariances import AdditiveNoise, Averaged
from evigrad.likelihoods import Categorical
from evigrad.priors import GaussianPrior

N, LENGTH, WORDS = 12, 5, 7
ESTIMATORS = ["ntk-6-1", "kfac-6-C", "blockdiag-N-C", "diag-N-1", "full-6-C", "ntk-8-rows-anchored"]


class Reader(nn.Module):
    """Token ids with a mask, and numbers beside."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, 4)
        self.inner = nn.Linear(4, 3)
        self.out = nn.Linear(5, 3)
        self.scale = nn.Parameter(torch.zeros(()))

    def forward(self, ids: Tensor, mask: Tensor, numbers: Tensor | None = None) -> Tensor:
        h = self.inner(self.words(ids)).tanh() * mask[..., None]
        mean = h.sum(1) / mask.sum(1, keepdim=True)
        assert numbers is not None
        return self.out(torch.cat([mean * self.scale.exp(), numbers], 1))


class OneTensor(nn.Module):
    """The same network on one tensor."""

    def __init__(self, reader: Reader) -> None:
        super().__init__()
        self.reader = reader

    def forward(self, x: Tensor) -> Tensor:
        ids, mask, numbers = x.split([LENGTH, LENGTH, 2], 1)
        return self.reader(ids.long(), mask > 0, numbers)


class OneDictionary(nn.Module):
    def __init__(self, reader: Reader) -> None:
        super().__init__()
        self.reader = reader

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        return self.reader(batch["ids"], batch["mask"], batch["numbers"])


class Text(NamedTuple):
    ids: Tensor
    mask: Tensor


class Nested(nn.Module):
    def __init__(self, reader: Reader) -> None:
        super().__init__()
        self.reader = reader

    def forward(self, text: Text, beside: list[Tensor]) -> Tensor:
        return self.reader(text.ids, text.mask, beside[0])


def reader() -> Reader:
    torch.manual_seed(0)
    return Reader().double()


def data() -> tuple[dict[str, Tensor], Tensor]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(WORDS, (N, LENGTH), generator=generator)
    mask = torch.rand(N, LENGTH, generator=generator) > 0.3
    mask[:, 0] = True
    numbers = torch.randn(N, 2, generator=generator, dtype=torch.float64)
    y = torch.randint(3, (N,), generator=generator)
    return {"ids": ids, "mask": mask, "numbers": numbers}, y


def evidence(model: nn.Module, estimator: str = "ntk-6-1", scale: str = "scale") -> Any:
    return evigrad.Evidence(
        model,
        Categorical(),
        GaussianPrior("layerwise"),
        estimator=estimator,
        num_data=N,
        hyperparameters=[scale],
        generator=0,
    )


def results(evidence_of_form: Any, x: Any, y: Tensor) -> list[float]:
    (scale,) = [
        p for name, p in evidence_of_form.hyperparameters().items() if name.endswith("scale")
    ]
    numbers = [evidence_of_form.map_loss(x, y).item()]
    for block in evidence_of_form.blocks((x, y)).take(3):
        numbers += [
            evidence_of_form.backward(block).log_evidence,
            evidence_of_form.estimate(block).log_evidence,
        ]
        numbers.append(scale.grad.item())
    return numbers


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_numbers_are_those_of_one_tensor(estimator: str) -> None:
    x, y = data()
    flat = torch.cat([x["ids"].double(), x["mask"].double(), x["numbers"]], 1)
    expected = results(evidence(OneTensor(reader()), estimator, "reader.scale"), flat, y)
    assert results(evidence(reader(), estimator), x, y) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("form", ["mapping", "dictionary", "tuple", "nested"])
def test_forms_of_inputs(form: str) -> None:
    x, y = data()
    ids, mask, numbers = x.values()
    expected = results(evidence(reader()), x, y)
    model, inputs, scale = {
        "mapping": (reader(), UserDict(x), "scale"),
        "dictionary": (OneDictionary(reader()), x, "reader.scale"),
        "tuple": (Nested(reader()), (Text(ids, mask), [numbers]), "reader.scale"),
        "nested": (
            Nested(reader()),
            {"text": Text(ids, mask), "beside": [numbers]},
            "reader.scale",
        ),
    }[form]
    assert results(evidence(model, scale=scale), inputs, y) == pytest.approx(expected, rel=1e-12)


def test_one_subset_and_batches_of_all_data() -> None:
    x, y = data()
    subset_evidence = evidence(reader(), "kfac-N-C")
    tree = as_inputs(x)
    assert isinstance(tree, Tree)
    whole = subset_evidence.estimate(x, y).log_evidence
    batches = [(tree[:5].value, y[:5]), (tree[5:].value, y[5:])]
    assert subset_evidence.estimate(batches).log_evidence == pytest.approx(whole, rel=1e-12)
    rows = {report.name: report.rows for report in subset_evidence.describe(x)}
    assert rows["words.weight"] == "embedding" and rows["inner.weight"] == "linear"


@dataclass
class Output:
    logits: Tensor
    hidden: Tensor


class Logits(nn.Module):
    """An object with ``logits``, and a parameter without a closed form."""

    def __init__(self, boxed: bool) -> None:
        super().__init__()
        self.first, self.out = nn.Linear(2, 3), nn.Linear(3, 3)
        self.mix, self.boxed = nn.Parameter(torch.eye(3)), boxed
        self.scale = nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor) -> Any:
        hidden = torch.einsum("ni,io->no", self.first(x * self.scale.exp()).tanh(), self.mix)
        f = self.out(hidden)
        return Output(f, hidden) if self.boxed else f


@pytest.mark.parametrize("averaged", [False, True])
@pytest.mark.filterwarnings("ignore:The training loss would learn")
def test_outputs_that_are_an_object_with_logits(averaged: bool) -> None:
    (x, y), outcomes = data(), []
    for boxed in (True, False):
        torch.manual_seed(0)
        model: nn.Module = Logits(boxed).double()
        if averaged:
            model = Averaged(model, AdditiveNoise(2), num_samples=2)
        evidence_of_form = evidence(model, scale="model.scale" if averaged else "scale")
        outcomes.append(results(evidence_of_form, x["numbers"], y))
        assert {r.rows for r in evidence_of_form.describe()} == {"linear", "generic: vmap"}
    assert outcomes[0] == outcomes[1]


# ------------------------------------------------------------ data sets and loaders


class Sentences(Dataset[Any]):
    def __init__(self, ragged: bool = False) -> None:
        (self.x, self.y), self.ragged = data(), ragged

    def __len__(self) -> int:
        return N

    def __getitem__(self, index: int) -> tuple[dict[str, Any], int]:
        x = {name: part[index] for name, part in self.x.items()}
        if self.ragged:
            kept = x.pop("mask")
            x["ids"] = x["ids"][kept]
        return x, int(self.y[index])


def padded(items: list[Any]) -> tuple[dict[str, Tensor], Tensor]:
    ids = [x["ids"] for x, _ in items]
    size = max(map(len, ids))
    mask = torch.stack([torch.arange(size) < len(sentence) for sentence in ids])
    filled = torch.stack(
        [torch.cat([sentence, sentence.new_zeros(size - len(sentence))]) for sentence in ids]
    )
    numbers = torch.stack([x["numbers"] for x, _ in items])
    return {"ids": filled, "mask": mask, "numbers": numbers}, torch.tensor([y for _, y in items])


@pytest.mark.parametrize("workers", [0, 1])
def test_data_sets_and_loaders(workers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("evigrad.blocks.sources._FOR_EACH_WORKER", 1)
    x, y = data()
    expected = results(evidence(reader()), x, y)
    loader = DataLoader(Sentences(), batch_size=4, num_workers=workers, shuffle=True)
    loader_evidence = evidence(reader())
    before = torch.get_rng_state()
    blocks = list(loader_evidence.blocks(loader).take(3))
    assert torch.equal(before, torch.get_rng_state())
    numbers = [loader_evidence.map_loss(x, y).item()]
    for block in blocks:
        numbers += [
            loader_evidence.backward(block).log_evidence,
            loader_evidence.estimate(block).log_evidence,
        ]
        numbers.append(loader_evidence.hyperparameters()["model.scale"].grad.item())
    assert numbers == pytest.approx(expected, rel=1e-12)
    plain = [block.indices for block in evidence(reader()).blocks(Sentences()).take(3)]
    assert all(torch.equal(a, b.indices) for a, b in zip(plain, blocks, strict=True))


def test_lengths_of_each_batch() -> None:
    """Padding is no part of the data: the value does not depend on the batch that a datum is in."""
    sentences = Sentences(ragged=True)
    loader = DataLoader(sentences, collate_fn=padded)
    full_evidence = evidence(reader(), "ntk-N-C")
    whole = padded([sentences[n] for n in range(N)])
    (block,) = full_evidence.blocks(loader).take(1)
    expected = full_evidence.estimate(block).log_evidence
    assert full_evidence.estimate(*whole).log_evidence == pytest.approx(expected, rel=1e-12)
    parts = [padded([sentences[n] for n in range(i, i + 3)]) for i in range(0, N, 3)]
    assert len({x["ids"].shape for x, _ in parts}) > 1
    assert full_evidence.estimate(parts).log_evidence == pytest.approx(expected, rel=1e-12)


def test_fit_with_a_loader_and_its_checkpoint(tmp_path: Path) -> None:
    def run(resume: bool) -> evigrad.FitResult:
        return evigrad.fit(
            reader(),
            DataLoader(Sentences(ragged=True), collate_fn=padded),
            estimator="ntk-6-1",
            hyperparameters=["scale"],
            schedule=evigrad.Schedule(epochs=3, burn_in=1, every=1, steps=2, batch_size=4),
            run_dir=tmp_path,
            resume=resume,
        )

    first, again = run(False), run(True)  # the second one goes on after the last epoch
    assert first.history[-1]["log_evidence"] is not None
    assert again.history == first.history
    scales = [result.evidence.hyperparameters()["model.scale"] for result in (first, again)]
    assert torch.equal(*scales) and scales[0] != 0


def test_samplers_that_omit_or_repeat_examples_are_refused() -> None:
    loader = DataLoader(Sentences(), sampler=WeightedRandomSampler([1.0] * N, N))
    with pytest.raises(InputError, match=f"N = {N} examples.*torch.utils.data.Subset"):
        evidence(reader()).blocks(loader)
    with pytest.raises(InputError, match="WeightedRandomSampler"):
        evidence(reader(), "ntk-N-C").estimate(loader)
    again = DataLoader(Sentences(), sampler=RandomSampler(range(N), replacement=True))
    with pytest.raises(InputError, match="RandomSampler of the DataLoader draws with replacement"):
        evidence(reader(), "ntk-N-C").estimate(again)


# ------------------------------------------------------------ what does not fit


def test_unfit_inputs() -> None:
    for change, words in [
        ({"mask": torch.ones(N - 1, LENGTH)}, "got 12 in 'ids' and 11 in 'mask'"),
        ({"mask": "yes"}, "'mask' of the inputs must be a tensor, got str"),
        ({"mask": torch.tensor(1.0)}, "'mask' of the inputs must have a first dimension"),
        ({"ids": torch.full((N, LENGTH), 2**60)}, "integers above 2"),
        ({"numbers": torch.full((N, 2), torch.nan)}, "NaN"),
        ({"numbers": torch.zeros(N, 2, dtype=torch.complex64)}, "complex"),
        ({"other": torch.zeros(N)}, "as one argument"),
    ]:
        x, y = data()
        for call in (evidence(reader()).estimate, evidence(reader()).map_loss):
            with pytest.raises(InputError) as caught:
                call(x | change, y)
            assert words in str(caught.value)


def test_a_loader_whose_batches_are_no_pairs() -> None:
    def inputs_only(items: list[Any]) -> dict[str, Tensor]:
        return padded(items)[0]

    with pytest.raises(InputError, match="collate_fn of the DataLoader returned a dict"):
        evidence(reader()).blocks(DataLoader(Sentences(ragged=True), collate_fn=inputs_only))


def test_items_of_different_lengths_need_padding() -> None:
    with pytest.raises(InputError, match="Pad them, or pass a DataLoader"):
        list(evidence(reader()).blocks(Sentences(ragged=True)).take(3))


def test_the_model_may_change_its_inputs_in_place() -> None:
    class Changing(nn.Module):
        def forward(self, a: Tensor, b: Tensor) -> Tensor:
            return a.mul_(2) + b.add_(1)

    pair = (torch.ones(2, 1), torch.ones(2, 1))
    tree = as_inputs(pair)
    assert torch.equal(torch.as_tensor(called(Changing(), tree)), torch.full((2, 1), 4.0))
    assert torch.equal(pair[0], torch.ones(2, 1)) and torch.equal(pair[1], torch.ones(2, 1))
