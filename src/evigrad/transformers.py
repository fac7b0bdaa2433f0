"""A callback for Hugging Face's ``Trainer`` that learns weight decay and other hyperparameters.

The callback needs Transformers: ``pip install 'evigrad[transformers]'``. No other module of evigrad
imports Transformers.
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
from evigrad.core.names import AUTO
from evigrad.errors import ConfigurationError, EvigradWarning, require
from evigrad.evidence import Evidence
from evigrad.files import replacing
from evigrad.hosted import HostedCallback, as_pair, loader_of_pairs
from evigrad.inputs import as_inputs
from evigrad.likelihoods import Likelihood
from evigrad.likelihoods.calls import log_probabilities
from evigrad.likelihoods.positions import flattened
from evigrad.measure.metrics import probe_outputs
from evigrad.network.modes import evaluation_mode
from evigrad.passes.settings import Memory
from evigrad.priors import GaussianPrior
from evigrad.training.history import headlines
from evigrad.training.settings import Laplace, Optimization, Schedule

__all__ = ["EvidenceCallback"]

# Any, so that type checkers need not read all of Transformers.
_transformers: Any = require("transformers", "evigrad.transformers", extra="transformers")
# Name of our file next to the trainer's own files in the folder of a checkpoint.
FILE = "evigrad.pt"
# Labels without a loss.
IGNORED = -100
# Relative difference of two losses that rounding may cause, in half precision too.
_SAME_LOSS = 0.03


class EvidenceCallback(HostedCallback, _transformers.TrainerCallback):
    """Learn weight decay and other hyperparameters in a Transformers ``Trainer``.

    The learned prior replaces the optimizer's ``weight_decay``, which is set to 0. Before each
    step, the callback adds the weight decay (T/N) δ (w − w₀) to the gradients of the weights w.
    Here δ are the learned precisions, w₀ is the prior mean, T is the temperature, and N is the
    number of examples. The callback then clips the gradients to ``max_grad_norm``. (If the trainer
    clipped only the gradients of the loss, the decay would be too strong.) Rounds of hyperparameter
    steps take place between optimizer steps. By default, there are about twenty rounds, which begin
    after a tenth of training. The weights are the parameters that require a gradient, such as the
    adapters in a PEFT model.

    The callback uses the trainer's data and data collator. ``labels`` are the targets, one per
    sequence or per position. For a causal language model, whose loss compares each output with the
    next label, the labels are shifted. Positions with label −100 do not count.

    Each round adds a line to ``trainer.state.log_history``. If there are more than three
    precisions, the line has only the lowest, median and highest, but ``history`` has all. Set
    ``callback.log = trainer.log`` to also send the line to TensorBoard and other integrations. The
    file ``evigrad.pt`` in each checkpoint contains the callback's state, so
    ``trainer.train(resume_from_checkpoint=True)`` resumes with the same results. If there are
    several processes, all of them run the same rounds.

    Args:
        data: All training data, if the trainer has different data. See ``evigrad.fit``.
        split: Function from a collated batch to inputs and targets (x, y). Default: ``labels`` are
            the targets, shifted for a causal language model. The rest are inputs.
        loss: Loss that the trainer minimizes: ``nll`` (default), the mean negative log likelihood,
            or ``mse``, the mean squared error of a regression.
        likelihood: Likelihood of the targets. See ``evigrad.fit``.
        estimator: Name of the evidence estimator.
        prior: Which weights share a prior precision, and the prior's mean. Use
            ``GaussianPrior(mean="initial")`` to keep a pretrained network close to its weights.
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
        log: Function that gets a dictionary of numbers after each round, such as ``trainer.log``.
            Default: None, which only writes to ``state.log_history``.

    Raises:
        ConfigurationError: If a setting is unknown or invalid.

    Examples:
        >>> from evigrad.priors import GaussianPrior
        >>> from evigrad.transformers import EvidenceCallback
        >>> callback = EvidenceCallback(prior=GaussianPrior(mean="initial"))
        >>> callback.history  # of Trainer(..., callbacks=[callback]).train()
        []

    See also: docs/trainers.md.
    """

    def __init__(
        self,
        data: Any = None,
        split: Callable[[Any], tuple[Any, Tensor]] | None = None,
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
        self._max_norm = 0.0
        self.log: Callable[[dict[str, float]], None] | None = None

    # ------------------------------------------------------------ events of the trainer

    def on_train_begin(self, args: Any, state: Any, control: Any, **keywords: Any) -> None:
        """Create the evidence. If training resumes, load the callback's state."""
        if args.deepspeed or args.fsdp:
            raise ConfigurationError(
                "Every process must have all weights, got DeepSpeed or FSDP. Use one device or"
                " plain data parallelism."
            )
        if args.label_smoothing_factor:
            raise ConfigurationError(
                "Label smoothing is not supported, because smoothed labels do not define a"
                " likelihood. Set label_smoothing_factor=0."
            )
        loader, model = keywords["train_dataloader"], keywords["model"]
        if isinstance(loader.dataset, IterableDataset):
            raise ConfigurationError(
                "An estimator reads the training data by index, but train_dataset is an iterable"
                " data set. Use a map-style data set, with __getitem__ and __len__."
            )
        if state.global_step:
            self._hosted.load_state_dict(_saved(args, state.global_step))
        split = self._split or _split_for(model)
        steps_per_epoch = -(-len(loader) // args.gradient_accumulation_steps)
        self._hosted.begin(
            model,
            loader_of_pairs(loader, split) if self._data is None else self._data,
            keywords["optimizer"],
            steps=state.max_steps,
            epoch=min(steps_per_epoch, state.max_steps),
        )
        if args.max_grad_norm:
            self._max_norm, args.max_grad_norm = args.max_grad_norm, 0.0
        if self._hosted.loss == "nll":
            _compare_losses(self.evidence, loader, split, args.gradient_accumulation_steps)

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **keywords: Any) -> None:
        """Add the weight decay to the gradients and then clip them."""
        self._hosted.before_step()
        if self._max_norm:
            held = [p for group in keywords["optimizer"].param_groups for p in group["params"]]
            nn.utils.clip_grad_norm_(held, self._max_norm)

    def on_step_end(self, args: Any, state: Any, control: Any, **keywords: Any) -> None:
        """Run a round of hyperparameter steps if one is due after this optimizer step."""
        row = self._hosted.after_step()
        if row is None:
            return
        logs = headlines(row)
        if self.log is None:
            state.log_history.append({**logs, "epoch": state.epoch, "step": state.global_step})
            return
        due = control.should_log  # the training loss, whose log a call of trainer.log cancels
        self.log(logs)
        control.should_log = due

    def on_train_end(self, args: Any, state: Any, control: Any, **keywords: Any) -> None:
        """Restore the trainer's ``max_grad_norm``."""
        args.max_grad_norm, self._max_norm = self._max_norm, 0.0

    def on_save(self, args: Any, state: Any, control: Any, **keywords: Any) -> None:
        """Write the callback's state into the checkpoint's folder."""
        folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
        if state.is_world_process_zero and folder.is_dir():
            with replacing(folder / FILE) as file:
                torch.save(self._hosted.state_dict(), file)


def _saved(args: Any, step: int) -> dict[str, Any]:
    """Return the state in a checkpoint, found by its step because the trainer gives no path."""
    folders = [Path(args.output_dir) / f"checkpoint-{step}"]
    if isinstance(args.resume_from_checkpoint, str):
        folders.insert(0, Path(args.resume_from_checkpoint))
    for folder in folders:
        if (folder / FILE).is_file():
            return torch.load(folder / FILE, map_location="cpu", weights_only=True)
    raise ConfigurationError(
        f"There is no {FILE} in {folders[0]}. If the checkpoint is in another folder, set"
        " TrainingArguments(resume_from_checkpoint=FOLDER). If it was saved without this callback,"
        " start a new run."
    )


def _split_for(model: nn.Module) -> Callable[[Any], tuple[Any, Tensor]]:
    """Return how to split a model's batches: with shifted labels if its loss shifts them."""
    get_base_model: Any = getattr(model, "get_base_model", None)
    core = model if get_base_model is None else get_base_model()
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
    """Warn if the loss that the model returns is not the loss that the evidence assumes."""
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
                f"The model's own loss on two examples is {float(model_loss):.4g}, but the evidence"
                f" assumes their mean negative log likelihood, {expected:.4g}. The targets or the"
                " likelihood differ. Set split=..., likelihood=... or loss='mse'. (Ignore this if"
                " the trainer computes its own loss as the mean negative log likelihood.)",
            )
        elif accumulation > 1 and accepts_count:
            # For such a model, the trainer does not divide by the number of accumulated batches.
            count = torch.tensor(2 * len(y), device="cpu")
            expected /= 2
            if differs(getattr(model(**batch, num_items_in_batch=count), "loss", None)):
                warn(
                    "The trainer adds the losses of accumulated batches, because this model accepts"
                    " num_items_in_batch, but the model does not divide by it. Gradients are"
                    f" {accumulation} times too large, and the prior's decay is too weak by this"
                    " factor. Set trainer.loss_is_scaled_for_ga = False, or do not accumulate.",
                )
