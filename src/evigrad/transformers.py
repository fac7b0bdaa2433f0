"""Learned weight decay and hyperparameters in the ``Trainer`` of Hugging Face's Transformers.

It needs Transformers, ``pip install 'evigrad[transformers]'``; nothing else in evigrad imports it.
"""

import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib import import_module
from inspect import Parameter, signature
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.data import IterableDataset

from evigrad.blocks.anchors import Anchoring
from evigrad.core.names import DEFAULT_ESTIMATOR
from evigrad.errors import ConfigurationError, EvigradWarning, require
from evigrad.evidence import Evidence
from evigrad.files import replacing
from evigrad.hosted import HostedLearner, as_pair, loader_of_pairs
from evigrad.inputs import as_inputs
from evigrad.likelihoods import Likelihood
from evigrad.likelihoods.calls import log_probabilities
from evigrad.likelihoods.positions import flattened
from evigrad.measure.metrics import probe_outputs
from evigrad.network.modes import evaluation_mode
from evigrad.passes.settings import Memory
from evigrad.priors import GaussianPrior
from evigrad.training.history import Row, headlines
from evigrad.training.settings import Laplace, Optimization, Schedule, Settings

__all__ = ["EvidenceCallback"]

# Without its types, so that type checkers need not read all of Transformers.
_transformers: Any = require("transformers", "evigrad.transformers", extra="transformers")
# Beside the trainer's own files in the folder of a checkpoint.
FILE = "evigrad.pt"
# Labels without a loss.
IGNORED = -100
# Relative difference of two losses that rounding may make, in half precision too.
_SAME_LOSS = 0.03


class EvidenceCallback(_transformers.TrainerCallback):
    """Learns weight decay and hyperparameters by the evidence, while a ``Trainer`` trains.

    The prior takes the place of the optimiser's ``weight_decay``, which is set to 0: before each
    step (T/N) δ (w − w₀) is added to the gradients, with the learned precisions δ. Then all is
    clipped to ``max_grad_norm``, here and not by the trainer, which would clip the loss's part
    alone and so make the decay too strong. Rounds follow optimiser steps: by default about twenty,
    after a tenth of training. Weights are the parameters that require a gradient: of a PEFT model
    the adapters.

    Data and their collation are the trainer's; ``labels`` are the targets, one for each sequence or
    at each position. Of a causal language model, whose loss compares each output with the next
    label, they are shifted; positions with label −100 are no data.

    A line of each round is in ``trainer.state.log_history``: of more than three precisions the
    lowest, the median and the highest. ``history`` has all of them. ``callback.log = trainer.log``
    also sends the line to TensorBoard and others that the trainer reports to. The state is in the
    file ``evigrad.pt`` of each checkpoint, and ``trainer.train(resume_from_checkpoint=True)`` goes
    on with the same numbers. With several processes all take the same rounds.

    Args:
        data: All training data as for ``evigrad.fit``, where they are not those of the trainer.
        split: Makes inputs and targets (x, y) of a collated batch. Default: ``labels`` are the
            targets, shifted for a causal language model, the rest are inputs.
        loss: What the trainer minimises: ``nll``, the mean negative log likelihood, or ``mse``,
            the mean squared error of a regression.
        likelihood: As for ``evigrad.fit``, and so are all that follow.
        estimator: Name of the evidence estimator.
        prior: What has its own precision, and the mean: a pretrained network that is trained as a
            whole keeps to its weights with ``GaussianPrior(mean="initial")``.
        hyperparameters: Parameters of the network that the evidence learns. The training loss does
            not move them, although the optimiser may hold them.
        laplace: Temperature, root and details of the curvature.
        schedule: Burn-in and rounds, in epochs; what it says of anything else is not used.
        optimization: How hyperparameters are updated, and their rates.
        memory: Sizes and types of the estimates' passes.
        anchoring: How an anchored estimator chooses its anchors.
        seed: Seed of the blocks.

    Attributes:
        log: A function of a dictionary of numbers that is called after each round, as
            ``trainer.log``; None writes them to ``state.log_history`` alone.

    Raises:
        ConfigurationError: If a setting does not exist or does not fit.
    """

    def __init__(
        self,
        data: Any = None,
        split: Callable[[Any], tuple[Any, Tensor]] | None = None,
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
        self._data, self._split, self._loss = data, split, loss
        self._hosted = HostedLearner(settings, loss)
        self._max_norm = 0.0
        self.log: Callable[[dict[str, float]], None] | None = None

    @property
    def evidence(self) -> Evidence:
        """The evidence of the network, once training has begun."""
        return self._hosted.evidence

    @property
    def history(self) -> list[Row]:
        """One row for each round: steps of the optimiser, log evidence per datum, precisions."""
        return self._hosted.history

    # ------------------------------------------------------------ events of the trainer

    def on_train_begin(self, args: Any, state: Any, control: Any, **keywords: Any) -> None:
        """Make the evidence of the network and the training data, or go on with that of a file."""
        if args.deepspeed or args.fsdp:
            raise ConfigurationError(
                "DeepSpeed and FSDP are not supported: the evidence needs all weights in every"
                " process."
            )
        if args.label_smoothing_factor:
            raise ConfigurationError(
                "Smoothed labels have no log density, which the evidence compares: set"
                " label_smoothing_factor=0."
            )
        loader, model = keywords["train_dataloader"], keywords["model"]
        if isinstance(loader.dataset, IterableDataset):
            raise ConfigurationError(
                "The blocks of an estimator need the training data by position: give a map-style"
                " train_dataset."
            )
        if state.global_step:
            self._hosted.load_state_dict(_saved(args, state.global_step))
        split = self._split or _split_for(model)
        of_epoch = -(-len(loader) // args.gradient_accumulation_steps)
        self._hosted.begin(
            model,
            loader_of_pairs(loader, split) if self._data is None else self._data,
            keywords["optimizer"],
            steps=state.max_steps,
            epoch=min(of_epoch, state.max_steps),
        )
        if args.max_grad_norm:
            self._max_norm, args.max_grad_norm = args.max_grad_norm, 0.0
        if self._loss == "nll":
            _compare_losses(self.evidence, loader, split, args.gradient_accumulation_steps)

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **keywords: Any) -> None:
        """Add the decay to the gradients, and clip them."""
        self._hosted.before_step()
        if self._max_norm:
            held = [p for group in keywords["optimizer"].param_groups for p in group["params"]]
            nn.utils.clip_grad_norm_(held, self._max_norm)

    def on_step_end(self, args: Any, state: Any, control: Any, **keywords: Any) -> None:
        """Learn, if a round is due after the step of the optimiser."""
        row = self._hosted.after_step()
        if row is None:
            return
        logs = headlines(row)
        if self.log is None:
            state.log_history.append({**logs, "epoch": state.epoch, "step": state.global_step})
            return
        due = control.should_log  # of the training loss, which a call of trainer.log cancels
        self.log(logs)
        control.should_log = due

    def on_train_end(self, args: Any, state: Any, control: Any, **keywords: Any) -> None:
        """Give clipping back to the trainer."""
        args.max_grad_norm, self._max_norm = self._max_norm, 0.0

    def on_save(self, args: Any, state: Any, control: Any, **keywords: Any) -> None:
        """Write the state into the folder of the checkpoint."""
        folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
        if state.is_world_process_zero and folder.is_dir():
            with replacing(folder / FILE) as file:
                torch.save(self._hosted.state_dict(), file)


def _saved(args: Any, step: int) -> dict[str, Any]:
    """The state that a checkpoint has, of which the trainer says only the step."""
    folders = [Path(args.output_dir) / f"checkpoint-{step}"]
    if isinstance(args.resume_from_checkpoint, str):
        folders.insert(0, Path(args.resume_from_checkpoint))
    for folder in folders:
        if (folder / FILE).is_file():
            return torch.load(folder / FILE, map_location="cpu", weights_only=True)
    raise ConfigurationError(
        f"There is no {FILE} in {folders[0]}: the checkpoint was saved without this callback, or"
        " lies elsewhere, which TrainingArguments(resume_from_checkpoint=FOLDER) says."
    )


def _split_for(model: nn.Module) -> Callable[[Any], tuple[Any, Tensor]]:
    """How batches of a model are split: with labels shifted where its loss shifts them."""
    of_adapters: Any = getattr(model, "get_base_model", None)
    core = model if of_adapters is None else of_adapters()
    auto = import_module("transformers.models.auto.modeling_auto")
    causal_names = {*auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()}
    shifts = getattr(core, "loss_type", None) == "ForCausalLM"
    if not shifts and causal_names.isdisjoint(kind.__name__ for kind in type(core).__mro__):
        return as_pair

    def split(batch: Any) -> tuple[Any, Tensor]:
        x, labels = as_pair(batch)
        following = labels.roll(-1, 1)
        following[:, -1] = IGNORED
        return x, following

    return split


def _compare_losses(
    evidence: Evidence,
    loader: Any,
    split: Callable[[Any], tuple[Any, Tensor]],
    accumulation: int,
) -> None:
    """Warn where the loss that the model returns is not the one that the evidence assumes."""
    model = evidence.model
    device = next(iter(evidence.weights().values())).device
    batch = loader.collate_fn([loader.dataset[0], loader.dataset[len(loader.dataset) - 1]])
    if not isinstance(batch, Mapping):
        return
    batch = {n: v.to(device) if isinstance(v, Tensor) else v for n, v in batch.items()}
    x, y = split(batch)
    f, y = flattened(evidence.likelihood, probe_outputs(model, as_inputs(x)), y)
    if not len(f):
        return
    expected = -log_probabilities(evidence.likelihood, f, y).mean().item()

    def differs(loss: Any) -> bool:
        return loss is not None and abs(float(loss) - expected) > _SAME_LOSS * abs(expected)

    parameters = signature(model.forward).parameters.values()
    any_keyword = any(parameter.kind == Parameter.VAR_KEYWORD for parameter in parameters)
    accepts_count = getattr(model, "accepts_loss_kwargs", any_keyword)
    warn = partial(warnings.warn, category=EvigradWarning, stacklevel=2)
    with evaluation_mode(model, torch.Generator().manual_seed(0)), torch.no_grad():
        model_loss: Any = getattr(model(**batch), "loss", None)
        if differs(model_loss):
            warn(
                f"The model's own loss of two data is {float(model_loss):.4g}, and their mean"
                " negative log likelihood, which the evidence takes for it,"
                f" {expected:.4g}: targets or likelihood are others. Say split=...,"
                " likelihood=... or loss='mse'; this is of no matter where the trainer has a loss"
                " of its own that is the mean negative log likelihood.",
            )
        elif accumulation > 1 and accepts_count:
            # The trainer leaves it to such a model to divide by the data of accumulated batches.
            count = torch.tensor(2 * len(y), device="cpu")
            expected /= 2
            if differs(getattr(model(**batch, num_items_in_batch=count), "loss", None)):
                warn(
                    "The trainer adds up the losses of accumulated batches, as this model takes"
                    " num_items_in_batch, and the model does not divide by it: gradients are"
                    f" {accumulation} times those of the mean, and the prior's decay as much too"
                    " weak. Set trainer.loss_is_scaled_for_ga = False, or do not accumulate.",
                )
