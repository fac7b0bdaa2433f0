"""Learned weight decay, noise and hyperparameters in a Lightning ``Trainer``.

It needs Lightning, ``pip install 'evigrad[lightning]'``; nothing else in evigrad imports it.
"""

import copy
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import Any, Literal

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, IterableDataset, TensorDataset, default_collate

from evigrad.blocks.anchors import Anchoring
from evigrad.blocks.samplers import check_sampler
from evigrad.core.names import DEFAULT_ESTIMATOR
from evigrad.errors import ConfigurationError, nearest, require
from evigrad.evidence import Evidence
from evigrad.hosted import HostedLearner, as_pair, loader_of_pairs
from evigrad.likelihoods import Likelihood
from evigrad.passes.settings import Memory
from evigrad.priors import GaussianPrior
from evigrad.training.history import Row, known, round_columns
from evigrad.training.settings import Laplace, Optimization, Schedule, Settings

__all__ = ["EvidenceCallback"]

# Without its types, so that type checkers need not read all of Lightning.
pl: Any = require(
    "pytorch_lightning" if find_spec("lightning") is None else "lightning.pytorch",
    "evigrad.lightning",
    extra="lightning",
)
# Strategies under which every process has all weights.
STRATEGIES = ("SingleDeviceStrategy", "DDPStrategy")


class EvidenceCallback(pl.Callback):
    """Learns weight decay, noise and hyperparameters by the evidence, while a ``Trainer`` trains.

    The prior takes the place of the optimiser's ``weight_decay``, which is set to 0: before each
    step, and before gradients are clipped, (T/N) δ (w − w₀) is added to the gradients, with the
    learned precisions δ. Rounds follow optimiser steps: by default about twenty, after a tenth of
    training. The ``training_step`` stays as it is, and minimises the mean negative log likelihood
    or (``loss="mse"``) the mean squared error.

    Of each round the log evidence per datum, precisions and noise go to the trainer's loggers, and
    at the end of an epoch also to ``trainer.callback_metrics``, for callbacks that monitor them.
    The state is in Lightning's checkpoints: ``ckpt_path=...`` goes on with the same numbers. Under
    DDP all processes take the same rounds.

    Args:
        network: Name of the module's submodule that maps inputs to outputs, as ``"net"``, or a
            function from the module to the network, as ``lambda module: evigrad.Outputs(module.net,
            channel_dim=1)``. Default: the ``LightningModule`` itself, by its ``forward``.
        data: All training data as for ``evigrad.fit``, where they are not those of the trainer's
            training loader, or are to be read without its random transforms.
        split: Makes inputs and targets (x, y) of a batch of the training loader. Default: a pair as
            it is; of a dictionary ``labels`` or ``label`` are the targets, the rest are inputs.
        loss: What ``training_step`` minimises: ``nll`` or ``mse``.
        likelihood: As for ``evigrad.fit``, and so are all that follow.
        estimator: Name of the evidence estimator.
        prior: What has its own precision.
        hyperparameters: Parameters of the network that the evidence learns. The training loss does
            not move them, although the optimiser may hold them.
        laplace: Temperature, root and details of the curvature.
        schedule: Burn-in and rounds, in epochs; what it says of anything else is not used.
        optimization: How hyperparameters are updated, and their rates.
        memory: Sizes and types of the estimates' passes.
        anchoring: How an anchored estimator chooses its anchors.
        seed: Seed of the blocks.

    Raises:
        ConfigurationError: If a setting does not exist or does not fit.
    """

    def __init__(
        self,
        network: str | Callable[[Any], nn.Module] | None = None,
        data: Any = None,
        split: Callable[[Any], tuple[Any, Tensor]] = as_pair,
        *,
        loss: Literal["nll", "mse"] = "nll",
        likelihood: str | Likelihood = "categorical",
        estimator: str = DEFAULT_ESTIMATOR,
        prior: str | GaussianPrior = "layerwise",
        hyperparameters: Sequence[str] = (),
        laplace: Laplace | None = None,
        schedule: Schedule | None = None,
        optimization: Optimization | None = None,
        memory: Memory | None = None,
        anchoring: Anchoring | None = None,
        seed: int = 0,
    ) -> None:
        settings = Settings(
            likelihood=likelihood,
            estimator=estimator,
            prior=prior,
            hyperparameters=hyperparameters,
            laplace=laplace or Laplace(),
            schedule=schedule or Schedule(),
            optimization=optimization or Optimization(),
            memory=memory or Memory(),
            anchoring=anchoring,
            seed=seed,
        )
        self._network, self._data, self._split = network, data, split
        self._hosted = HostedLearner(settings, loss)
        self._stepped = False

    @property
    def evidence(self) -> Evidence:
        """The evidence of the network, once training has begun."""
        return self._hosted.evidence

    @property
    def history(self) -> list[Row]:
        """One row for each round: steps of the optimiser, log evidence per datum, precisions."""
        return self._hosted.history

    # ------------------------------------------------------------ hooks of the trainer

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Make the evidence of the network and the training data."""
        strategy = type(trainer.strategy).__name__
        if strategy not in STRATEGIES:
            raise ConfigurationError(
                f"{strategy} is not supported: the evidence needs all weights in every process, as"
                " on one device or with strategy='ddp'."
            )
        if len(trainer.optimizers) != 1:
            raise ConfigurationError(
                f"The module has {len(trainer.optimizers)} optimisers: the evidence is that of one"
                " training loss, whose optimiser holds all weights."
            )
        steps = trainer.estimated_stepping_batches
        if steps == float("inf"):
            raise ConfigurationError(
                "Training has no end, over which rounds are spread: give the Trainer max_epochs or"
                " max_steps."
            )
        (optimizer,) = trainer.optimizers
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        if scaler is not None and getattr(optimizer, "_step_supports_amp_scaling", False):
            raise ConfigurationError(
                "A fused optimiser in half precision unscales gradients inside of its step, too"
                " late for the decay to be added: say fused=False."
            )
        batches = trainer.num_training_batches
        self._hosted.begin(
            self._network_of(pl_module),
            self._data_of(trainer) if self._data is None else self._data,
            optimizer,
            steps=int(steps),
            epoch=-(-int(min(batches, steps)) // trainer.accumulate_grad_batches),
        )
        if self._hosted.learns_in_first_epoch:
            return
        columns = round_columns(self._hosted.learner, None)
        for stopping in trainer.early_stopping_callbacks:
            if stopping.strict and stopping.monitor in columns:
                raise ConfigurationError(
                    f"EarlyStopping(monitor={stopping.monitor!r}) would raise an error after the"
                    " first epoch, because the burn-in is longer and no round has set the value."
                    " Set EarlyStopping(..., strict=False)."
                )

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Optimizer) -> None:
        """Add the decay to the gradients."""
        self._hosted.before_step()
        self._stepped = True

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Learn, if a round is due after the step of the optimiser."""
        if not self._stepped:  # gradients are being accumulated
            return
        self._stepped = False
        row = self._hosted.after_step()
        if row is not None:
            for logger in trainer.loggers:
                logger.log_metrics(known(row), step=trainer.global_step)

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Show the latest round to what monitors metrics."""
        if self.history:
            pl_module.log_dict(known(self.history[-1]), logger=False, sync_dist=True)

    def state_dict(self) -> dict[str, Any]:
        """The state for Lightning's checkpoint."""
        return self._hosted.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from the state of a checkpoint when training begins."""
        self._hosted.load_state_dict(state_dict)

    # ------------------------------------------------------------ the module and its data

    def _network_of(self, module: Any) -> nn.Module:
        """The network: a submodule, or the module without its trainer."""
        if self._network is not None and not isinstance(self._network, str):
            return self._network(module)
        if self._network is not None:
            children = dict(module.named_modules())
            if self._network not in children:
                raise ConfigurationError(
                    f"The module has no submodule '{self._network}'."
                    f"{nearest(self._network, children)}"
                )
            return children[self._network]
        if type(module).forward is pl.LightningModule.forward:
            names = ", ".join(name for name, _ in module.named_children())
            raise ConfigurationError(
                "The module has no forward(x) that returns outputs: name the submodule that does,"
                f" network=..., of {names}."
            )
        # Its tables of parameters and submodules are shared. Without the trainer, because passes
        # put back all that a network holds.
        alone = copy.copy(module)
        alone._trainer = alone._fabric = None
        return alone

    def _data_of(self, trainer: Any) -> Any:
        loader = trainer.train_dataloader
        if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
            raise ConfigurationError(
                "The blocks of an estimator need the training data by position: they are read from"
                " a training DataLoader of a map-style data set, or given as data=...."
            )
        in_memory = isinstance(loader.dataset, TensorDataset) and len(loader.dataset.tensors) == 2
        if in_memory and loader.collate_fn is default_collate and self._split is as_pair:
            check_sampler(loader)
            return loader.dataset
        return loader_of_pairs(loader, self._split)
