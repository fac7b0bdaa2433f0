"""Images of a run's data under the run's random transforms."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from evigrad import data as data_sets
from evigrad.data import DataSet
from evigrad.errors import ConfigurationError, InputError
from evigrad.invariances import Averaged
from evigrad.plots import LIGHT, Palette, new_figure
from evigrad.plots.style import SMALL, words
from evigrad.report.runs import Run
from evigrad.training import load

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Number of transforms per image, and the seed of their draws: a run always gives the same page.
DRAWS = 7
_SEED = 0
# Space between cells, and the wider one after the originals, as a share of a cell's side.
_GAP, _MARGIN = 0.06, 0.25
_CELL = 0.55  # inches
_LONGEST = 16  # maximum number of letters in a row's name


def augmented_images(
    images: Tensor, transformed: Tensor, names: Sequence[str] = (), palette: Palette = LIGHT
) -> "Figure":
    """Return a figure of n images next to their random transforms, one row per image.

    Args:
        images: Images (n, channels, height, width) with values from 0 (black) to 1. Other values
            are clipped. Three channels are red, green and blue. For any other number, the mean of
            the channels is shown.
        transformed: Transformed images (n, draws, channels, height, width).
        names: Names of the n rows. Default: no names.
        palette: Colors.

    Raises:
        InputError: If the shapes are not shapes of images or do not match.

    See also: docs/command_line.md.
    """
    if images.dim() != 4 or transformed.dim() != 5 or len(images) == 0:
        raise InputError(
            "images and transformed must have the shapes (n, channels, height, width) and (n,"
            f" draws, channels, height, width), got {tuple(images.shape)} and"
            f" {tuple(transformed.shape)}."
        )
    if transformed.shape[:1] + transformed.shape[2:] != images.shape or (
        names and len(names) != len(images)
    ):
        raise InputError(
            "images, transformed and names (if any) must have the same length, and images and"
            " transformed must have the same channels, height and width. The shapes are"
            f" {tuple(images.shape)} and {tuple(transformed.shape)}, and there are {len(names)}"
            " names."
        )
    rows, draws = transformed.shape[:2]
    height, width = images.shape[-2:]
    aspect = height / width
    right = 1 + _MARGIN + draws * (1 + _GAP)
    bottom = rows * (aspect + _GAP) - _GAP
    figure = new_figure(_CELL * right + 0.6, _CELL * bottom + 0.5, palette)
    axes = figure.add_subplot()
    for row in range(rows):
        top = row * (aspect + _GAP)
        for column, image in enumerate([images[row], *transformed[row]]):
            left = 0 if column == 0 else 1 + _MARGIN + (column - 1) * (1 + _GAP)
            axes.imshow(
                _pixels(image),
                cmap="gray",
                vmin=0,
                vmax=1,
                interpolation="nearest",
                extent=(left, left + 1, top + aspect, top),
            )
        if names:
            axes.text(
                -0.12,
                top + aspect / 2,
                words(_short(names[row])),
                ha="right",
                va="center",
                fontsize=SMALL,
                color=palette.ink,
            )
    for place, text in ((0.5, "original"), ((1 + _MARGIN + right) / 2, "under the transform")):
        axes.text(place, -0.12, text, ha="center", va="bottom", fontsize=SMALL, color=palette.ink)
    axes.set_xlim(0, right)
    axes.set_ylim(bottom, 0)
    axes.set_axis_off()
    return figure


def draw_transforms(images: Tensor, transform: nn.Module, draws: int = DRAWS) -> Tensor:
    """Return random transforms (n, draws, channels, height, width), the same in every call."""
    generator = torch.Generator().manual_seed(_SEED)
    chosen: Any = transform
    noise = chosen.sample(len(images) * draws, generator).to(images.device)
    with torch.no_grad():
        drawn = chosen.apply(images.repeat_interleave(draws, dim=0), noise)
    return drawn.unflatten(0, (len(images), draws))


def rebuild(run: Run, data_dir: str | Path | None = None) -> tuple[DataSet, nn.Module]:
    """Return the data and network of a command-line run at its last checkpoint, on the CPU."""
    options = run.options
    if not options:
        raise ConfigurationError(
            "The run has no config.yaml with its data and network, because it was started from"
            " Python."
        )
    selection = ("subset", "target", "likelihood", "features", "drop", "categorical")
    loaded = data_sets.load(
        options["data"],
        data_dir or options.get("data_dir"),
        seed=options.get("seed", 0),
        **{name: options.get(name) for name in selection},
        pixels=options.get("pixels", "normalized"),
    )
    if (test_subset := options.get("test_subset")) is not None:
        loaded = loaded.with_test_subset(test_subset, options.get("seed", 0))
    return loaded, load(run.path, device="cpu").model


def find_transform(data: DataSet, model: nn.Module) -> nn.Module | None:
    """Return the image transform that a network averages over, or None if it has none."""
    if len(data.input_shape) != 3:
        return None
    return next((part.invariance for part in model.modules() if isinstance(part, Averaged)), None)


def examples_of(data: DataSet, count: int) -> tuple[Tensor, list[str]]:
    """Return at most ``count`` scaled test images, and the names of their classes."""
    x, y = data.test
    chosen = _of_different_classes(y, min(count, len(x)))
    if not data.is_classification:
        return x[chosen], []
    return x[chosen], [data.class_names[int(label)] for label in y[chosen].tolist()]


def _of_different_classes(labels: Tensor, count: int) -> list[int]:
    """Return indices of the first example of each class, then the second of each, and so on."""
    seen: dict[float, int] = {}
    ranks = []
    for index, label in enumerate(labels.flatten().tolist()):
        ranks.append((seen.setdefault(label, 0), label, index))
        seen[label] += 1
    return [index for _, _, index in sorted(ranks)[:count]]


def _short(name: str) -> str:
    return name if len(name) <= _LONGEST else f"{name[: _LONGEST - 1].rstrip(' ,')}…"


def _pixels(image: Tensor) -> Any:
    image = image.detach().cpu().float().clamp(0, 1)
    if image.shape[0] == 3:
        return image.permute(1, 2, 0).numpy()
    return image.mean(0).numpy()
