"""A Lightning callback that learns weight decay, noise and other hyperparameters.

The callback needs Lightning: ``pip install 'evigrad[lightning]'``. No other module of evigrad
imports Lightning.
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
from evigrad.core.names import AUTO
from evigrad.errors import ConfigurationError, nearest, require
from evigrad.hosted import HostedCallback, as_pair, loader_of_pairs
from evigrad.likelihoods import Likelihood
from evigrad.passes.settings import Memory
from evigrad.priors import GaussianPrior
from evigrad.training.history import known, round_columns
from evigrad.training.settings import Laplace, Optimization, Schedule

__all__ = ["EvidenceCallback"]

# Any, so that type checkers need not read all of Lightning.
pl: Any = require(
    "pytorch_lightning" if find_spec("lightning") is None else "lightning.pytorch",
    "evigrad.lightning",
    extra="lightning",
)
# Strategies under which every process has all weights.
STRATEGIES = ("SingleDeviceStrategy", "DDPStrategy")


class EvidenceCallback(HostedCallback, pl.Callback):
    """Learn weight decay, noise and other hyperparameters in a Lightning ``Trainer``.

    The learned prior replaces the optimizer's ``weight_decay``, which is set to 0. Before each
    step, and before gradients are clipped, the callback adds the weight decay (T/N) δ (w − w₀) to
    the gradients of the weights w. Here δ are the learned precisions, w₀ is the prior mean, T is
    the temperature, and N is the number of examples. Rounds of hyperparameter steps take place
    between optimizer steps. By default, there are about twenty rounds, which begin after a tenth of
    training. Your ``training_step`` does not change. It must minimize the mean negative log
    likelihood or, with ``loss="mse"``, the mean squared error.

    Each round sends the log evidence per example, the precisions and the noise to the trainer's
    loggers. At the end of an epoch, these values also go to ``trainer.callback_metrics``.
    Lightning's checkpoints contain the callback's state, so ``ckpt_path=...`` resumes with the same
    results. Under DDP, all processes run the same rounds.

    Args:
        network: Name of the module's submodule that maps inputs to outputs, such as ``"net"``, or a
            function from the module to the network, such as ``lambda module:
            evigrad.Outputs(module.net, channel_dim=1)``. Default: the ``LightningModule`` itself,
            by its ``forward``.
        data: All training data. See ``evigrad.fit``. Default: the data set of the training loader.
            Set ``data`` if the loader has different data, or to omit its random transforms.
        split: Function from a batch of the training loader to inputs and targets (x, y). Default: a
            pair is used as it is. In a dictionary, ``labels`` or ``label`` are the targets.
        loss: Loss that ``training_step`` minimizes: ``nll`` (default) or ``mse``.
        likelihood: Likelihood of the targets. See ``evigrad.fit``.
        estimator: Name of the evidence estimator.
        prior: Which weights share a prior precision.
        hyperparameters: Names of network parameters to learn from the evidence. The training loss
            does not change them, even if the optimizer holds them.
        laplace: Temperature, root and details of the curvature.
        schedule: Burn-in and rounds, in epochs. Other settings raise an error.
        optimization: Updates of the hyperparameters, and their learning rates.
        memory: Batch sizes and data types of the estimates' passes.
        anchoring: How an anchored estimator chooses its anchors.
        seed: Seed of the blocks.

    Attributes:
        evidence: Evidence of the network. It exists when training has started.
        history: One row per round: optimizer steps, log evidence per example, and precisions.

    Raises:
        ConfigurationError: If a setting is unknown or invalid.

    Examples:
        >>> from evigrad import Schedule
        >>> from evigrad.lightning import EvidenceCallback
        >>> callback = EvidenceCallback("net", likelihood="gaussian", schedule=Schedule(burn_in=2))
        >>> callback.history  # of Trainer(callbacks=[callback]).fit(...)
        []

    See also: docs/trainers.md.
    """

    def __init__(
        self,
        network: str | Callable[[Any], nn.Module] | None = None,
        data: Any = None,
        split: Callable[[Any], tuple[Any, Tensor]] = as_pair,
        *,
        loss: Literal["nll", "mse"] = "nll",
        likelihood: str | Likelihood = "categorical",
        estimator: str = AUTO,
        prior: str | GaussianPrior = "layerwise",
        hyperparameters: Sequence[str] = (),
        laplace: Laplace | None = None,
        schedule: Schedule | None = None,
        optimization: Optimization | None = None,
        memory: Memory | None = None,
        anchoring: Anchoring | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__(locals())
        self._network = network
        self._stepped = False

    # ------------------------------------------------------------ hooks of the trainer

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Create the evidence of the network and the training data."""
        strategy = type(trainer.strategy).__name__
        if strategy not in STRATEGIES:
            raise ConfigurationError(
                f"The strategy must keep all weights in every process, got {strategy}. Use one"
                " device or strategy='ddp'."
            )
        if len(trainer.optimizers) != 1:
            raise ConfigurationError(
                f"The module must have one optimizer that holds all weights, got"
                f" {len(trainer.optimizers)} optimizers. Use only one optimizer."
            )
        steps = trainer.estimated_stepping_batches
        if steps == float("inf"):
            raise ConfigurationError(
                "The Trainer has no limit on epochs or steps, but evigrad needs one to spread its"
                " rounds over the training run. Set max_epochs or max_steps."
            )
        (optimizer,) = trainer.optimizers
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        if scaler is not None and getattr(optimizer, "_step_supports_amp_scaling", False):
            raise ConfigurationError(
                "The optimizer must not be fused in half precision. A fused optimizer unscales"
                " gradients inside its step, but the weight decay must be added to unscaled"
                " gradients before the step. Set fused=False."
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
        learner = self._hosted.learner
        columns = round_columns(learner.evidence, None, learner.hyper_steps)
        for stopping in trainer.early_stopping_callbacks:
            if stopping.strict and stopping.monitor in columns:
                raise ConfigurationError(
                    f"EarlyStopping(monitor={stopping.monitor!r}) would raise an error after the"
                    " first epoch. The burn-in is longer than this epoch, so no round has set the"
                    " value yet. Set EarlyStopping(..., strict=False)."
                )

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Optimizer) -> None:
        """Add the weight decay to the gradients."""
        self._hosted.before_step()
        self._stepped = True

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Run a round of hyperparameter steps if one is due after this optimizer step."""
        if not self._stepped:  # gradients are being accumulated
            return
        self._stepped = False
        row = self._hosted.after_step()
        if row is not None:
            for logger in trainer.loggers:
                logger.log_metrics(known(row), step=trainer.global_step)

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Log the numbers of the latest round for callbacks that monitor metrics."""
        if self.history:
            pl_module.log_dict(known(self.history[-1]), logger=False, sync_dist=True)

    def state_dict(self) -> dict[str, Any]:
        """Return the state for Lightning's checkpoint."""
        return self._hosted.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keep a checkpoint's state to load when training starts."""
        self._hosted.load_state_dict(state_dict)

    # ------------------------------------------------------------ the module and its data

    def _network_of(self, module: Any) -> nn.Module:
        """Return the network: a submodule, or the module without its trainer."""
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
                "The module has no forward(x) that returns outputs. Set network=... to the name of"
                f" a submodule that has such a forward, one of {names}."
            )
        # It shares parameters and submodules. It has no trainer, because passes restore all that
        # a network holds.
        alone = copy.copy(module)
        alone._trainer = alone._fabric = None
        return alone

    def _data_of(self, trainer: Any) -> Any:
        loader = trainer.train_dataloader
        if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
            raise ConfigurationError(
                "The training loader must be a DataLoader of a map-style data set, because an"
                " estimator reads the data by index. Use such a loader, or pass data=..."
            )
        in_memory = isinstance(loader.dataset, TensorDataset) and len(loader.dataset.tensors) == 2
        if in_memory and loader.collate_fn is default_collate and self._split is as_pair:
            check_sampler(loader)
            return loader.dataset
        return loader_of_pairs(loader, self._split)
