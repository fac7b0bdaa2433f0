"""The callback in Lightning's own ``Trainer``: what decays, what is learned, and how it goes on."""

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from late import Late, needs
from torch import Tensor, distributed, nn
from torch.nn.functional import cross_entropy, mse_loss
from torch.utils.data import DataLoader, Dataset, Sampler, TensorDataset

from evigrad import Evidence, Learner, Outputs, Schedule
from evigrad.errors import ConfigurationError, InputError
from evigrad.likelihoods import Categorical, Gaussian
from evigrad.priors import GaussianPrior
from evigrad.training.data import stream

pl, modules, ours = Late("lightning.pytorch"), Late("lightning_modules"), Late("evigrad.lightning")

pytestmark = [
    needs("lightning"),
    pytest.mark.filterwarnings("ignore:The '?train_dataloader'? does not have many workers"),
    pytest.mark.filterwarnings("ignore:The number of training batches"),
    pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`"),
    pytest.mark.filterwarnings("ignore:`isinstance.treespec, LeafSpec.` is deprecated"),
]
N, STEPS = 40, 4  # steps of an epoch


def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(N, 4, generator=generator)
    return x, x[:, :3].argmax(1)


class Records(Dataset[dict[str, Tensor]]):
    def __len__(self) -> int:
        return N

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        x, y = data()
        return {"x": x[index], "labels": y[index]}


def callback(**changes: Any) -> Any:
    schedule = Schedule(burn_in=1, every=1, steps=2)
    return ours.EvidenceCallback(**{"estimator": "ntk-20-1", "schedule": schedule, **changes})


def train(
    module: Any,
    *callbacks: Any,
    dataset: Any = None,
    path: Any = None,
    sampler: Any = None,
    batch_size: int = N // STEPS,
    **settings: Any,
) -> Any:
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    dataset = dataset or TensorDataset(*data())
    loader = DataLoader(dataset, batch_size=batch_size, sampler=sampler)
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False}
    quiet |= {"enable_checkpointing": False, "accelerator": "cpu", "max_epochs": 3}
    trainer = pl.Trainer(callbacks=list(callbacks), **(quiet | settings))
    trainer.fit(module, loader, ckpt_path=path)
    return trainer


def weights_of(module: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in module.parameters()])


def log_precision_of(learned: Any) -> Tensor:
    return learned.evidence.prior.log_precision.detach()


@pytest.mark.each(1)
@pytest.mark.parametrize("clip", [None, 0.01])
@pytest.mark.parametrize("kind", ["SGD", "AdamW"])
def test_the_decay_that_acts_is_that_of_the_prior(kind: str, clip: float | None) -> None:
    """One step by hand, from the gradient of the MAP loss, which is clipped as a whole."""
    x, y = (part[: N // STEPS] for part in data())
    module, by_hand = (modules.Plain(kind, weight_decay=0.3) for _ in range(2))
    trainer = train(module, callback(), max_steps=1, gradient_clip_val=clip)
    assert trainer.optimizers[0].param_groups[0]["weight_decay"] == 0
    decay = 0.01  # δ/N of the burn-in, which the first step has
    loss = cross_entropy(by_hand(x), y)
    loss = loss + decay / 2 * sum(p.square().sum() for p in by_hand.parameters())
    loss.backward()
    if clip is not None:
        nn.utils.clip_grad_norm_(by_hand.parameters(), clip)
    optimizer = getattr(torch.optim, kind)(by_hand.parameters(), lr=0.1, weight_decay=0.0)
    optimizer.step()
    torch.testing.assert_close(weights_of(module), weights_of(by_hand))


@pytest.mark.parametrize("accumulate", [1, 2])
def test_it_learns_what_a_plain_loop_learns(accumulate: int) -> None:
    module, learned = modules.Plain("AdamW", 0.02), callback(seed=3)
    train(module, learned, accumulate_grad_batches=accumulate)
    x, y = data()
    other = modules.Plain().net
    evidence = Evidence(
        other,
        Categorical(),
        GaussianPrior(),
        estimator="ntk-20-1",
        num_data=N,
        generator=stream(3, "evidence"),
    )
    steps = STEPS // accumulate
    schedule = Schedule(epochs=3 * steps, burn_in=steps, every=steps, steps=2)
    learner = Learner(evidence, (x, y), schedule)
    optimizer = torch.optim.AdamW(other.parameters(), lr=0.02, weight_decay=0.0)
    for _ in range(3):
        for part in torch.arange(N).split(N // STEPS * accumulate):
            optimizer.zero_grad()
            for micro_batch in part.split(N // STEPS):
                (cross_entropy(other(x[micro_batch]), y[micro_batch]) / accumulate).backward()
            evidence.add_weight_decay()
            optimizer.step()
            learner.step()
    torch.testing.assert_close(weights_of(module), weights_of(other))
    log_precision = evidence.prior.log_precision
    assert log_precision is not None
    torch.testing.assert_close(log_precision_of(learned), log_precision.detach())
    assert [row["step"] for row in learned.history] == [steps, 2 * steps, 3 * steps]
    assert [row["hyper_steps"] for row in learned.history] == [2, 4, 6]


@pytest.mark.one_in(2)
@pytest.mark.parametrize("every", [2, 3])
def test_a_run_from_a_checkpoint_gives_the_same_numbers(tmp_path: Path, every: int) -> None:
    """From the middle of an epoch, and from its end."""

    def learned() -> Any:
        schedule = Schedule(burn_in=1, steps=2)
        return callback(estimator="ntk-20-rows-anchored", schedule=schedule)

    whole, first, continued = (modules.Plain("Adam", 0.02) for _ in range(3))
    uninterrupted = learned()
    train(whole, uninterrupted, max_epochs=3)
    keep = pl.callbacks.ModelCheckpoint(
        tmp_path, filename="kept", every_n_train_steps=every * 2, save_top_k=-1
    )
    # The number of epochs is part of the schedule, so that the interrupted run has it too.
    train(first, learned(), keep, max_epochs=3, enable_checkpointing=True)
    resumed = learned()
    train(continued, resumed, max_epochs=3, path=tmp_path / "kept.ckpt")
    assert torch.equal(weights_of(continued), weights_of(whole))
    assert torch.equal(log_precision_of(resumed), log_precision_of(uninterrupted))
    assert resumed.history == uninterrupted.history
    assert torch.load(tmp_path / "kept.ckpt", weights_only=True)["callbacks"]


def test_steps_that_the_module_takes_itself() -> None:
    both = [modules.Plain("Adam", 0.02), modules.Manual("Adam", 0.02)]
    learned = [callback() for _ in both]
    for module, learner in zip(both, learned, strict=True):
        train(module, learner)
    assert torch.equal(weights_of(both[0]), weights_of(both[1]))
    assert torch.equal(log_precision_of(learned[0]), log_precision_of(learned[1]))


def test_dictionaries_and_names(tmp_path: Path) -> None:
    """Batches as dictionaries, whose inputs are arguments of forward; a network by its name."""
    whole, part, other = modules.Plain(), modules.Plain(), modules.OfRecords()
    train(whole, one := callback())
    train(part, two := callback(network="net"))
    train(other, three := callback(), dataset=Records())
    assert torch.equal(log_precision_of(one), log_precision_of(two))
    assert torch.equal(log_precision_of(one), log_precision_of(three))
    assert "0.weight" in two.evidence.weights()
    assert "net.0.weight" in one.evidence.weights()
    assert isinstance(whole.trainer, pl.Trainer)  # the module was left as it is


def test_a_class_for_each_pixel() -> None:
    """Channels second: the network is made of the module by a function."""

    class Pixels(modules.Plain):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Conv2d(1, 3, 3, padding=1)

    x = torch.randn(N, 1, 4, 4, generator=torch.Generator().manual_seed(0))
    dataset = TensorDataset(x, (x[:, 0] > 0).long())
    learned = callback(network=lambda module: Outputs(module.net, channel_dim=1))
    train(Pixels(), learned, dataset=dataset)
    assert learned.evidence.num_data == N * 16
    assert [row["hyper_steps"] for row in learned.history] == [2, 4, 6]


def test_what_is_logged(tmp_path: Path) -> None:
    logger = pl.loggers.CSVLogger(tmp_path)
    trainer = train(modules.Plain(), learned := callback(), logger=logger)
    logger.save()
    lines = next(tmp_path.rglob("metrics.csv")).read_text().splitlines()
    assert {"log_evidence", "precision/net.0.weight", "step"} <= set(lines[0].split(","))
    assert len(lines) == 1 + len(learned.history)
    shown = trainer.callback_metrics["precision/net.0.weight"].item()
    assert shown == pytest.approx(learned.history[-1]["precision/net.0.weight"])
    assert trainer.callback_metrics["log_evidence"] < 0


def test_early_stopping_by_the_log_evidence() -> None:
    """Before the first round there is no value; the trainer's own error came after an epoch."""

    def stopping(monitor: str = "log_evidence", **settings: Any) -> Any:
        return pl.callbacks.EarlyStopping(monitor, mode="max", **settings)

    late = Schedule(burn_in=2, every=1, steps=2)
    for monitor in ("log_evidence", "precision/net.0.weight"):
        module = modules.Plain()
        before = weights_of(module)
        with pytest.raises(ConfigurationError, match="strict=False"):
            train(module, callback(schedule=late), stopping(monitor))
        assert torch.equal(weights_of(module), before)
    # No estimate is better than the first one by so much.
    stop = stopping(strict=False, min_delta=1e6, patience=2)
    trainer = train(modules.Plain(), learned := callback(schedule=late), stop, max_epochs=9)
    assert trainer.current_epoch == 4
    assert [row["step"] for row in learned.history] == [2 * STEPS, 3 * STEPS, 4 * STEPS]
    assert stop.best_score == pytest.approx(learned.history[0]["log_evidence"])
    # With a round in the first epoch a strict one works.
    assert (
        train(modules.Plain(), callback(), stopping(min_delta=1e6, patience=1)).current_epoch == 2
    )


def test_the_mean_squared_error_and_its_noise() -> None:
    """The gradient of MSE is 2σ²/C times that of the likelihood, and the decay is as many times."""

    class Regression(modules.Plain):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return mse_loss(self(batch[0]), batch[1])

    x, targets = data()[0], data()[0][:, :3] * 2
    module, by_hand = Regression(), Regression()
    settings: dict[str, Any] = {"likelihood": Gaussian(0.5), "loss": "mse", "schedule": None}
    learned = callback(**settings)
    train(module, learned, dataset=TensorDataset(x, targets), max_steps=1)
    evidence = Evidence(
        by_hand.net,
        Gaussian(0.5),
        GaussianPrior(precision=0.01 * N),
        estimator="ntk-20-1",
        num_data=N,
    )
    loss = 2 * 0.25 / 3 * evidence.map_loss(x[:10], targets[:10])
    torch.optim.SGD(by_hand.parameters(), lr=0.1).zero_grad()
    loss.backward()
    torch.optim.SGD(by_hand.parameters(), lr=0.1).step()
    torch.testing.assert_close(weights_of(module), weights_of(by_hand))
    with pytest.raises(ConfigurationError, match="single noise for all outputs"):
        train(Regression(), callback(loss="mse"))


def test_a_hyperparameter_that_the_optimiser_holds_too() -> None:
    """Neither the training loss nor the optimiser's decay moves it, but rounds do."""
    module, seen = modules.Scaled(), []

    class Seen(pl.Callback):
        def on_train_batch_end(self, *_: Any) -> None:
            seen.append(module.scale.detach().clone())

    train(module, Seen(), learned := callback(hyperparameters=["scale"]), Seen())
    values = torch.stack(seen).view(3, STEPS, 2, 4)
    assert (values[0, :, 0] == 1).all() and (values[0, -1, 1] != 1).all()
    assert torch.equal(values[1, 0, 0], values[0, -1, 1])
    assert "model.scale" in learned.evidence.hyperparameters()


def test_a_noise_that_the_optimiser_holds_too() -> None:
    """The module's own parameters include those of the likelihood."""

    class Noisy(modules.Plain):
        def __init__(self) -> None:
            super().__init__()
            self.likelihood = Gaussian(0.5)

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return -self.likelihood.log_prob(self(batch[0]), batch[1]).mean()

    module, x = Noisy(), data()[0]
    learned = callback(network="net", likelihood=module.likelihood)
    train(module, learned, dataset=TensorDataset(x, x[:, :3]))
    noises = [row["noise"] for row in learned.history]
    assert noises[0] != 0.5 and len(noises) > 1


@pytest.mark.parametrize(
    ("kind", "settings", "trainer", "words"),
    [
        ("Two", {}, {}, "must have one optimizer that holds all weights, got 2"),
        (
            "Some",
            {},
            {},
            "must hold all weights of the prior, but it lacks 'net.2.weight', 'net.2.bias'",
        ),
        ("Silent", {}, {}, "such a forward, one of net"),
        ("Plain", {"network": "nett"}, {}, "Did you mean 'net'"),
        ("Plain", {}, {"max_epochs": -1}, "has no limit on epochs"),
        ("Plain", {"schedule": Schedule(burn_in=4)}, {}, "at most epochs = 3, got"),
        ("Plain", {"estimator": None}, {}, "must be the name of an estimator, got None"),
        ("Plain", {"schedule": Schedule(epochs=4)}, {}, "Remove epochs=..."),
        ("Plain", {"loss": "sum"}, {}, "loss must be one of nll, mse"),
    ],
)
def test_what_is_refused(kind: str, settings: Any, trainer: Any, words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        train(getattr(modules, kind)(), callback(**settings), **trainer)


def test_batches_that_are_no_pairs() -> None:
    class Triple(modules.Plain):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return super().training_step(batch[:2], batch_idx)

    dataset = TensorDataset(*data(), torch.zeros(N))
    with pytest.raises(InputError, match="must be .* Set split"):
        train(Triple(), callback(), dataset=dataset)
    train(Triple(), callback(split=lambda batch: tuple(batch[:2])), dataset=dataset)
    with pytest.raises(ConfigurationError, match="before training has started"):
        _ = callback().evidence


class InTurn(Sampler[int]):
    """The data in their order, each process taking every second one if there are two."""

    def __iter__(self) -> Iterator[int]:
        several = distributed.is_initialized()
        yield from range(N)[distributed.get_rank() :: 2] if several else range(N)

    def __len__(self) -> int:
        return N // 2 if distributed.is_initialized() else N


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_two_processes_learn_what_one_does(tmp_path: Path) -> None:
    """Two halves of each batch, on gloo."""
    for devices in (1, 2):
        module, learned = modules.Plain(), callback(estimator="ntk-20-rows-anchored")
        (folder := tmp_path / str(devices)).mkdir()

        def read(learned: Any = learned, module: Any = module) -> list[Tensor]:
            return [weights_of(module), log_precision_of(learned)]

        train(
            module,
            learned,
            modules.Kept(folder, read),
            sampler=InTurn(),
            use_distributed_sampler=False,
            batch_size=N // STEPS // devices,
            devices=devices,
            strategy="ddp_fork" if devices > 1 else "auto",
        )
    alone = torch.load(tmp_path / "1" / "0.pt")
    both = [torch.load(tmp_path / "2" / f"{rank}.pt") for rank in (0, 1)]
    assert all(torch.equal(a, b) for a, b in zip(*both, strict=True))
    for one, other in zip(both[0], alone, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
