"""Compare criteria of the training data: why do evidence and test data disagree?

For each data set, 500 examples train the same network from the same initial weights, with seven
weight decays and with precisions learned by ``fit``. For every network, the script computes
exactly, in float64 and by the kernel of all rows,

* ``evidence``: the log evidence of the linearized Laplace approximation.
* ``tempered``: the log evidence at the temperatures T = 1/2 and T = 1/4, as in data-emphasized
  bounds.
* ``averaged``: the variational bound on the linearized model, with the curvature averaged over the
  posterior, E_q[Λ(f)], by two fixed-point steps. It includes the saturation of outputs away from
  the mode.
* ``leave-one-out``: log p(y_n | f₋ₙ) with f₋ₙ = fₙ + Vₙ (I − Λₙ Vₙ)⁻¹ rₙ. Here V is the posterior
  covariance of the outputs, and r the gradient of the negative log likelihood.
* ``conditional``: the evidence of one half of the data given the other, the mean of four splits.

On the test data, it computes the log likelihood of the MAP prediction and of the linearized
posterior, the mean of 256 draws. The first table has the rank correlation of each criterion with
both over the settings. ``chosen`` is the test log likelihood of the MAP prediction at the setting
with the highest criterion. The test data have no other use.

``slopes`` are the derivatives of the evidence in the logarithm of one decay for all weights.
MacKay's update and the gradient of the paper treat the weights as fixed: ``partial``. But the
weights follow the decay, and the curvature follows the weights: ``implicit`` is −½ ∂ℓ/∂w · dw*/dlog
δ, where dw*/dlog δ is −(H + P0)⁻¹ P0 w*.

    python benchmarks/criteria.py --data-dir DIR --results docs/results --pages docs/criteria.md
"""

import math
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

import torch
from learning import Result, Results, make_parser, parse
from measure import show
from prior_learning import DECAYS
from rivals import IMAGES, SCHEDULE, fixed_prior
from scipy.stats import spearmanr
from torch import Tensor, nn
from torch.func import functional_call, jacrev, vmap

import evigrad
from evigrad import Optimization
from evigrad.data import DataSet, load
from evigrad.models import make_model

SETS = ("digits", "mnist")
SUBSET, TEST = 500, 1000
SETTINGS = (*(f"decay {decay:g}" for decay in DECAYS), "fixed point", "adam")
TEMPERATURES = (0.5, 0.25)
HALVES, DRAWS, STEPS, SHIFT = 4, 256, 2, 0.02
CRITERIA = (
    "evidence",
    *(f"tempered {t:g}" for t in TEMPERATURES),
    "averaged",
    "leave-one-out",
    "conditional",
)
JUDGES = ("plug-in", "posterior")
SLOPES = ("partial", "implicit")
LABELS = {"plug-in": "MAP"}  # in the tables
KEYS = (*JUDGES, *CRITERIA, *SLOPES)
COLUMNS = ("row", "seed", *KEYS, "accuracy", "threads")
AT_ONCE = 50

Pair = tuple[Tensor, Tensor]


class Linearised:
    """A trained classifier as a Gaussian process: outputs f (n, C) and rows of its Jacobian.

    Args:
        model: Classifier. It is converted to float64.
        precisions: P0 by name of a weight.
        data: Training data.
    """

    def __init__(self, model: nn.Module, precisions: Mapping[str, float], data: Pair) -> None:
        self.model = model.double().eval()
        self.weights = {name: w.detach().clone() for name, w in model.named_parameters()}
        self.x, self.y = data[0].double(), data[1]
        self.precision = torch.cat(
            [torch.full((w.numel(),), precisions[n]).double() for n, w in self.weights.items()]
        )
        self.f, self.rows = self.passed(self.x, self.weights)
        self.kernel = self.rows @ (self.rows / self.precision).T
        self.square = float((self.flat**2 * self.precision).sum())
        self.root = root_of(curvature(self.f))
        self.factor = factor_of(self.root, self.kernel)

    @property
    def flat(self) -> Tensor:
        """Return all weights as one vector."""
        return torch.cat([w.flatten() for w in self.weights.values()])

    def passed(self, x: Tensor, weights: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Return outputs (n, C) and rows (nC, P) for some weights."""

        def one(values: Mapping[str, Tensor], item: Tensor) -> tuple[Tensor, Tensor]:
            f = functional_call(self.model, dict(values), (item[None],))[0]
            return f, f

        jacobian = vmap(jacrev(one, has_aux=True), (None, 0))
        parts = [jacobian(dict(weights), part) for part in x.split(AT_ONCE)]
        outputs = torch.cat([f for _, f in parts])
        rows = torch.cat(
            [torch.cat([j.flatten(2) for j in part.values()], dim=2) for part, _ in parts]
        )
        return outputs, rows.flatten(0, 1)


def root_of(curvature: Tensor) -> Tensor:
    """Return symmetric square roots (n, C, C) of curvatures of the data."""
    values, vectors = torch.linalg.eigh(curvature)
    return (vectors * values.clamp(min=0).sqrt()[:, None, :]) @ vectors.mT


def factor_of(root: Tensor, kernel: Tensor) -> Tensor:
    """Return the Cholesky factor of I + LᵀKL for block-diagonal roots L."""
    n, c = root.shape[:2]
    inner = torch.einsum("nab,nbmd,mde->name", root, kernel.view(n, c, n, c), root)
    return torch.linalg.cholesky(inner.reshape(n * c, n * c) + torch.eye(n * c, dtype=kernel.dtype))


def log_det(factor: Tensor) -> float:
    """Return the log-determinant of a matrix by its Cholesky factor."""
    return 2 * float(factor.diagonal().log().sum())


def covariance(root: Tensor, factor: Tensor, cross: Tensor, prior_covariance: Tensor) -> Tensor:
    """Return posterior covariances (m, C, C) of outputs, from their kernels."""
    n, c = root.shape[:2]
    weighed = torch.einsum("knc,ncd->knd", cross.view(-1, n, c), root).reshape(len(cross), -1)
    solved = torch.linalg.solve_triangular(factor, weighed.T, upper=False)
    parts = solved.T.reshape(-1, c, n * c)
    return prior_covariance - parts @ parts.mT


def curvature(f: Tensor) -> Tensor:
    """Return Λ = diag(p) − ppᵀ, (n, C, C)."""
    p = f.softmax(1)
    return p.diag_embed() - p[:, :, None] * p[:, None, :]


def draws(f: Tensor, covariance: Tensor) -> Tensor:
    """Return outputs (DRAWS, n, C) of their normal distribution, with common random numbers."""
    values, vectors = torch.linalg.eigh(covariance)
    root = vectors * values.clamp(min=0).sqrt()[:, None, :]
    noise = torch.randn(DRAWS, *f.shape, generator=torch.Generator().manual_seed(0))
    return f + torch.einsum("ncd,snd->snc", root, noise.double())


def blocks(kernel: Tensor, c: int) -> Tensor:
    """Return the diagonal blocks (n, C, C) of a kernel of all rows."""
    n = len(kernel) // c
    return kernel.view(n, c, n, c).diagonal(dim1=0, dim2=2).permute(2, 0, 1)


def criteria(net: Linearised) -> dict[str, float]:
    """Return all criteria of the training data, in nats per example."""
    n, c = net.f.shape
    labels = torch.arange(n), net.y
    fit = float(net.f.log_softmax(1)[labels].sum())
    totals = {"evidence": fit - 0.5 * net.square - 0.5 * log_det(net.factor)}
    for t in TEMPERATURES:
        tempered = log_det(factor_of(net.root * t**-0.5, net.kernel))
        totals[f"tempered {t:g}"] = t * (fit / t - 0.5 * net.square - 0.5 * tempered)
    averaged, factor, prior_covariance = net.root, net.factor, blocks(net.kernel, c)
    v = covariance(averaged, factor, net.kernel, prior_covariance)
    totals["leave-one-out"] = left_out(net, v)
    for _ in range(STEPS):
        mean = curvature(draws(net.f, v).flatten(0, 1)).view(DRAWS, n, c, c).mean(0)
        averaged = root_of(mean)
        factor = factor_of(averaged, net.kernel)
        v = covariance(averaged, factor, net.kernel, prior_covariance)
    expected = float(draws(net.f, v).log_softmax(2)[:, labels[0], labels[1]].mean(0).sum())
    trace = float((averaged @ averaged * v).sum())
    totals["averaged"] = expected - 0.5 * net.square + 0.5 * trace - 0.5 * log_det(factor)
    totals["conditional"] = conditional(net)
    return {name: value / n for name, value in totals.items()}


def left_out(net: Linearised, v: Tensor) -> float:
    """Return the approximate leave-one-out log likelihood of all data."""
    n, c = net.f.shape
    residual = net.f.softmax(1) - torch.eye(c, dtype=v.dtype)[net.y]
    inner = torch.eye(c, dtype=v.dtype) - curvature(net.f) @ v
    f = net.f + (v @ torch.linalg.solve(inner, residual[:, :, None])).squeeze(2)
    return float(f.log_softmax(1)[torch.arange(n), net.y].sum())


def conditional(net: Linearised) -> float:
    """Return twice the mean evidence of a half given the other half, on the scale of all data."""
    n, c = net.f.shape
    log_probs = net.f.log_softmax(1)[torch.arange(n), net.y]
    whole, evidences = log_det(net.factor), []
    generator = torch.Generator().manual_seed(0)
    for _ in range(HALVES):
        context, asked = torch.randperm(n, generator=generator).chunk(2)
        kernel = net.kernel.view(n, c, n, c)[context][:, :, context].reshape(len(context) * c, -1)
        part = log_det(factor_of(net.root[context], kernel))
        evidences.append(float(log_probs[asked].sum()) - 0.5 * (whole - part))
    return 2 * fmean(evidences)


def slopes(net: Linearised) -> dict[str, float]:
    """Return derivatives of the log evidence in the log of one decay, per example."""
    n = len(net.f)
    gamma = len(net.kernel) - float(torch.cholesky_inverse(net.factor).diagonal().sum())
    # (H + P0)⁻¹ P0 w = w − P0⁻¹ JᵀL (I + S)⁻¹ LᵀJ w
    c = net.f.shape[1]
    rows = torch.einsum("nab,nbp->nap", net.root, net.rows.view(n, c, -1)).reshape(n * c, -1)
    solved = torch.cholesky_solve((rows @ net.flat)[:, None], net.factor).squeeze(1)
    direction = net.flat - (rows.T @ solved) / net.precision
    sizes = [w.numel() for w in net.weights.values()]
    log_dets = []
    for sign in (1, -1):
        parts = (net.flat + sign * SHIFT * direction).split(sizes)
        moved = {
            name: part.view_as(w)
            for (name, w), part in zip(net.weights.items(), parts, strict=True)
        }
        f, jacobian = net.passed(net.x, moved)
        kernel = jacobian @ (jacobian / net.precision).T
        log_dets.append(log_det(factor_of(root_of(curvature(f)), kernel)))
    along = (log_dets[0] - log_dets[1]) / (2 * SHIFT)
    return {"partial": 0.5 * (gamma - net.square) / n, "implicit": 0.5 * along / n}


def posterior(net: Linearised, test: Pair) -> float:
    """Return the mean log likelihood of the test data by the linearized posterior."""
    log_likelihoods = []
    for x, y in zip(test[0].double().split(AT_ONCE), test[1].split(AT_ONCE), strict=True):
        f, rows = net.passed(x, net.weights)
        scaled = rows / net.precision
        prior_covariance = blocks(rows @ scaled.T, f.shape[1])
        v = covariance(net.root, net.factor, scaled @ net.rows.T, prior_covariance)
        log_probs = draws(f, v).log_softmax(2)[:, torch.arange(len(y)), y]
        log_likelihoods.append(log_probs.logsumexp(0) - math.log(DRAWS))
    return float(torch.cat(log_likelihoods).mean())


def run(data: DataSet, name: str, setting: str, seed: int) -> Result:
    """Return all numbers of one training."""
    model = make_model(IMAGES[name][0], data.input_shape, data.num_outputs, seed)
    kind, _, decay = setting.partition(" ")
    options: dict[str, Any] = {"optimization": Optimization(prior_update="adam")}
    if kind == "decay":
        options = {"estimator": None, "prior": fixed_prior(float(decay), len(data.train[0]))}
    elif kind == "fixed":
        options = {}
    result = evigrad.fit(
        model,
        data.train,
        test=data.test,
        seed=seed,
        schedule=SCHEDULE,
        progress=False,
        **options,
    )
    precisions = {n: p.item() for n, p in result.evidence.prior.precisions().items()}
    net = Linearised(model, precisions, data.train)
    columns = {
        "plug-in": result.test_metrics["log_likelihood"],
        "posterior": posterior(net, data.test),
    }
    columns |= criteria(net) | slopes(net)
    return columns | {"accuracy": result.test_metrics["accuracy"]}


def correlation(runs: Sequence[Result], criterion: str, judge: str) -> float:
    """Return Spearman's rank correlation over the settings, the mean over seeds."""
    correlations = []
    for seed in sorted({run["seed"] for run in runs}):
        runs_of_seed = [run for run in runs if run["seed"] == seed]
        correlations.append(
            spearmanr([r[criterion] for r in runs_of_seed], [r[judge] for r in runs_of_seed])[0]
        )
    return fmean(correlations)


def chosen(runs: Sequence[Result], criterion: str) -> float:
    """Return the test log likelihood at the setting with the highest criterion, over seeds."""
    seeds = sorted({run["seed"] for run in runs})
    best = [max((r for r in runs if r["seed"] == s), key=lambda r: r[criterion]) for s in seeds]
    return fmean(run["plug-in"] for run in best)


def tables_of(runs: list[Result]) -> str:
    """Return rank correlations and choices of the criteria, then all values, as Markdown."""
    names = [n for n in IMAGES if any(run["row"].startswith(f"{n}: ") for run in runs)]
    of = {n: [run for run in runs if run["row"].startswith(f"{n}: ")] for n in names}
    heads = [f"{n}, {LABELS.get(k, k)}" for n in names for k in (*JUDGES, "chosen")]
    lines = [f"| criterion | {' | '.join(heads)} |", "|---" * (len(heads) + 1) + "|"]
    for criterion in CRITERIA:
        cells = []
        for n in names:
            cells += [f"{correlation(of[n], criterion, judge):+.2f}" for judge in JUDGES]
            cells.append(f"{chosen(of[n], criterion):.3f}")
        lines.append(f"| {criterion} | {' | '.join(cells)} |")
    best = [cell for n in names for cell in ("–", "–", f"{chosen(of[n], JUDGES[0]):.3f}")]
    lines.append(f"| *test log likelihood* | {' | '.join(best)} |")
    heads = " | ".join(LABELS.get(key, key) for key in KEYS)
    lines += ["", f"| data: setting | accuracy, % | {heads} |", "|---" * (len(KEYS) + 2) + "|"]
    for n in names:
        for setting in SETTINGS:
            runs_of_setting = [run for run in of[n] if run["row"] == f"{n}: {setting}"]
            if runs_of_setting:
                values = [f"{fmean(run[key] for run in runs_of_setting):.3f}" for key in KEYS]
                accuracy = f"{100 * fmean(run['accuracy'] for run in runs_of_setting):.1f}"
                lines.append(f"| {n}: {setting} | {accuracy} | {' | '.join(values)} |")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> None:
    """Run what is missing, then print the tables and insert them into the pages."""
    parser = make_parser(__doc__)
    parser.add_argument("--sets", nargs="+", choices=list(IMAGES), default=SETS)
    parser.add_argument("--settings", nargs="+", choices=SETTINGS, default=SETTINGS)
    parser.add_argument("--subset", type=int, default=SUBSET)
    options = parse(parser, arguments)
    results = Results(options.results / "criteria.csv", COLUMNS)
    for seed in options.seeds:
        for name in options.sets:
            data = load(name, options.data_dir, subset=options.subset, seed=seed)
            data = data.with_test_subset(min(TEST, len(data.test[0])), 0)
            for setting in options.settings:
                row = f"{name}: {setting}"
                if not results.has(row, seed):
                    columns = run(data, name, setting, seed)
                    results.add({"row": row, "seed": seed, "threads": options.threads} | columns)
                    print(row, seed, {k: round(columns[k], 4) for k in KEYS}, flush=True)
    show("criteria", tables_of(results.read()), options.pages)


if __name__ == "__main__":
    main()
