"""The callback in the ``Trainer`` of Transformers, with small networks made on the spot."""

import os
import socket
import statistics
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from late import Late, needs
from torch import Tensor, distributed, nn
from torch.multiprocessing.spawn import start_processes
from torch.utils.data import IterableDataset

from evigrad import Evidence, Learner, Schedule
from evigrad.errors import ConfigurationError, EvigradWarning
from evigrad.likelihoods import Categorical
from evigrad.priors import GaussianPrior
from evigrad.training.data import stream

transformers = Late("transformers")

pytestmark = [
    needs("transformers", "accelerate"),
    pytest.mark.filterwarnings("ignore:The model has normalization layers"),
    # Of these libraries' own code.
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated"),
]
N, LENGTH, WORDS, CLASSES, STEPS = 24, 5, 9, 3, 3
Records = list[dict[str, Tensor]]


@pytest.fixture(autouse=True)
def _no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def bert() -> Any:
    torch.manual_seed(0)
    sizes = {"vocab_size": WORDS, "hidden_size": 8, "num_hidden_layers": 1, "num_labels": CLASSES}
    sizes |= {"num_attention_heads": 2, "intermediate_size": 8, "max_position_embeddings": LENGTH}
    none = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    config = transformers.BertConfig(**sizes, **none)
    return stirred(transformers.BertForSequenceClassification(config))


def gpt() -> Any:
    torch.manual_seed(0)
    sizes = {"vocab_size": WORDS, "n_embd": 8, "n_layer": 1, "n_head": 2, "n_positions": LENGTH}
    none = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    ends = {"bos_token_id": 0, "eos_token_id": 0}
    return stirred(transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, **none, **ends)))


def stirred(model: Any) -> Any:
    """With no weight at zero: after so few steps its precision would have no bound."""
    for parameter in model.parameters():
        parameter.data += 0.3 * torch.randn_like(parameter)
    return model


def sentences() -> Records:
    """Classes by the first word; sentences of several lengths."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(1, WORDS, (N, LENGTH), generator=generator)
    mask = (torch.arange(LENGTH) < torch.randint(2, LENGTH + 1, (N, 1), generator=generator)).long()
    return [
        {"input_ids": i * m, "attention_mask": m, "labels": i[0] % CLASSES}
        for i, m in zip(ids, mask, strict=True)
    ]


def text() -> Records:
    """Each word is to be followed by the next one; padding has no label, nor has the first word.

    (Of GPT-2's the trainer counts the first labels too, although none of them has a loss.)
    """
    records = sentences()
    for record in records:
        record["labels"] = record["input_ids"].masked_fill(record["attention_mask"] == 0, -100)
        record["labels"][0] = -100
    return records


def callback(**changes: Any) -> Any:
    schedule = Schedule(burn_in=1, every=1, steps=2)
    kind = import_module("evigrad.transformers").EvidenceCallback
    return kind(**{"estimator": "ntk-10-1", "schedule": schedule, **changes})


def trainer_of(
    model: nn.Module,
    data: Any,
    folder: Path,
    *callbacks: Any,
    optimizer: Any = None,
    **settings: Any,
) -> Any:
    arguments: dict[str, Any] = {
        "output_dir": str(folder),
        "per_device_train_batch_size": N // STEPS,
        "num_train_epochs": 3,
        "learning_rate": 0.02,
        "report_to": [],
        "disable_tqdm": True,
        "save_strategy": "no",
        "logging_strategy": "no",
        "use_cpu": True,
        "dataloader_pin_memory": False,
        **settings,
    }
    return transformers.Trainer(
        model,
        transformers.TrainingArguments(**arguments),
        train_dataset=data,
        callbacks=list(callbacks),
        optimizers=(optimizer, None),
    )


def together(data: Records) -> tuple[dict[str, Tensor], Tensor]:
    names = list(data[0])
    x = {name: torch.stack([record[name] for record in data]) for name in names}
    return x, x.pop("labels")


def weights_of(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def log_precision_of(learned: Any) -> Tensor:
    return learned.evidence.prior.log_precision.detach()


@pytest.mark.each(1)
@pytest.mark.parametrize("clip", [0.0, 0.01])
@pytest.mark.parametrize("kind", ["SGD", "AdamW"])
def test_the_decay_that_acts_is_that_of_the_prior(tmp_path: Path, kind: str, clip: float) -> None:
    """One step by hand, from the gradient of the MAP loss, which is clipped as a whole."""
    model, by_hand = bert(), bert()
    for network in (model, by_hand):
        network.classifier.bias.data += 1
    optimizer = (
        None if kind == "AdamW" else torch.optim.SGD(model.parameters(), 0.02, weight_decay=0.3)
    )
    settings = {"max_steps": 1, "per_device_train_batch_size": N, "lr_scheduler_type": "constant"}
    trainer = trainer_of(
        model,
        sentences(),
        tmp_path,
        callback(),
        optimizer=optimizer,
        max_grad_norm=clip,
        weight_decay=0.3,
        **settings,
    )
    trainer.train()
    assert all(group["weight_decay"] == 0 for group in trainer.optimizer.param_groups)
    x, y = together(sentences())
    assert trainer.args.max_grad_norm == clip  # as it was
    decay = 0.01  # δ/N of the burn-in
    loss = by_hand(**x, labels=y).loss
    (loss + decay / 2 * sum(p.square().sum() for p in by_hand.parameters())).backward()
    if clip:
        nn.utils.clip_grad_norm_(by_hand.parameters(), clip)
    getattr(torch.optim, kind)(by_hand.parameters(), lr=0.02, weight_decay=0.0).step()
    torch.testing.assert_close(weights_of(model), weights_of(by_hand), rtol=1e-4, atol=1e-5)


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("make", "accumulate"), [(bert, 1), (gpt, 1), (gpt, 2)])
def test_it_learns_what_a_plain_loop_learns(
    tmp_path: Path, make: Callable[[], Any], accumulate: int
) -> None:
    """All data in each step. Of a language model each word with a next one is a datum."""
    data = sentences() if make is bert else text()
    model, learned = make(), callback(seed=3)
    size = N // accumulate
    settings: dict[str, Any] = {"gradient_accumulation_steps": accumulate, "num_train_epochs": 4}
    settings |= {"per_device_train_batch_size": size, "lr_scheduler_type": "constant"}
    sgd = torch.optim.SGD(model.parameters(), 0.1)
    trainer_of(model, data, tmp_path, learned, optimizer=sgd, max_grad_norm=0.0, **settings).train()
    other = make()
    x, labels = together(data)
    y = labels
    if make is gpt:
        y = torch.cat([labels[:, 1:], torch.full((N, 1), -100)], 1)
    evidence = Evidence(
        other,
        Categorical(),
        GaussianPrior(),
        estimator="ntk-10-1",
        num_data=int((y != -100).sum()),
        generator=stream(3, "evidence"),
    )
    learner = Learner(evidence, (x, y), Schedule(epochs=4, burn_in=1, every=1, steps=2))
    optimizer = torch.optim.SGD(other.parameters(), 0.1)
    for _ in range(4):
        optimizer.zero_grad()
        other(**x, labels=labels).loss.backward()
        evidence.add_weight_decay(optimizer)
        optimizer.step()
        learner.step()
    torch.testing.assert_close(weights_of(model), weights_of(other), rtol=1e-3, atol=1e-4)
    log_precision = evidence.prior.log_precision
    assert log_precision is not None
    torch.testing.assert_close(
        log_precision_of(learned), log_precision.detach(), rtol=1e-3, atol=1e-3
    )
    assert [row["step"] for row in learned.history] == [1, 2, 3, 4]


def adapted() -> Any:
    peft: Any = pytest.importorskip("peft")
    return peft.get_peft_model(bert(), peft.LoraConfig(r=2, target_modules=["query", "value"]))


@pytest.mark.one_in(2)
@pytest.mark.parametrize("make", [adapted, bert])
def test_a_run_from_a_checkpoint_gives_the_same_numbers(
    tmp_path: Path, make: Callable[[], Any]
) -> None:
    """From the middle of an epoch; adapters are the only weights of a network that has them."""

    def trained(where: str, learned: Any, resume: Any = None) -> Any:
        settings = {"save_strategy": "steps", "save_steps": 4}
        model = make()
        trainer_of(model, sentences(), tmp_path / where, learned, **settings).train(
            resume_from_checkpoint=resume
        )
        return model

    schedule = Schedule(burn_in=1, steps=2)
    one, two = (callback(estimator="ntk-10-rows-anchored", schedule=schedule) for _ in range(2))
    whole = trained("run", one)
    for step in (8, 9):
        assert (tmp_path / "run" / f"checkpoint-{step}" / "evigrad.pt").exists()
    continued = trained("run", two, str(tmp_path / "run" / "checkpoint-4"))
    assert torch.equal(weights_of(continued), weights_of(whole))
    assert torch.equal(log_precision_of(one), log_precision_of(two))
    assert one.history == two.history
    if make is adapted:
        assert all("lora" in name for name in one.evidence.weights())
        start = dict(make().named_parameters())
        frozen = {n: p for n, p in whole.named_parameters() if "lora" not in n}
        assert frozen and all(torch.equal(p, start[n]) for n, p in frozen.items())
    (tmp_path / "run" / "checkpoint-4" / "evigrad.pt").unlink()
    with pytest.raises(ConfigurationError, match="no evigrad.pt in .*checkpoint-4"):
        trained("run", callback(), str(tmp_path / "run" / "checkpoint-4"))


def test_what_is_logged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name, kind = "precision/median", transformers.TrainerCallback

    class Reports(kind):
        """Stands for what the trainer reports to."""

        def __init__(self) -> None:
            self.seen: list[dict[str, float]] = []

        def on_log(self, args: Any, state: Any, control: Any, **keywords: Any) -> None:
            self.seen.append(keywords["logs"])

    for sent in (False, True):
        reports, learned = Reports(), callback()
        settings = {"logging_strategy": "epoch", "num_train_epochs": 2}
        trainer = trainer_of(bert(), sentences(), tmp_path, reports, learned, **settings)
        if sent:
            learned.log = trainer.log
        trainer.train()
        rounds = [entry for entry in trainer.state.log_history if name in entry]
        assert [entry["step"] for entry in rounds] == [3, 6]
        precisions = [v for n, v in learned.history[-1].items() if n.startswith("precision/")]
        assert len(precisions) > 3
        assert rounds[-1][name] == pytest.approx(statistics.median(precisions))
        assert rounds[-1]["precision/highest"] == max(precisions)
        assert len(str(rounds[-1])) < 300
        assert rounds[-1]["log_evidence"] < 0
        assert sum(name in logs for logs in reports.seen) == (2 if sent else 0)
        assert sum("grad_norm" in logs for logs in reports.seen) == 2
    assert name in capsys.readouterr().out


def test_a_loss_of_something_else_is_noticed(tmp_path: Path) -> None:
    """Labels of a language model that are not shifted."""
    unshifted = callback(
        split=lambda b: ({n: v for n, v in b.items() if n != "labels"}, b["labels"])
    )
    with pytest.warns(EvigradWarning, match="own loss on two examples"):
        trainer_of(gpt(), text(), tmp_path, unshifted, max_steps=1).train()


def test_accumulated_losses_that_nobody_divides(tmp_path: Path) -> None:
    """Those of this model: the trainer passes it the number of data, which it does not use."""
    settings = {"gradient_accumulation_steps": 2, "max_steps": 1}
    with pytest.warns(EvigradWarning, match="loss_is_scaled_for_ga = False"):
        trainer_of(bert(), sentences(), tmp_path, callback(), **settings).train()


class Endless(IterableDataset[dict[str, Tensor]]):
    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        yield from sentences()


def test_what_is_refused(tmp_path: Path) -> None:
    cases: list[tuple[Any, dict[str, Any], str]] = [
        (sentences(), {"label_smoothing_factor": 0.1}, "Label smoothing is not supported"),
        (Endless(), {"max_steps": 3}, "by index"),
    ]
    for data, settings, words in cases:
        with pytest.raises(ConfigurationError, match=words):
            trainer_of(bert(), data, tmp_path, callback(), **settings).train()
    arguments = SimpleNamespace(deepspeed=None, fsdp="full_shard")
    with pytest.raises(ConfigurationError, match="must have all weights, got DeepSpeed or FSDP"):
        callback().on_train_begin(arguments, None, None)


def _of_a_process(rank: int, folder: Path, port: int) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    import_module("accelerate.state").AcceleratorState._reset_state(True)
    model, learned = bert(), callback()
    trainer_of(
        model,
        sentences(),
        folder,
        learned,
        ddp_backend="gloo",
        per_device_train_batch_size=N // STEPS // 2,
    ).train()
    assert distributed.get_world_size() == 2
    torch.save([weights_of(model), log_precision_of(learned)], folder / f"{rank}.pt")
    distributed.destroy_process_group()


def test_two_processes_end_with_the_same_numbers(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    start_processes(_of_a_process, (tmp_path, port), nprocs=2, start_method="fork")
    one, two = (torch.load(tmp_path / f"{rank}.pt") for rank in (0, 1))
    assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))
    assert (one[1] != one[1][0]).any()  # which were learned
