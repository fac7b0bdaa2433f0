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
        model: Network with the weights and hyperparameters of the checkpoint, in evaluation mode.
        evidence: Evidence of the model, with the checkpoint's prior, noise and generator. If the
            run had no estimator, the evidence has a placeholder estimator.
        settings: Settings of ``fit`` by name, from the checkpoint.
        history: One row per epoch up to the checkpoint.
        epoch: Epoch of the checkpoint. At least ``settings["epochs"]`` if the run is finished.

    See also: docs/fine_tuning.md.
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
    """Load the network, evidence and settings of a run from its folder.

    The run may be finished or interrupted. Its data are not loaded. If the run was started on the
    command line, ``load`` builds its network. If ``fit`` started the run, ``model`` is required,
    because ``fit`` does not record how a network was built. Loading does not run any code from the
    folder.

    Args:
        run: Folder of the run.
        model: Network with the architecture of the run. Its weights are replaced. Default: the
            network that the command line trained.
        likelihood: Likelihood of the same class as in the run. It is required if ``fit`` got an
            object instead of a name. Its state is replaced.
        prior: Prior with the same structure as in the run. It is required if ``fit`` got an object
            instead of a name. Its state is replaced.
        device: Device for the network, such as cpu or cuda. Default: the device of the model.

    Returns:
        The run at its last checkpoint.

    Raises:
        ConfigurationError: If the folder has no run with a checkpoint, or a part of the run is
            missing or does not match. The weights of ``model`` do not change in this case.

    Examples:
        >>> import torch
        >>> import evigrad
        >>> x, y = torch.randn(40, 2), torch.arange(40) % 2
        >>> schedule = evigrad.Schedule(epochs=1)
        >>> model = torch.nn.Linear(2, 2)
        >>> options = {"schedule": schedule, "run_dir": "runs/example", "progress": False}
        >>> result = evigrad.fit(model, (x, y), **options)
        >>> run = evigrad.load(result.run_dir, model=torch.nn.Linear(2, 2))
        >>> run.epoch, torch.equal(run.model.weight, model.weight)
        (1, True)

    See also: docs/fine_tuning.md.
    """
    path = Path(run)
    if not path.is_dir():
        raise ConfigurationError(
            f"run must be the folder of a run, got {path}, which does not exist. Check the path."
        )
    state = RunDirectory(path, resume=True).read_checkpoint()
    if state is None:
        raise ConfigurationError(
            f"run must be a folder with a checkpoint, got {path}, which has no checkpoint."
            " Use the folder of a run."
        )
    with fitting(f"The checkpoint in {path}"):
        check_format(state, path)
        try:
            configuration = json.loads((path / "config.json").read_text(encoding="utf-8"))
            num_data, network = int(configuration["num_data"]), configuration["network"]
        except (OSError, ValueError, TypeError, LookupError) as error:
            raise ConfigurationError(
                f"Cannot read {path / 'config.json'}: {error}. Another version of evigrad may have"
                " written it."
            ) from error
        if model is None and network is None:
            raise ConfigurationError(
                f"The run in {path} was started from Python, so the architecture of its network is"
                " not stored. Pass a model with the same architecture:"
                " evigrad.load(run, model=...)."
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
    """Return settings from their record, with objects that replace their descriptions."""
    names = list(Settings().as_record())
    # Runs of earlier versions may lack the newest settings.
    younger = {"prior_mean": "zero", "noise_on_loss": False}
    younger |= dict.fromkeys(("start_decay", "max_epochs"))
    record = younger | current_record(record)
    if record.get("estimator") == "augerino":  # a run of experiments, whose model loads as usual
        record["estimator"] = None
    if missing := [name for name in names if name not in record]:
        raise ConfigurationError(
            f"Another version of evigrad wrote the run in {where}: its settings lack"
            f" {', '.join(missing)}. Load the run with that version."
        )
    keywords: dict[str, Any] = {name: record[name] for name in names}
    overrides = (("likelihood", likelihood, LIKELIHOODS), ("prior", prior, STRUCTURES))
    for name, override, choices in overrides:
        if override is not None:
            keywords[name] = override
        elif keywords[name] not in choices:
            words = " ".join(str(keywords[name]).split())
            raise ConfigurationError(
                f"The run in {where} used a custom {name}, {words}. Pass an object of the same"
                f" class: evigrad.load(run, {name}=...)."
            )
    if prior is not None:
        keywords |= {"precision": None, "prior_mean": "zero"}
    if keywords["optimizer"] not in OPTIMIZERS:
        keywords["optimizer"] = OPTIMIZERS[0]  # not used
    if keywords["anchoring"] is not None:
        keywords["anchoring"] = Anchoring(**keywords["anchoring"])
    return Settings(**grouped(keywords))
