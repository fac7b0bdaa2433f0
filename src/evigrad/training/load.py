"""Load a run from its folder: the trained network, its evidence and its settings."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from evigrad.blocks.anchors import Anchoring
from evigrad.errors import ConfigurationError
from evigrad.evidence import Evidence
from evigrad.likelihoods import LIKELIHOODS, Likelihood
from evigrad.models import make_network
from evigrad.priors import STRUCTURES, GaussianPrior
from evigrad.training.checkpoint import check_format, check_network, fitting, load_network
from evigrad.training.fit import make_evidence
from evigrad.training.history import Row, unpacked_history
from evigrad.training.run_directory import RunDirectory
from evigrad.training.settings import OPTIMIZERS, Settings, current_record, grouped


@dataclass(frozen=True)
class LoadedRun:
    """A run at its last checkpoint.

    Attributes:
        model: The network with weights and hyperparameters of the checkpoint, in evaluation mode.
        evidence: The model's evidence, with prior, noise and generator of the checkpoint. For a run
            without an estimator it has a placeholder of one.
        settings: The settings of ``fit`` by name, as in ``config.json``.
        history: One row for each epoch up to the checkpoint.
        epoch: The last of these epochs; ``settings["epochs"]`` for a finished run.
    """

    model: nn.Module
    evidence: Evidence
    settings: Mapping[str, Any]
    history: list[Row]
    epoch: int

    def __repr__(self) -> str:
        name = self.settings["estimator"] or "no estimator"
        return f"LoadedRun({name}, epoch {self.epoch} of {self.settings['epochs']})"


def load(
    run: str | Path,
    model: nn.Module | None = None,
    *,
    likelihood: Likelihood | None = None,
    prior: GaussianPrior | None = None,
    device: str | torch.device | None = None,
) -> LoadedRun:
    """The network, evidence and settings of a run, finished or interrupted, without its data.

    The network of a run of the command line is built anew. A run of ``fit`` does not record how to
    build its network: pass one as ``model``. Nothing in the folder is run as code.

    Args:
        run: The run's folder.
        model: A network of the run's architecture, whose weights are replaced. Default: the one
            that the command line trained.
        likelihood: The run's likelihood, where ``fit`` was given an object. Its state is replaced.
        prior: The same for the prior.
        device: Where to put the network, as cpu or cuda. Default: where the model is.

    Returns:
        The run at its last checkpoint.

    Raises:
        ConfigurationError: If the folder holds no run with a checkpoint, or a part of the run is
            not given or does not fit; the weights of ``model`` then stay as they were.
    """
    path = Path(run)
    if not path.is_dir():
        raise ConfigurationError(f"There is no folder {path}; name the folder of a run.")
    state = RunDirectory(path, resume=True).read_checkpoint()
    if state is None:
        raise ConfigurationError(f"{path} has no checkpoint: no run was begun there.")
    with fitting(f"The checkpoint in {path}"):
        check_format(state, path)
        try:
            configuration = json.loads((path / "config.json").read_text(encoding="utf-8"))
            num_data, network = int(configuration["num_data"]), configuration["network"]
        except (OSError, ValueError, TypeError, LookupError) as error:
            raise ConfigurationError(
                f"{path / 'config.json'} cannot be read, or not by this version: {error}."
            ) from error
        if model is None and network is None:
            raise ConfigurationError(
                f"The run in {path} was started from Python, which alone knows its network: give"
                " one of the same architecture, evigrad.load(run, model=...)."
            )
        module = make_network(network) if model is None else model
        if device is not None:
            module.to(device)
        settings = _settings(state["settings"], likelihood, prior, path)
        evidence = make_evidence(module, num_data, settings)
        check_network(state, evidence, path)
        evidence.load_state_dict(state["evidence"])
        load_network(module, state)
        history = unpacked_history(state["history"])
        return LoadedRun(module.eval(), evidence, state["settings"], history, state["epoch"])


def _settings(
    record: Mapping[str, Any],
    likelihood: Likelihood | None,
    prior: GaussianPrior | None,
    where: Path,
) -> Settings:
    """Settings from their record, with objects in place of their descriptions."""
    names = list(Settings().as_record())
    # Runs of earlier versions may lack the youngest settings.
    record = {"prior_mean": "zero", "noise_on_loss": False, **current_record(record)}
    if record.get("estimator") == "augerino":  # a run of experiments, whose model loads like others
        record["estimator"] = None
    if missing := [name for name in names if name not in record]:
        raise ConfigurationError(
            f"The run in {where} was written by another version of evigrad: its settings lack"
            f" {', '.join(missing)}."
        )
    keywords: dict[str, Any] = {name: record[name] for name in names}
    overrides = (("likelihood", likelihood, LIKELIHOODS), ("prior", prior, STRUCTURES))
    for name, override, choices in overrides:
        if override is not None:
            keywords[name] = override
        elif keywords[name] not in choices:
            words = " ".join(str(keywords[name]).split())
            raise ConfigurationError(
                f"The run in {where} had a {name} of its own, {words}: give one of the same kind,"
                f" evigrad.load(run, {name}=...)."
            )
    if prior is not None:
        keywords |= {"precision": None, "prior_mean": "zero"}
    if keywords["optimizer"] not in OPTIMIZERS:
        keywords["optimizer"] = OPTIMIZERS[0]  # which is not used
    if keywords["anchoring"] is not None:
        keywords["anchoring"] = Anchoring(**keywords["anchoring"])
    return Settings(**grouped(keywords))
