"""Learn a rare class with and without class weights.

The data are synthetic, so that the true probabilities are known. One class has 4 % of the examples
and lies on an arc at the edge of the other class. The script trains ``EvidenceClassifier`` without
weights and with ``class_weight="balanced"``. It decides for the rare class above a threshold of
0.5, or above the frequency of the rare class. Weighted probabilities refer to a population in which
both classes are equally frequent. "Divided" probabilities are divided by the class weights and
normalized, and refer to the frequencies of the data again.

    python examples/rare_classes.py
    python examples/rare_classes.py --figure rare_classes.png

It takes about 35 s on one core. The following numbers are means of the seeds 0, 1 and 2. With a
threshold of 0.5 and no weights, the recall is 0.35. The true probabilities reach 0.45. The balanced
accuracy is 0.923 with weights, and 0.927 without weights and with the frequency as the threshold.
The test log likelihood is −0.080 without weights, −0.205 with weights and −0.082 after division.
The true probabilities reach −0.073. So a lower threshold replaces the weights here.
"""

import argparse
import math
from collections.abc import Sequence

import numpy as np
import torch
from sklearn.metrics import balanced_accuracy_score, log_loss

from evigrad.plots import LIGHT, new_figure, save
from evigrad.sklearn import EvidenceClassifier

SHARE, RADIUS, WIDTH = 0.04, 2.6, 0.4
NUM_TEST = 20_000
PLAIN, BALANCED, DIVIDED = "no weights", "balanced", "balanced, divided"
HEAD = "probabilities        threshold  recall  balanced accuracy  log likelihood  error of p"


def draw_examples(count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Return places (n, 2) and labels: 1 on a noisy half circle, 0 around its center."""
    generator = np.random.default_rng(seed)
    labels = (generator.random(count) < SHARE).astype(int)
    angle = math.pi * generator.random(count)
    arc = RADIUS * np.stack([np.cos(angle), np.sin(angle)], axis=1)
    noise = generator.normal(size=(count, 2))
    return np.where(labels[:, None] == 1, arc + WIDTH * noise, noise), labels


def true_probability(places: np.ndarray) -> np.ndarray:
    """Return the probability of the rare class at places (n, 2)."""
    angles = math.pi * (np.arange(400) + 0.5) / 400
    arc = RADIUS * np.stack([np.cos(angles), np.sin(angles)], axis=1)
    squared = ((places[:, None] - arc) ** 2).sum(axis=2)
    rare = SHARE * np.exp(-0.5 * squared / WIDTH**2).mean(axis=1) / WIDTH**2
    common = (1 - SHARE) * np.exp(-0.5 * (places**2).sum(axis=1))
    return rare / (rare + common)


def undo_weights(probability: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Return the probability of class 1 for the frequencies of the table."""
    shares = np.stack([1 - probability, probability], axis=1) / weights
    return shares[:, 1] / shares.sum(axis=1)


def draw(
    path: str,
    places: np.ndarray,
    labels: np.ndarray,
    classifiers: dict[str, EvidenceClassifier],
    predicted: dict[str, np.ndarray],
    test_labels: np.ndarray,
) -> None:
    """Draw the boundaries of the classifiers, and the calibration of all probabilities."""
    figure = new_figure(10, 4.2)
    left, right = figure.subplots(1, 2)
    left.plot(*places[labels == 0].T, ".", color=LIGHT.muted, markersize=3, alpha=0.4)
    left.plot(*places[labels == 1].T, ".", color=LIGHT.lines[1], markersize=6)
    left.plot([], [], ".", color=LIGHT.muted, label="common class")
    left.plot([], [], ".", color=LIGHT.lines[1], label="rare class")
    across, up = np.meshgrid(np.linspace(-4, 4, 80), np.linspace(-3.5, 4.5, 80))
    grid = np.stack([across.ravel(), up.ravel()], axis=1)
    for (name, classifier), shade in zip(
        classifiers.items(), (LIGHT.lines[0], LIGHT.lines[2]), strict=True
    ):
        heights = classifier.predict_proba(grid)[:, 1].reshape(across.shape)
        left.contour(across, up, heights, levels=[0.5], colors=[shade], linewidths=[1.8])
        left.plot([], [], color=shade, label=f"p = 0.5, {name}")
    left.set_ylim(-5.2, 4.5)
    left.set_xlabel("first input")
    left.set_ylabel("second input")
    left.legend(frameon=False, fontsize=8, ncols=2, loc="lower center")
    left.set_title("training data and decision boundaries", loc="left", fontsize=10)
    for (name, probability), shade in zip(
        predicted.items(), (LIGHT.lines[0], LIGHT.lines[2], LIGHT.lines[4]), strict=True
    ):
        bins = np.array_split(np.argsort(probability), 40)
        means = [[values[part].mean() for part in bins] for values in (probability, test_labels)]
        right.plot(*means, "o-", color=shade, markersize=4, label=name)
    right.plot([0, 1], [0, 1], ":", color=LIGHT.ink, label="calibrated")
    right.set_xlabel("predicted probability of the rare class")
    right.set_ylabel("frequency in test data")
    right.legend(frameon=False, fontsize=8, loc="upper left")
    right.set_title("calibration", loc="left", fontsize=10)
    for axes in figure.axes:
        axes.spines[["top", "right"]].set_visible(False)
    save(figure, path)


def main(arguments: Sequence[str] | None = None) -> dict[str, dict[str, float]]:
    """Train with and without weights, and print the results.

    Returns:
        The printed numbers, by probabilities and threshold.
    """
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--num-train", type=int, default=1500, help="number of training examples")
    parser.add_argument("--epochs", type=int, default=None)
    parser.add_argument("--seed", type=int, default=0, help="seed of data and training")
    parser.add_argument("--figure", help="draw into this file, a PNG")
    options = parser.parse_args(arguments)

    places, labels = draw_examples(options.num_train, options.seed)
    test_places, test_labels = draw_examples(NUM_TEST, seed=1000 + options.seed)
    truth = true_probability(test_places)
    classifiers, predicted = {}, {}
    for name, class_weight in ((PLAIN, None), (BALANCED, "balanced")):
        classifier = EvidenceClassifier(
            class_weight=class_weight, epochs=options.epochs, random_state=options.seed
        ).fit(places, labels)
        classifiers[name] = classifier
        predicted[name] = classifier.predict_proba(test_places)[:, 1].astype(float)
    weights = len(labels) / (2 * np.bincount(labels))  # of "balanced"
    predicted[DIVIDED] = undo_weights(predicted[BALANCED], weights)

    print(f"training examples by class: {np.bincount(labels)}\n{HEAD}")
    share, results = labels.mean(), {}
    for name, threshold in (
        (PLAIN, 0.5),
        (PLAIN, share),
        (BALANCED, 0.5),
        (DIVIDED, 0.5),
        (DIVIDED, share),
        ("truth", 0.5),
        ("truth", share),
    ):
        probability = truth if name == "truth" else predicted[name]
        row = results[f"{name}, {threshold:.2f}"] = {
            "recall": np.mean(probability[test_labels == 1] > threshold).item(),
            "balanced accuracy": balanced_accuracy_score(test_labels, probability > threshold),
            "log likelihood": -log_loss(test_labels, probability),
            "error of p": np.abs(probability - truth).mean().item(),
        }
        print(
            f"{name:20} {threshold:9.2f} {row['recall']:7.2f} {row['balanced accuracy']:18.3f}"
            f" {row['log likelihood']:15.4f} {row['error of p']:11.4f}"
        )
    for name, classifier in classifiers.items():
        print(f"{name:20} mode gap {classifier.result_.mode_gap or 0.0:.3f}")
    if options.figure:
        draw(options.figure, places, labels, classifiers, predicted, test_labels)
    return results


if __name__ == "__main__":
    torch.set_num_threads(1)  # such a small network gains nothing from more
    main()
