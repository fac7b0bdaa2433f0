"""The log evidence of a network, and its gradient with respect to the hyperparameters."""

import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from numbers import Real
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from evigrad.blocks.anchors import AnchoredStream, Anchoring, AnchorSelection
from evigrad.blocks.positions import PositionSource
from evigrad.blocks.streams import BlockStream
from evigrad.core.algorithm import log_evidence
from evigrad.core.block import Block
from evigrad.core.curvature import Curvature
from evigrad.core.model import Estimate, LinearizedModel
from evigrad.core.names import DEFAULT_ESTIMATOR, Estimator
from evigrad.distributed import Group, Ranks, check_whole
from evigrad.errors import ConfigurationError, EvigradWarning, InputError
from evigrad.inputs import numbered, with_bare_names
from evigrad.likelihoods import Likelihood
from evigrad.likelihoods.calls import log_probabilities
from evigrad.likelihoods.positions import flattened
from evigrad.network import NO_DERIVATIVE, model_outputs
from evigrad.network.modes import TURN, warn_of_normalisation
from evigrad.network.network import PROBE_SIZE, Network
from evigrad.passes.checks import (
    as_generator,
    check_gradients,
    check_inputs,
    check_state,
    check_type,
)
from evigrad.passes.decay import DecayWatch, warn_of_averaged
from evigrad.passes.evaluation import (
    estimate_of,
    estimates_and_gradients,
    kept_gradients,
    pass_over,
)
from evigrad.passes.intake import CheckedSource, Data, resolve
from evigrad.passes.kept import KeptPass, check_kept, checksums, contents, kept, not_keepable
from evigrad.passes.memory import MicroBatches
from evigrad.passes.parameter_blocks import ParameterPartition, partition_names
from evigrad.passes.parameters import (
    check_unchanged,
    divided,
    held_constant,
    named_in_errors,
    select,
    trainable,
)
from evigrad.passes.problem import ParameterReport, Problem, parameter_reports
from evigrad.passes.replicas import mean_over_ranks
from evigrad.passes.settings import Memory, Settings, check_model
from evigrad.passes.sweep import MicroBatchSweep
from evigrad.posterior import (
    DEFAULT_STRUCTURE,
    STRUCTURES,
    Posterior,
    load_posterior,
    make_posterior,
    newton_step,
)
from evigrad.posterior.posterior import defined_name
from evigrad.priors import GaussianPrior, not_a_prior

# Number of examples whose curvature shapes a g-prior.
_SHAPE_DATA = 1000
# Settings that may differ between ranks, because they change no result. All others must be equal.
_OF_A_RANK = ("micro_batch", "memory_budget", "rows_device")


class Evidence:
    """Estimate a model's log evidence and the gradient with respect to the hyperparameters.

    Estimates use a linearized Laplace approximation. The weights are the trainable parameters of
    the model that are not hyperparameters, and the prior is bound to the weights. Every random
    choice uses the evidence's own generator, and the global random state does not change. Estimates
    turn dropout off and use the running statistics of batch normalization, whether the model is in
    training or evaluation mode.

    Examples:
        >>> import torch
        >>> from evigrad import Evidence
        >>> from evigrad.likelihoods import Gaussian
        >>> from evigrad.priors import GaussianPrior
        >>> x, y = torch.randn(20, 3), torch.randn(20, 1)
        >>> model = torch.nn.Linear(3, 1)
        >>> evidence = Evidence(model, Gaussian(), GaussianPrior("scalar"), num_data=20)
        >>> for block in evidence.blocks((x, y)).take(1):
        ...     estimate = evidence.backward(block)  # with gradients of the hyperparameters
        >>> {name: h.grad is not None for name, h in evidence.hyperparameters().items()}
        {'prior.log_precision': True, 'likelihood.log_noise': True}

    See also: docs/trainers.md.
    """

    def __init__(
        self,
        model: nn.Module,
        likelihood: Likelihood,
        prior: GaussianPrior,
        *,
        estimator: str = DEFAULT_ESTIMATOR,
        num_data: int,
        hyperparameters: Sequence[str] = (),
        root: str | None = None,
        sharing: str = "expand",
        parameter_partition: ParameterPartition = "tensor",
        temperature: float = 1.0,
        log_det_weight: float = 1.0,
        memory: Memory | None = None,
        anchoring: Anchoring | None = None,
        curvature: Curvature[Any] | None = None,
        generator: torch.Generator | int | None = None,
        process_group: Group | None = None,
    ) -> None:
        """Bind a prior and a likelihood to a model.

        Args:
            model: Module that maps inputs (m, ...) to outputs (m, C), each example independently.
                If the outputs are (m, …, C), each position has a target and counts as an example.
            likelihood: Log density of the targets given the outputs.
            prior: Gaussian prior, bound here to the weights.
            estimator: Name of the estimator, such as ``ntk-100-1`` or ``kfac-N-C``. Default:
                ``ntk-400-rows-anchored``, the default of ``fit``.
            num_data: N, the number of training examples, or of positions with a target.
            hyperparameters: Names, or prefixes of names, of the model's parameters to learn from
                the evidence instead of the training loss.
            root: How the curvature of an example is split into rows if a block holds only some of
                the outputs: ``subblock``, ``fisher`` or ``eigen``. Default: depends on the
                estimator.
            sharing: Weight sharing in KFAC, ``expand`` or ``reduce``.
            parameter_partition: Blocks for ``blockdiag``: ``tensor``, ``module`` or groups of name
                prefixes.
            temperature: Temperature T. The likelihood is raised to the power 1/T.
            log_det_weight: Weight c of the log-determinant. Larger weights lead to larger learned
                precisions, smaller weights to smaller ones. Default: 1, the log evidence.
            memory: Sizes and data types of passes, such as ``Memory(micro_batch="auto")``. Default:
                all data in one pass, in the data type of the weights.
            anchoring: How an anchored estimator divides the rows. Default: nine tenths of the rows
                are anchors, chosen greedily for every third stream of blocks.
            curvature: Custom curvature. The estimator's name must begin with the curvature's
                ``name``, for example ``trace-100-C``. See evigrad/network/README.md. Default: the
                curvature that the estimator names.
            generator: CPU generator or seed. Default: PyTorch's initial seed.
            process_group: Processes that share the work, each with the same model, data and calls:
                ``torch.distributed.group.WORLD``, or a device mesh of one dimension. Each process
                evaluates different blocks, or its part of the data if the estimator's name has
                ``N``. Estimates and gradients are means over the processes, and the generator comes
                from rank 0. Default: one process.

        Raises:
            ConfigurationError: If a name is unknown, if a value is invalid, or if the ranks of a
                process group have different values.
        """
        check_type("model", model, nn.Module, "an nn.Module")
        check_whole(model)
        check_type("likelihood", likelihood, Likelihood, "a Likelihood, such as Categorical()")
        if not isinstance(prior, GaussianPrior):
            raise ConfigurationError(not_a_prior("prior must be a GaussianPrior", prior))
        check_type("estimator", estimator, str, "a name, such as 'ntk-100-1'")
        if memory is not None:
            check_type("memory", memory, Memory, "a Memory, such as Memory(micro_batch='auto')")
        if curvature is not None:
            check_type("curvature", curvature, Curvature, "a Curvature, such as Traces()")
        spec = Estimator.parse(estimator, curvature)
        root = spec.default_root if root is None else root
        check_model(spec, num_data, root, temperature, anchoring, log_det_weight)
        settings = Settings(sharing, parameter_partition, **(memory or Memory()).resolved())
        settings.check_fits(spec)
        ranks = Ranks(process_group)
        self._model_hyperparameters = select(model, hyperparameters)
        self._weights = trainable(model, excluded=self._model_hyperparameters)
        partition_names(list(self._weights), parameter_partition)
        prior.bind(self._weights)
        first = next(iter(self._weights.values()))
        # A small step would not change a noise in half precision, so use float32 or more.
        likelihood.to(first.device, torch.promote_types(first.dtype, torch.float32))
        linearized = LinearizedModel(
            weights=self._weights,
            likelihood=likelihood,
            prior=prior,
            estimator=spec,
            num_data=int(num_data),
            temperature=float(temperature),
            root=root,
            log_det_weight=float(log_det_weight),
        )
        self.problem = Problem(
            linearized,
            settings,
            as_generator(generator),
            Network(model, self._weights),
            MicroBatches(settings.micro_batch, settings.memory_budget),
            ranks,
        )
        self._begin_together(anchoring)
        if prior.shape == "equal":
            warn_of_normalisation(model)
        warn_of_averaged(model, self._weights)
        self._decay = DecayWatch(self._weights.values())
        self._positions: PositionSource | None = None  # that anchors and kept outputs refer to
        self.anchors = None
        if spec.anchored:
            self.anchors = AnchorSelection(
                anchoring or Anchoring(),
                self.num_data,
                spec.subset or 0,
                root,
                likelihood,
                self.problem.last_layer,
                self.generator,
                self.ranks,
            )

    def _begin_together(self, anchoring: Anchoring | None) -> None:
        """Check that all ranks have the same evidence, and copy the generator of rank 0."""
        if self.ranks.count == 1:
            return
        with self.ranks.together() as alike:
            alike["estimator"], alike["number of data"] = self.estimator.name, self.num_data
            alike["names of parameters"] = [list(self._weights), list(self.hyperparameters())]
            alike["root"], alike["temperature"] = self.root, self.temperature
            alike["log_det_weight"] = self.log_det_weight
            problem_settings = vars(self.problem.settings).items()
            alike.update(
                (name, value) for name, value in problem_settings if name not in _OF_A_RANK
            )
            alike["anchoring"] = anchoring
            device = self.problem.device
            alike["likelihood"] = contents(self.likelihood, device)
            alike["prior"] = [self.prior.group_of, *contents(self.prior, device)]
            # Buffers are not compared, because each rank may have its own running statistics.
            values = [p for p in self.model.parameters() if p.layout == torch.strided]
            alike["parameters"] = checksums(values, device)
        state = self.generator.get_state()
        self.ranks.share([state])
        self.generator.set_state(state)

    # ------------------------------------------------------------ what it was made with

    # Read-only: after an assignment, ``map_loss`` would use the new value but ``estimate`` the old.

    @property
    def model(self) -> nn.Module:
        """The model whose evidence is estimated."""
        return self.problem.network.model

    @property
    def likelihood(self) -> Likelihood:
        """The likelihood of the targets."""
        return self.problem.model.likelihood

    @property
    def prior(self) -> GaussianPrior:
        """The prior, bound to the weights."""
        return self.problem.model.prior

    @property
    def estimator(self) -> Estimator:
        """The estimator, with the parts of its name. ``estimator.name`` is the whole name."""
        return self.problem.model.estimator

    @property
    def num_data(self) -> int:
        """N, the number of training examples, or of positions with a target."""
        return self.problem.model.num_data

    @property
    def temperature(self) -> float:
        """The temperature T. The likelihood is raised to the power 1/T."""
        return self.problem.model.temperature

    @property
    def log_det_weight(self) -> float:
        """The weight c of the log-determinant. It is 1 for the log evidence."""
        return self.problem.model.log_det_weight

    @property
    def root(self) -> str:
        """How an example's curvature is split into rows: ``subblock``, ``fisher`` or ``eigen``."""
        return self.problem.model.root

    @property
    def generator(self) -> torch.Generator:
        """The random generator of all random choices."""
        return self.problem.generator

    @property
    def ranks(self) -> Ranks:
        """The processes that share the computation."""
        return self.problem.ranks

    def __setattr__(self, name: str, value: object) -> None:
        """Set a private attribute. Public attributes are read-only.

        Raises:
            ConfigurationError: If the attribute is public.
        """
        if isinstance(getattr(type(self), name, None), property):
            received = repr(value) if isinstance(value, str | Real) else type(value).__name__
            raise ConfigurationError(
                f"Cannot replace {name} of an evidence with {received}. Create a new Evidence,"
                " or call evidence.with_estimator(...) to use the same model with another"
                " estimator, prior, likelihood or temperature."
            )
        super().__setattr__(name, value)

    # ------------------------------------------------------------ what there is to learn

    def weights(self) -> dict[str, nn.Parameter]:
        """Return the weights by name: the parameters that have a prior and that training fits."""
        return dict(self._weights)

    def hyperparameters(self) -> dict[str, nn.Parameter]:
        """Return the learnable hyperparameters by name.

        Names begin with ``prior.``, ``likelihood.`` or ``model.``.
        """
        model = self.problem.model
        named = {
            **{f"prior.{name}": p for name, p in model.prior.named_parameters()},
            **{f"likelihood.{name}": p for name, p in model.likelihood.named_parameters()},
            **{f"model.{name}": p for name, p in self._model_hyperparameters.items()},
        }
        return {name: p for name, p in named.items() if p.requires_grad}

    # ------------------------------------------------------------ the weights' objective

    def map_loss(
        self,
        x: Any,
        y: Tensor,
        *,
        wrt: str | Sequence[str] = (),
        indices: Tensor | None = None,
        optimizer: Optimizer | None = None,
        scale: float = 1.0,
    ) -> Tensor:
        """Return the training loss: mean NLL + (T/2N) (w−w₀)ᵀP0(w−w₀), in nats per example.

        The loss equals −(T/N) times the log joint density of targets and weights, up to terms that
        do not depend on the weights. The model runs in its current mode (training or evaluation).
        Hyperparameters that are not in ``wrt`` get no gradient.

        Args:
            x: Inputs (m, ...): a tensor, or dictionaries, tuples or lists of tensors. A dictionary
                becomes keyword arguments if ``forward`` takes all of its keys. A tuple or list
                becomes positional arguments if ``forward`` requires the same number of arguments.
            y: Targets in the form that the likelihood takes.
            wrt: Hyperparameters to learn from the training loss, by names or prefixes as for
                ``backward``. Default: none, because hyperparameters are learned from the evidence.
            indices: Indices (m,) of the examples in the data set that you pass to ``blocks``. With
                them, an anchored estimator keeps the outputs and needs no extra pass to choose
                anchors. Outputs at positions are kept only after you have called ``blocks``.
            optimizer: Optimizer of the weights. If given, no decay is larger than 1/lr, as in
                ``add_weight_decay``.
            scale: Factor by which you multiply the loss before you take its gradients. Only the
                limit on the decay depends on this factor.

        Returns:
            The scalar loss. It is 0 if outputs (m, …, C) have no target that counts.

        Raises:
            InputError: If inputs, outputs and targets are invalid or do not match each other, or if
                the outputs have no derivative with respect to any weight.
        """
        x = check_inputs(x, self.problem.device)
        if self.problem.network.latest() is None:  # for ``describe``
            self.problem.network.example = x[:PROBE_SIZE]
        self._decay.note_decay(optimizer)
        with held_constant(divided(self.hyperparameters(), wrt)[1]):
            f = model_outputs(self.model, x, positions=True)
            if torch.is_grad_enabled() and not f.requires_grad:
                raise InputError(NO_DERIVATIVE)
            has_positions = f.dim() > 2
            with numbered(None if has_positions else indices):
                f, y = flattened(self.likelihood, f, y)
            if not len(f):
                return f.sum()  # 0, with a graph
            log_prob = log_probabilities(self.likelihood, f, y, compare=False)
        if has_positions and indices is not None:
            indices = None if self._positions is None else self._positions.of_data(indices)
        if indices is not None and self.anchors is not None:
            self.anchors.note(indices, f, y)
        with torch.no_grad():
            precisions, most = dict(self.prior.precisions()), _largest_decays(optimizer)
            factor = self.temperature / self.num_data
            for name in [name for name, w in self._weights.items() if id(w) in most]:
                limit = most[id(self._weights[name])] / (factor * scale)
                precisions[name] = precisions[name].clamp(max=limit)
        deviations = self.prior.deviations(self._weights)
        decay = sum((precisions[name] * d.square()).sum() for name, d in deviations.items())
        return -log_prob.mean() + 0.5 * factor * decay

    def weight_decay(self) -> dict[str, Tensor]:
        """Return the current weight decay (T/N) δ of each weight tensor, with prior precision δ.

        This decay is the factor of (w − w₀) in the gradient of ``map_loss``. If w₀ is zero, this
        decay is the ``weight_decay`` for optimizers that add it to the gradient (SGD, Adam).

        Returns:
            Tensors by name, which are 0-dimensional or broadcast to the weight.
        """
        self._decay.note_decay()
        with torch.no_grad():
            factor = self.temperature / self.num_data
            return {name: factor * p for name, p in self.prior.precisions().items()}

    def add_weight_decay(
        self,
        optimizer: Optimizer | None = None,
        *,
        scale: float | Tensor = 1.0,
    ) -> None:
        """Add (T/N) δ (w − w₀), the gradient of the prior's part of ``map_loss``, to ``.grad``.

        Here δ is the prior precision of a weight w, and w₀ is its prior mean. Use this method in a
        custom loop whose loss is the mean negative log likelihood. Call it once per optimizer step,
        after ``backward`` and before you clip gradients. If you accumulate gradients, divide each
        loss by the number of accumulated losses. With a ``GradScaler``, unscale the gradients
        first. The optimizer needs ``weight_decay=0``. AdamW's own decay does not correspond to a
        Gaussian prior, because AdamW rescales the gradients but not the decay.

        Args:
            optimizer: Optimizer of the weights. Set its own ``weight_decay``, which is 0.01 by
                default in ``AdamW``, to 0. If you pass the optimizer, evigrad warns about any other
                value and limits each decay to 1/lr. In plain SGD, a decay of 1/lr moves a weight to
                the prior mean in one step, and a larger decay overshoots.
            scale: Ratio of your loss to the mean negative log likelihood, up to an additive
                constant. It is 2σ²/C for the mean squared error of C outputs with noise σ.
        """
        self._decay.note_decay(optimizer)
        decay, means = self.weight_decay(), self.prior.means()
        most = _largest_decays(optimizer)
        with torch.no_grad():
            for name, weight in self._weights.items():
                deviation = weight - means[name] if name in means else weight
                factor = (scale * decay[name]).clamp(max=most.get(id(weight), math.inf))
                if weight.grad is None:
                    weight.grad = torch.zeros_like(weight)
                weight.grad.add_((factor * deviation).to(weight.dtype))

    # ------------------------------------------------------------ the evidence

    def estimate(self, x: Data, y: Tensor | None = None, *, at_mode: bool = False) -> Estimate:
        """Estimate the log evidence of the whole data set.

        If the model draws noise, such as random transforms, each call draws new noise from
        ``generator``, even for the same block.

        Args:
            x: Inputs (m, ...) of a uniformly random subset of the data, or a ``Block`` from
                ``blocks``. If the estimator's name has ``N``, you can also pass an iterable of
                batches that together hold all the data.
            y: Targets, if ``x`` holds inputs.
            at_mode: Whether to also compute the estimate's ``at_mode``, the log evidence of the
                linearized model at its own mode. This value is higher than the log evidence by N
                times the ``mode_gap``. ``at_mode=True`` needs inputs and targets of all data, and
                one of the estimators ``kfac-N-C``, ``diag-N-C``, ``full-N-C`` and ``ntk-N-C``.

        Returns:
            The estimate in nats, without a graph.

        Raises:
            ConfigurationError: If ``at_mode`` is True, but the estimator or the data do not allow
                it.
            InputError: If the data are invalid for the model, the likelihood or the estimator.
            MemoryBudgetError: If the estimate would need more memory than is free.
        """
        with torch.no_grad(), self._failing_by_name():
            with self.ranks.together():
                self._check_weights()
                sweeps = self._sweeps(x, y)
                estimates = [estimate_of(sweep) for sweep in sweeps]
            blocks = [sweep.block for sweep in sweeps]
            self._observe(blocks, estimates)
            estimate = mean_over_ranks(self.problem, blocks, estimates)[0]
        if not at_mode:
            return estimate
        structures = {name: s for s, name in STRUCTURES.items() if s != "last-layer"}
        if self.estimator.name not in structures or y is None:
            raise ConfigurationError(
                f"at_mode=True needs x and y of all data, and one of the estimators"
                f" {', '.join(structures)}. Here the estimator is {self.estimator.name}, and y is"
                f" {'missing' if y is None else 'given'}. Pass x and y, and use"
                " evidence.with_estimator(...). You can also call evidence.mode_gap(data)."
            )
        gap = self.num_data * self.mode_gap((x, y), structure=structures[self.estimator.name])
        return replace(estimate, at_mode=estimate.log_evidence + gap)

    def backward(
        self, x: Data, y: Tensor | None = None, *, wrt: str | Sequence[str] | None = None
    ) -> Estimate:
        """Estimate the log evidence and add the gradient of −(log evidence)/N to ``.grad``.

        The gradient includes the prior's log hyperprior, if there is one. Only the ``.grad`` of
        hyperparameters changes. If an exception is raised, no ``.grad`` changes.

        Args:
            x: As for ``estimate``.
            y: As for ``estimate``.
            wrt: Hyperparameters that get gradients: names, or prefixes of names, from
                ``hyperparameters()``, such as ``["prior", "likelihood"]``. Precisions need one
                pass over the data, and hyperparameters of the model need two. Default: all.

        Returns:
            The estimate in nats, without a graph.

        Raises:
            ConfigurationError: If ``wrt`` matches no hyperparameter.
            EvigradError: If a gradient is not finite.
            InputError: If the data are invalid for the model, the likelihood or the estimator.
            MemoryBudgetError: If the estimate would need more memory than is free.
        """
        learnable, others = self._learnable(wrt)
        self._decay.check()
        with torch.enable_grad(), self._failing_by_name():
            with self.ranks.together():
                self._check_weights()
                sweeps = self._sweeps(x, y)
                with held_constant(others):
                    estimates, gradients = estimates_and_gradients(sweeps, learnable)
            blocks = [sweep.block for sweep in sweeps]
            return self._add_gradients(learnable, blocks, estimates, gradients)

    def _learnable(
        self, wrt: str | Sequence[str] | None
    ) -> tuple[dict[str, nn.Parameter], list[nn.Parameter]]:
        """Return the hyperparameters in ``wrt``, and all others.

        Raises:
            ConfigurationError: If ``wrt`` matches no hyperparameter.
        """
        learnable, others = divided(self.hyperparameters(), wrt)
        if not learnable:
            raise ConfigurationError(
                "There is no hyperparameter to learn: the prior and the likelihood are fixed, and"
                " hyperparameters=[...] names no parameter of the model. Make the prior or the"
                " likelihood learnable, or name a parameter of the model."
            )
        return learnable, others

    def _add_gradients(
        self,
        learnable: Mapping[str, nn.Parameter],
        blocks: Sequence[Block],
        estimates: Sequence[Estimate],
        gradients: Sequence[Tensor],
    ) -> Estimate:
        """Add the mean gradients over all ranks to ``.grad``, and return the mean estimate."""
        estimate, means = mean_over_ranks(self.problem, blocks, estimates, gradients)
        check_gradients(learnable, means)
        for parameter, mean in zip(learnable.values(), means, strict=True):
            parameter.grad = mean if parameter.grad is None else parameter.grad + mean
        self._observe(blocks, estimates)
        return estimate

    def blocks(self, data: Any) -> BlockStream | AnchoredStream:
        """Return a stream of the estimator's blocks, drawn uniformly from a data set.

        Anchored estimators choose their anchors when you iterate over the stream. The choice uses
        the outputs that ``map_loss`` has kept, and missing outputs are computed.

        Args:
            data: All N examples: a pair (x, y), a map-style data set of (x, y) items, or a
                ``DataLoader`` of such a data set.

        Returns:
            An endless stream of blocks. ``.take(n)`` ends the stream after n blocks, and
            ``.epoch()`` ends it after one partition of the data.

        Raises:
            ConfigurationError: If evigrad cannot compute Jacobian rows for the likelihood, for
                example because its Hessian depends on the targets.
            InputError: If ``data`` does not hold N examples, or is invalid for the model or the
                likelihood. Targets in memory are checked in this call, and all other data when they
                are read. With anchors, the targets must also be at the same positions as in the
                first data set.
        """
        with self.ranks.together():
            source = CheckedSource(self.problem, data)
            if self.anchors is not None:
                self._count_positions(source)
                return self.anchors.stream(source)
            splits = self.problem.splits(source.plan)
            partition = self.problem.partition(source.plan)
            return BlockStream(partition, source, self.generator, self.ranks, splits)

    def shape_prior(self, data: Any) -> None:
        """Set the shape of a g-prior from the curvature of up to 1,000 random examples.

        ``fit`` and ``Learner`` call this method before each round. The learned precisions change
        such that the prior's part of ``map_loss`` does not change. If no precision is learned, it
        changes.

        Args:
            data: All N examples, in a form that ``blocks`` takes.

        Raises:
            ConfigurationError: If the prior does not have ``shape="g-prior"``.
            InputError: If the data are invalid for the model or the likelihood.
        """
        settings, size = self.problem.settings, min(self.num_data, _SHAPE_DATA)
        memory = Memory(settings.micro_batch or "auto", settings.memory_budget)
        name = defined_name(self.problem, f"diag-{size}-C")
        other = self.with_estimator(name, generator=self.generator, memory=memory)
        other.problem = replace(other.problem, network=self.problem.network)  # with its plans
        blocks = other.collect(next(iter(other.blocks(data))), wrt=()).statistic.blocks
        curvature = {n: blocks[n].view_as(w) / self.num_data for n, w in self._weights.items()}
        self.prior.set_shape(curvature, self._weights)

    def collect(
        self, x: Data, y: Tensor | None = None, *, wrt: str | Sequence[str] | None = None
    ) -> KeptPass:
        """Run the network on a block once, for many estimates and steps on the prior and the noise.

        Pass the result to ``estimate_kept`` or ``backward_kept``, which do not run the network. If
        you pass several results, they use the mean over the blocks. The result is valid until the
        weights, or hyperparameters that are not in ``wrt``, change. If an anchored block holds
        several draws, the result's ``draws()`` returns one result per draw.

        Args:
            x: As for ``estimate``.
            y: As for ``estimate``.
            wrt: Hyperparameters that will change, in the form that ``backward`` takes. Default:
                all.

        Returns:
            The block's statistic, from which estimates are computed.

        Raises:
            ConfigurationError: If the result would become invalid when a hyperparameter in ``wrt``
                changes: a hyperparameter of the model, or a noise that does more than scale rows.
            InputError: If the data are invalid for the model, the likelihood or the estimator.
        """
        changing, others = divided(self.hyperparameters(), wrt)
        with torch.no_grad(), self._failing_by_name():
            self._check_weights()
            sweep = resolve(self.problem, x, y)
            with held_constant(others):
                if reason := not_keepable(self.problem, sweep.plan, list(changing)):
                    raise ConfigurationError(reason)
                block_pass = pass_over(sweep, changing)
        return kept(self.problem, block_pass, self.hyperparameters(), changing)

    def estimate_kept(self, *passes: KeptPass) -> Estimate:
        """Estimate the log evidence from results of ``collect``, without running the network.

        Args:
            *passes: Results of ``collect``. The estimate is the mean over their blocks.

        Returns:
            The estimate in nats, without a graph.

        Raises:
            InputError: If a pass is outdated, or was collected by another evidence.
        """
        with torch.no_grad(), self._failing_by_name():
            with self.ranks.together():
                self._check_weights()
                check_kept(self.problem, passes, self.hyperparameters(), ())
                estimates = [log_evidence(kept_pass)[0] for kept_pass in passes]
            blocks = [kept_pass.block for kept_pass in passes]
            self._observe(blocks, estimates)
            return mean_over_ranks(self.problem, blocks, estimates)[0]

    def backward_kept(self, *passes: KeptPass, wrt: str | Sequence[str] | None = None) -> Estimate:
        """Add gradients like ``backward``, from results of ``collect``.

        Args:
            *passes: As for ``estimate_kept``.
            wrt: As for ``backward``, among the hyperparameters that ``collect`` got as ``wrt``.

        Returns:
            The estimate in nats, without a graph.

        Raises:
            ConfigurationError: If ``wrt`` matches no hyperparameter, or if a pass has no gradient
                for a hyperparameter in ``wrt``.
            EvigradError: If a gradient is not finite.
            InputError: If a pass is outdated, or was collected by another evidence.
        """
        learnable, others = self._learnable(wrt)
        self._decay.check()
        with torch.enable_grad(), self._failing_by_name():
            with self.ranks.together():
                self._check_weights()
                check_kept(self.problem, passes, self.hyperparameters(), learnable)
                with held_constant(others):
                    estimates, gradients = kept_gradients(passes, learnable)
            blocks = [kept_pass.block for kept_pass in passes]
            return self._add_gradients(learnable, blocks, estimates, gradients)

    def _sweeps(self, x: Data, y: Tensor | None) -> list[MicroBatchSweep]:
        """Return the sweep over the block of the checked data.

        The list is empty on a rank that has nothing to evaluate while other ranks do.
        """
        is_empty = isinstance(x, Block) and not len(x.indices)  # as from a stream
        return [] if is_empty and self.ranks.count > 1 else [resolve(self.problem, x, y)]

    @contextmanager
    def _failing_by_name(self) -> Iterator[None]:
        """After an error, restore the state, and name the model's hyperparameters in the error."""
        with self.problem.restored_on_error(), named_in_errors(self.hyperparameters):
            yield

    def _check_weights(self) -> None:
        """Raise an error if parameters were added, removed or replaced."""
        check_unchanged(self.problem.network.model, self._weights, self._model_hyperparameters)

    def _observe(self, blocks: Sequence[Block], estimates: Sequence[Estimate]) -> None:
        """Improve the predictions for later anchored blocks by the estimates of these."""
        if self.anchors is not None:
            pairs = zip(blocks, estimates, strict=True)
            self.anchors.observe((block, e.entropies) for block, e in pairs)

    # ------------------------------------------------------------ predictions

    def posterior(
        self,
        data: Any = None,
        *,
        structure: str = DEFAULT_STRUCTURE,
        rows: int | None = None,
        inference: str = "laplace",
        state: Mapping[str, Any] | None = None,
    ) -> Posterior:
        """Return the posterior of the weights given all data, for predictions with error bars.

        The posterior is N(w*, (H + P0)⁻¹). Here w* are the current weights, P0 is the prior
        precision, and H is the Gauss-Newton matrix of all data at the evidence's temperature. H
        does not depend on the estimator, with one exception. If the estimator has ``ef`` or ``mc``,
        and a custom likelihood does not define ``hessian``, H is the empirical or sampled Fisher
        matrix. Matrices are float64 unless you set ``Memory(gram_dtype=...)``.

        Args:
            data: All N training examples, in a form that ``blocks`` takes.
            structure: Approximation of H. ``kfac`` (default): Kronecker factors, for networks of
                any size. ``last-layer``: the whole matrix of the last layer, with all other weights
                fixed. ``diag``: the diagonal. ``full``: the whole matrix, for a few thousand
                weights. ``ntk``: the whole matrix, through the kernel of all rows, for small data
                sets.
            rows: Number of rows to keep for ``ntk`` with many examples, chosen as in
                ``ntk-ROWS-rows-anchored``. The variance is then an upper bound on the exact
                variance.
            inference: ``laplace`` (default), or ``variational``: the Gaussian distribution of this
                structure that maximizes a lower bound on the log evidence of the linearized
                network. Its mean differs from w*. It takes several passes, and reports the bound
                before and after each step in ``posterior.bounds``.
            state: Result of a posterior's ``state_dict``, instead of the data.

        Returns:
            The posterior. Call ``posterior(x)`` to predict.

        Raises:
            ConfigurationError: If the structure is unknown, or does not support the prior or the
                model.
            InputError: If the data are invalid for the model or the likelihood.
            MemoryBudgetError: If the structure would not fit into the free memory.
            NotFiniteError: If a prior precision is not positive and finite.
            NotPositiveDefiniteError: If the curvature is NaN or infinite.
        """
        if (data is None) == (state is None):
            raise ConfigurationError(
                "posterior needs either the data or state=..., got"
                f" {'neither' if data is None else 'both'}. Pass exactly one of them."
            )
        with torch.no_grad(), self._failing_by_name():
            if state is not None:
                self._check_weights()
                return load_posterior(self.problem, with_bare_names(self.model, state))
            with self.ranks.together():
                self._check_weights()
                return make_posterior(self.problem, data, structure, rows, inference)

    def mode_gap(
        self,
        data: Any,
        *,
        structure: str = "ntk",
        rows: int | None = None,
        examples: int | None = None,
    ) -> float:
        """Return the log evidence per example that is lost because the weights are not at the mode.

        The log evidence assumes that the weights are at the mode of the log joint density. The gap
        is the gain from one Newton step of the linearized model: ½ gᵀ(H + P0)⁻¹g / N. Here g is the
        gradient of the log joint density, H is the Gauss-Newton matrix, and P0 is the prior
        precision.

        Args:
            data: All N training examples, in a form that ``blocks`` takes.
            structure: Approximation of H that ``posterior`` supports. ``ntk`` (default) with all
                rows and ``full`` are exact.
            rows: Number of rows to keep for ``ntk`` with many examples. The result is then an upper
                bound on the gap.
            examples: Number of random examples that represent all examples in H. Default: all.

        Returns:
            The gap in nats per example. It is 0 at the mode.

        Raises:
            ConfigurationError: If the structure is unknown, or does not support the prior or the
                model, or if ``rows`` or ``examples`` is not positive.
            InputError: If the data are invalid for the model or the likelihood.
            MemoryBudgetError: If the structure would not fit into the free memory.
            NotFiniteError: If the gap or a prior precision is not finite.
            NotPositiveDefiniteError: If the curvature is NaN or infinite.

        Examples:
            >>> import torch
            >>> from evigrad import Evidence
            >>> from evigrad.likelihoods import Gaussian
            >>> from evigrad.priors import GaussianPrior
            >>> x, model = torch.ones(8, 1), torch.nn.Linear(1, 1)
            >>> evidence = Evidence(
            ...     model, Gaussian(), GaussianPrior(), estimator="ntk-N-C", num_data=8
            ... )
            >>> evidence.mode_gap((x, 2 + model(x).detach())) > 0.1
            True
        """
        with torch.no_grad(), self._failing_by_name():
            with self.ranks.together():
                self._check_weights()
            step = newton_step(self.problem, data, structure, rows, examples)
        return step.gap / self.num_data

    # ------------------------------------------------------------ other views of the same model

    def with_estimator(
        self,
        estimator: str,
        *,
        prior: GaussianPrior | None = None,
        likelihood: Likelihood | None = None,
        **changes: Any,
    ) -> "Evidence":
        """Return an evidence of the same model with another estimator, prior or likelihood.

        The two evidences share the model. They also share the prior and the likelihood, unless you
        replace them.

        Args:
            estimator: Name of the estimator.
            prior: Prior on the same weights. Default: the prior of this evidence.
            likelihood: Likelihood of the same outputs. Default: the likelihood of this evidence.
            **changes: Other keyword arguments of ``Evidence``. Default: the ``num_data``,
                hyperparameters, temperature, weight of the log-determinant, micro-batch size and
                memory budget of this evidence, its custom curvature if ``estimator`` names it, and
                the defaults of ``Evidence`` for everything else.

        Returns:
            The new evidence.

        Raises:
            ConfigurationError: If a name is unknown or a value is invalid.
        """
        settings = self.problem.settings
        sizes = Memory(settings.micro_batch, settings.memory_budget)
        keywords: dict[str, Any] = {
            "num_data": self.num_data,
            "hyperparameters": list(self._model_hyperparameters),
            "temperature": self.temperature,
            "log_det_weight": self.log_det_weight,
            "memory": sizes,
        }
        custom = self.estimator.custom
        if custom is not None and estimator.startswith(f"{custom.name}-"):
            keywords["curvature"] = custom
        keywords |= {name: value for name, value in changes.items() if value is not None}
        with TURN, warnings.catch_warnings():
            # The warnings about the model were given when this evidence was made.
            warnings.simplefilter("ignore", EvigradWarning)
            other = Evidence(
                self.model,
                self.likelihood if likelihood is None else likelihood,
                self.prior if prior is None else prior,
                estimator=estimator,
                **keywords,
            )
        other._decay = self._decay  # a loop may train with one evidence and learn with the other
        return other

    def _count_positions(self, source: CheckedSource) -> None:
        """Use the positions of the first data set for the anchors and the outputs of ``map_loss``.

        Raises:
            InputError: If a later data set has its targets at different positions.
        """
        if self._positions is None:
            self._positions = source.positions
        elif source.positions is None or not self._positions.has_the_places_of(source.positions):
            raise InputError(
                "The targets are not at the same positions as in the data set from which the"
                f" anchors of {self.estimator.name} were chosen. Pass that data set again, in the"
                " same order, or call with_estimator(...) to create an evidence for the new data"
                " set."
            )

    # ------------------------------------------------------------ telling and keeping

    def describe(self, x: Any = None) -> list[ParameterReport]:
        """Report how each weight tensor's Jacobian rows and curvature are computed.

        Args:
            x: Inputs of a few examples. Default: the latest inputs of an estimate or ``map_loss``.

        Returns:
            One report for each weight tensor, in the model's order.

        Raises:
            ConfigurationError: If you pass no inputs before the first estimate or ``map_loss``.
        """
        return parameter_reports(self.problem, x)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the prior, the likelihood, the generator and the automatic choices.

        The automatic choices include the micro-batch sizes. The state does not include the model,
        which has its own ``state_dict``.
        """
        anchors = {} if self.anchors is None else {"anchors": self.anchors.state_dict()}
        return {
            "estimator": self.estimator.name,
            "prior": self.prior.state_dict(),
            "likelihood": self.likelihood.state_dict(),
            "generator": self.generator.get_state(),
            "micro_batches": dict(self.problem.sizes.chosen),
            "preparation": self.problem.network.state_dict(),
            **anchors,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state that ``state_dict`` returned.

        Args:
            state: Result of ``state_dict``.

        Raises:
            ConfigurationError: If the state comes from an evidence with another estimator, or does
                not match this evidence. In this case, the evidence does not change.
        """
        # Older states of a wrapped model, as by torch.compile, have names with the wrapper.
        state = with_bare_names(self.model, state)
        modules = {"prior": self.prior, "likelihood": self.likelihood}
        check_state(state, self.state_dict(), modules)
        self.prior.load_state_dict(state["prior"])
        self.likelihood.load_state_dict(state["likelihood"])
        self.generator.set_state(state["generator"])
        chosen = state.get("micro_batches", {})
        self.problem.sizes.chosen = {kind: max(1, int(size)) for kind, size in chosen.items()}
        if "preparation" in state:
            self.problem.network.load_state_dict(state["preparation"])
        if self.anchors is not None and "anchors" in state:
            self.anchors.load_state_dict(state["anchors"])


def _largest_decays(optimizer: Optimizer | None) -> dict[int, float]:
    """Return 1/lr by the identity of each weight that an optimizer updates."""
    groups = [] if optimizer is None else optimizer.param_groups
    return {id(w): 1 / float(g["lr"]) for g in groups for w in g["params"] if g["lr"] > 0}
