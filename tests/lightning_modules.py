"""Modules of Lightning, which a test that needs them imports."""

from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

# Type checkers would read all of it.
pl: Any = import_module("lightning.pytorch")


class Plain(pl.LightningModule):
    """A module as users have it; batches are pairs or dictionaries."""

    def __init__(self, optimizer: str = "SGD", lr: float = 0.1, **settings: Any) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
        self.make = lambda: getattr(torch.optim, optimizer)(self.parameters(), lr=lr, **settings)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = (batch["x"], batch["labels"]) if isinstance(batch, dict) else batch
        return cross_entropy(self(x), y)

    def configure_optimizers(self) -> Any:
        return self.make()


class OfRecords(Plain):
    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


class Manual(Plain):
    automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        optimizer.step()


class Scaled(Plain):
    def __init__(self) -> None:
        super().__init__("AdamW", 0.05, weight_decay=0.5)
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x * self.scale)


class Two(Plain):
    automatic_optimization = False

    def configure_optimizers(self) -> Any:
        return [self.make(), self.make()]


class Some(Plain):
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.net[0].parameters(), lr=0.1)


class Silent(Plain):
    forward = pl.LightningModule.forward

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return cross_entropy(self.net(batch[0]), batch[1])


class Kept(pl.Callback):
    """Each process writes what it ends with."""

    def __init__(self, folder: Path, read: Callable[[], list[Tensor]]) -> None:
        self.folder, self.read = folder, read

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        torch.save(self.read(), self.folder / f"{trainer.global_rank}.pt")
