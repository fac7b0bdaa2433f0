"""Define the model of an evidence, and how the evidence processes blocks."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from evigrad.blocks.anchors.choice import LastLayer, last_layer, watched
from evigrad.core.curvature import Curvature, make_curvature
from evigrad.core.model import LinearizedModel
from evigrad.core.partition import Partition
from evigrad.core.protocols import Purpose
from evigrad.distributed import Ranks
from evigrad.errors import ConfigurationError
from evigrad.fast.contraction import contracted
from evigrad.fast.storage import Storage
from evigrad.inputs import AtPositions, Inputs, each_once
from evigrad.likelihoods import Likelihood
from evigrad.network import matrix_uses, model_outputs
from evigrad.network.modes import evaluation_run
from evigrad.network.network import KEPT_PLANS, InputPlan, Network, drop_oldest
from evigrad.passes.checks import check_inputs
from evigrad.passes.memory import MicroBatches
from evigrad.passes.parameter_blocks import partition_names
from evigrad.passes.settings import Settings
from evigrad.priors import GaussianPrior


@dataclass(frozen=True, eq=False)
class Problem:
    """A linearized model, and what passes of its network need.

    Attributes:
        model: The linearized model.
        settings: The user's settings.
        generator: Generator for all random choices.
        network: The network, with a plan for each shape of inputs.
        sizes: How many examples go through the network in one pass.
        ranks: The processes that share the work.
        purpose: Purpose of passes, unless a sweep has another purpose.
        partitions: A cache of partitions, by number of outputs.
        curvatures: A cache of curvatures, by plan and data type of the matrices.
        compared: Shapes of outputs and targets, and types of targets, for which the density of an
            example does not depend on the other examples. After the check of a custom curvature,
            also ``"log_det"``.
    """

    model: LinearizedModel[Likelihood, GaussianPrior]
    settings: Settings
    generator: torch.Generator
    network: Network
    sizes: MicroBatches
    ranks: Ranks = field(default_factory=Ranks)
    purpose: Purpose = Purpose.VALUE
    partitions: dict[int, Partition] = field(default_factory=dict, repr=False)
    curvatures: dict[Any, Curvature[Any]] = field(default_factory=dict, repr=False)
    compared: set[Any] = field(default_factory=set, repr=False)

    @property
    def device(self) -> torch.device:
        """The device of the weights."""
        return next(iter(self.model.weights.values())).device

    @property
    def dtype(self) -> torch.dtype:
        """The data type of the first weight."""
        return next(iter(self.model.weights.values())).dtype

    def plan_of(self, x: Any) -> InputPlan:
        """Check these inputs and return their plan."""
        return self.network.plan(check_inputs(x, self.device))

    def partition(self, plan: InputPlan) -> Partition:
        """Return the partition of all rows into blocks."""
        num_outputs = plan.num_outputs
        if num_outputs not in self.partitions:
            num_rows = self.model.likelihood.num_rows(num_outputs)
            self.partitions[num_outputs] = Partition(
                self.model.estimator, self.model.num_data, num_outputs, num_rows
            )
        return self.partitions[num_outputs]

    def splits(self, plan: InputPlan) -> bool:
        """Return whether ranks divide the examples, which requires a statistic that is a sum."""
        if self.ranks.count == 1 or self.model.estimator.subset is not None:
            return False
        return not self.curvature(plan).keeps_rows and self.ranks.count <= self.model.num_data

    def curvature(self, plan: InputPlan, gram_dtype: torch.dtype | None = None) -> Curvature[Any]:
        """Return the estimator's curvature, created once per plan and data type of the matrices."""
        dtype = self.settings.gram_dtype if gram_dtype is None else gram_dtype
        key = (plan, dtype)
        if key not in self.curvatures:
            self.curvatures[key] = self._new_curvature(plan, dtype)
            drop_oldest(self.curvatures, 2 * KEPT_PLANS)
        return self.curvatures[key]

    def _new_curvature(self, plan: InputPlan, dtype: torch.dtype | None) -> Curvature[Any]:
        settings, estimator = self.settings, self.model.estimator
        if estimator.custom is not None:
            return estimator.custom
        rows, prior = self.partition(plan).block_rows, self.model.prior
        data = rows if estimator.rows else min(estimator.subset or rows, rows)
        # Rows that are multiplied with other rows are not products, and H replaces their kernel.
        needs_rows = self.purpose is Purpose.ROWS
        uses = {} if needs_rows else matrix_uses(plan.jacobian, self.model.weights)
        cheap = contracted(uses, data, max(1, rows // data), self.device)
        storage = Storage(settings.rows_dtype, settings.rows_device)
        return make_curvature(
            estimator.structure,
            self.model.weights,
            kronecker=plan.jacobian.kronecker,
            precision_groups=prior.precision_groups(),
            precision_axes=prior.varying_axes(),
            blocks=partition_names(list(self.model.weights), settings.parameter_partition),
            sharing=settings.sharing,
            gram_dtype=dtype,
            contracted={n: sum(use.numbers for use in name_uses) for n, name_uses in cheap.items()},
            store=storage.store,
            itemsize=storage.itemsize(self.dtype, self.device),
            num_rows=None if needs_rows else rows,
        )

    def last_layer(self, x: Inputs) -> tuple[Tensor, LastLayer | None]:
        """Return outputs (m, C) without a graph, and the last layer (None if it is not linear)."""
        model, module = self.model, self.network.model
        with evaluation_run(module), torch.no_grad(), watched(module, model.weights) as call:
            f = model_outputs(module, each_once(x), positions=True)
        shape = f.shape[:-1]
        f = f.flatten(0, -2)
        layer = last_layer(call, f, model.weights, model.prior.precisions(), model.temperature)
        if isinstance(x, AtPositions):
            f = x.of_outputs(f.unflatten(0, shape))
            if layer is not None:
                features = x.of_outputs(layer.features.unflatten(0, shape))
                layer = replace(layer, features=features)
        return f, layer

    @contextmanager
    def restored_on_error(self) -> Iterator[None]:
        """Restore the generator and the sizes of micro-batches if an exception occurs inside."""
        state, chosen = self.generator.get_state(), dict(self.sizes.chosen)
        try:
            yield
        except BaseException:
            self.generator.set_state(state)
            self.sizes.chosen = chosen
            raise


@dataclass(frozen=True)
class ParameterReport:
    """How an estimator treats one weight tensor.

    Attributes:
        name: Name of the tensor in the model.
        shape: Shape of the tensor.
        rows: How the tensor's Jacobian rows are computed, such as ``"linear"`` or ``"generic:
            vmap"``.
        curvature: The form of the tensor's curvature, such as ``"diagonal"``.
        group: Name of the tensor's prior group.
        precision: Prior precision of the tensor, or the mean precision if entries have different
            precisions.

    See also: docs/supported.md.
    """

    name: str
    shape: tuple[int, ...]
    rows: str
    curvature: str
    group: str
    precision: float


def parameter_reports(problem: Problem, x: Any | None) -> list[ParameterReport]:
    """Return a report for each weight tensor, in the model's order.

    ``x`` contains a few inputs, or is None to use the most recent plan or inputs.

    Raises:
        ConfigurationError: If ``x`` is None and there is no plan yet.
    """
    network, plan = problem.network, None
    if x is None:
        plan, x = network.latest(), network.example
    if plan is None and x is not None:
        plan = problem.plan_of(x)
    if plan is None:
        raise ConfigurationError(
            "The evidence has not seen any inputs yet. Call describe(x) with a few inputs, such as"
            " x[:3]."
        )
    rows, curvature = plan.jacobian.describe(), problem.curvature(plan).describe()
    precisions = problem.model.prior.precisions()
    return [
        ParameterReport(
            name=name,
            shape=tuple(w.shape),
            rows=rows[name],
            curvature=curvature.get(name, problem.model.estimator.structure),
            group=problem.model.prior.group_name(name),
            precision=float(precisions[name].detach().double().mean()),
        )
        for name, w in problem.model.weights.items()
    ]
