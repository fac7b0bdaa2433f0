"""Choose the hyperparameters of gradient boosting by Bayesian optimization with BoTorch.

scikit-learn's gradient boosting predicts the progress of diabetes (442 patients). Four of its
hyperparameters are chosen by the R² of a 5-fold cross-validation. ``EvidenceModel`` predicts R²
from the hyperparameters, and knows the noise of each observation from the folds. The network trains
after every 8 observations. The others are added in closed form.

    python examples/bayesian_optimization.py
"""

import argparse
import warnings
from collections.abc import Sequence

import torch
from botorch.acquisition import qLogNoisyExpectedImprovement
from botorch.optim import optimize_acqf
from sklearn.datasets import load_diabetes
from sklearn.ensemble import GradientBoostingRegressor
from sklearn.model_selection import cross_val_score
from torch import Tensor

from evigrad import Schedule
from evigrad.botorch import EvidenceModel

RETRAIN = 8
# log10 of the learning rate, number of trees, depth, share of the rows for each tree.
# With larger learning rates, boosting can diverge, and one huge target hides all others.
BOUNDS = torch.tensor([[-2.5, 20.0, 1.0, 0.3], [-0.5, 200.0, 5.0, 1.0]], dtype=torch.float64)


def settings(x: Tensor) -> dict[str, float | int]:
    """Return the hyperparameters of a point."""
    rate, trees, depth, share = x.tolist()
    return {
        "learning_rate": 10**rate,
        "n_estimators": round(trees),
        "max_depth": round(depth),
        "subsample": share,
    }


def score(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the mean R² over the folds, (1, 1), and the variance of this mean."""
    data, targets = load_diabetes(return_X_y=True)
    model = GradientBoostingRegressor(**settings(x), random_state=0)
    scores = torch.tensor(cross_val_score(model, data, targets, cv=5)).double()
    return scores.mean().view(1, 1), (scores.var() / len(scores)).view(1, 1)


def main(arguments: Sequence[str] | None = None) -> list[float]:
    """Return the best R² after each observation."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--first", type=int, default=10, help="number of random points")
    parser.add_argument("--steps", type=int, default=16, help="number of further points")
    parser.add_argument("--epochs", type=int, default=300, help="epochs of each training")
    options = parser.parse_args(arguments)
    warnings.filterwarnings("ignore", "Training has not converged")
    torch.manual_seed(0)
    x = BOUNDS[0] + (BOUNDS[1] - BOUNDS[0]) * torch.rand(options.first, 4, dtype=torch.float64)
    y, variance = (torch.cat(parts) for parts in zip(*map(score, x), strict=True))
    best, model = [float(y.max())], None
    print(f"best of {len(x)} random points: R² = {best[0]:.3f}")
    for step in range(options.steps):
        if model is None or step % RETRAIN == 0:
            schedule = Schedule(epochs=options.epochs, batch_size=len(x))
            model = EvidenceModel.fit(x, y, variance, schedule=schedule)
        acquisition = qLogNoisyExpectedImprovement(model, x, prune_baseline=True)
        point, _ = optimize_acqf(
            acquisition, BOUNDS, q=1, num_restarts=3, raw_samples=32, options={"maxiter": 30}
        )
        new_y, new_variance = score(point[0])
        # The model takes the variance in units of its standardized targets.
        scale = model.outcome_transform.stdvs.square().view(1, 1)
        model = model.condition_on_observations(point, new_y, noise=new_variance / scale)
        x, y, variance = (
            torch.cat(pair) for pair in ((x, point), (y, new_y), (variance, new_variance))
        )
        best.append(float(y.max()))
        print(f"{step + 1:2d}: R² = {float(new_y):.3f}, best {best[-1]:.3f}")
    shown = ", ".join(f"{k}={v:.3g}" for k, v in settings(x[y.argmax()]).items())
    print(f"best hyperparameters: {shown}")
    return best


if __name__ == "__main__":
    main()
