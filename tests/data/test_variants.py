"""Variants of image sets: every image transformed once, the same way in every subset."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from image_files import pixels, png, write

from evigrad.data import VARIANTS, DataSet, load
from evigrad.data.dataset import draw_subset
from evigrad.data.variants import BATCH, resampled, split_name, transformed, uniform_draws
from evigrad.invariances import AffineInvariance

# From the numbers of an image and the column and row of a pixel of the result, counted from the
# image's centre, to the column and row that it is read from.
Places = Callable[[np.ndarray, np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]


def rotated(degrees: float) -> Places:
    def places(u: np.ndarray, x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        angle = np.deg2rad(degrees * u[0])
        return np.cos(angle) * x - np.sin(angle) * y, np.sin(angle) * x + np.cos(angle) * y

    return places


PLACES: dict[str, Places] = {
    "rotated90": rotated(90),
    "rotated180": rotated(180),
    "translated8": lambda u, x, y: (x - 8 * u[0], y - 8 * u[1]),
    "scaled": lambda u, x, y: (x / 2 ** u[0], y / 2 ** u[0]),
}


def reference(images: np.ndarray, variant: str, u: np.ndarray) -> np.ndarray:
    """The transformed images by SciPy, in float64."""
    ndimage: Any = pytest.importorskip("scipy.ndimage")
    height, width = images.shape[-2:]
    row, column = np.mgrid[:height, :width].astype(np.float64)
    middle_x, middle_y = (width - 1) / 2, (height - 1) / 2
    result = np.empty(images.shape)
    for image, mine, numbers in zip(images, result, u, strict=True):
        x, y = PLACES[variant](numbers, column - middle_x, row - middle_y)
        for channel in range(len(image)):
            mine[channel] = ndimage.map_coordinates(
                image[channel].astype(np.float64),
                [y + middle_y, x + middle_x],
                order=1,
                mode="grid-constant",  # interpolates between the border and the black around it
            )
    return result


def raw(data: DataSet, x: torch.Tensor) -> torch.Tensor:
    """Pixels in [0, 1]."""
    return x * data.std + data.mean


@pytest.mark.each(1)
@pytest.mark.parametrize("shape", [(1, 8, 8), (3, 9, 14), (2, 21, 6), (1, 1, 5)])
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("part", ["train", "test"])
def test_interpolates_as_scipy_does(shape: tuple[int, int, int], variant: str, part: str) -> None:
    rows = np.array([3, 0, 40, 11, 12])
    images = pixels(len(rows), shape)
    u = uniform_draws(part, rows).numpy()
    result = transformed(images, variant, part, rows)
    assert result.dtype == torch.float32
    np.testing.assert_allclose(result.numpy(), reference(images, variant, u), atol=2e-5)


def by(images: np.ndarray, variant: str, *u: float) -> np.ndarray:
    """All images transformed by the same numbers."""
    draws = torch.tensor([u], dtype=torch.float64).expand(len(images), len(u))
    return resampled(images, VARIANTS[variant](draws, *images.shape[-2:])).numpy()


def test_no_transform_changes_nothing() -> None:
    for variant in VARIANTS:
        for shape in [(1, 28, 28), (3, 10, 7)]:
            images = pixels(4, shape)
            np.testing.assert_allclose(by(images, variant, 0.0, 0.0), images, rtol=0, atol=1e-9)


@pytest.mark.parametrize(("right", "down"), [(1, 0), (0, -3), (-8, 2), (8, 8)])
def test_whole_pixels_are_a_roll_on_black(right: int, down: int) -> None:
    images = pixels(3, (2, 11, 13))
    wide = np.pad(images, ((0, 0), (0, 0), (8, 8), (8, 8)))
    expected = np.roll(wide, (down, right), axis=(2, 3))[:, :, 8:-8, 8:-8]
    np.testing.assert_allclose(
        by(images, "translated8", right / 8, down / 8), expected, rtol=0, atol=1e-9
    )


def test_quarter_and_half_turns() -> None:
    square, oblong = pixels(2, (1, 9, 9)), pixels(2, (3, 6, 11))
    # A positive angle turns the image counter-clockwise, as rot90 does.
    for variant, quarter, half in (("rotated90", 1.0, None), ("rotated180", 0.5, 1.0)):
        expected = np.rot90(square, axes=(2, 3))
        np.testing.assert_allclose(by(square, variant, quarter, 0.0), expected, rtol=0, atol=1e-9)
        if half is not None:
            turned = oblong[:, :, ::-1, ::-1]
            np.testing.assert_allclose(by(oblong, variant, half, 0.0), turned, rtol=0, atol=1e-9)


def test_scaling_by_two_and_by_a_half() -> None:
    image = np.zeros((1, 1, 8, 12), dtype=np.uint8)
    image[0, 0, 2:6, 3:9] = 200
    larger, smaller = by(image, "scaled", 1.0, 0.0)[0, 0], by(image, "scaled", -1.0, 0.0)[0, 0]
    # Half the height and width: now all of it, but for the half pixel that blurs into the black.
    assert (larger[1:-1, 1:-1] == 200).all()
    assert larger.sum() == pytest.approx(4 * image.sum(), rel=0.15)
    # Now a quarter of each; every pixel is read where four of the image meet.
    assert (smaller[3:5, 5:7] == 200).all()
    assert smaller.sum() == pytest.approx(image.sum() / 4)


def test_the_convention_is_that_of_the_learned_transforms() -> None:
    images = pixels(6, (3, 10, 15))
    u = uniform_draws("train", np.arange(6))
    eps = torch.zeros(6, 6, dtype=torch.float64)
    eps[:, 2] = u[:, 0]
    learned = AffineInvariance({"rotation": math.pi}).double()
    expected = learned(torch.from_numpy(images).double(), eps)
    result = transformed(images, "rotated180", "train", np.arange(6))
    # The learned range is a float32, off by 1e-7.
    torch.testing.assert_close(result.double(), expected.detach(), atol=2e-3, rtol=0)


def test_draws_are_those_of_the_image() -> None:
    everything = uniform_draws("train", np.arange(1000))
    rows = np.random.RandomState(0).permutation(1000)[:100]
    assert torch.equal(uniform_draws("train", rows), everything[torch.from_numpy(rows)])
    assert torch.equal(uniform_draws("train", rows[:1]), everything[rows[0]][None])
    other = uniform_draws("test", np.arange(1000))
    both = torch.stack([everything[:, 0], everything[:, 1], other[:, 0], other[:, 1]])
    assert (torch.corrcoef(both) - torch.eye(4)).abs().max() < 0.12  # four deviations


def test_draws_never_change() -> None:
    # Other numbers are another data set: results would not compare any more.
    for part, first, second in (
        ("train", [-0.770891, -0.321297], [0.773802, -0.056703]),
        ("test", [-0.064496, -0.936886], [0.373821, -0.783326]),
    ):
        draws = uniform_draws(part, np.arange(2)).numpy()
        np.testing.assert_allclose(draws, [first, second], atol=1e-6)


@pytest.mark.parametrize(
    ("variant", "largest", "measure"),
    [
        ("rotated90", math.pi / 2, lambda m: torch.atan2(m[:, 1, 0] / 2, m[:, 0, 0])),
        ("rotated180", math.pi, lambda m: torch.atan2(m[:, 1, 0] / 2, m[:, 0, 0])),
        ("translated8", 8.0, lambda m: -m[:, 0, 2] * 20),
        ("translated8", 8.0, lambda m: -m[:, 1, 2] * 10),
        ("scaled", math.log(2), lambda m: -m[:, 0, 0].log()),
    ],
)
def test_uniform_over_the_whole_range(
    variant: str, largest: float, measure: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    stats: Any = pytest.importorskip("scipy.stats")
    for part in ("train", "test"):
        # An image of 20 rows and 40 columns.
        maps = VARIANTS[variant](uniform_draws(part, np.arange(20_000)), 20, 40)
        sizes = measure(maps).numpy()
        assert np.abs(sizes).max() <= largest
        assert stats.kstest(sizes, stats.uniform(-largest, 2 * largest).cdf).pvalue > 1e-3


def test_batches_make_no_difference() -> None:
    images, rows = pixels(2 * BATCH + 3, (1, 5, 4)), np.arange(2 * BATCH + 3)[::-1]
    together = transformed(images, "rotated180", "test", rows)
    for index in (0, BATCH - 1, BATCH, 2 * BATCH + 2):
        alone = transformed(images[index, None], "rotated180", "test", rows[index, None])
        assert torch.equal(together[index], alone[0])


@pytest.mark.parametrize("variant", VARIANTS)
def test_an_image_is_the_same_in_every_subset(variant: str) -> None:
    whole = load(f"digits:{variant}")
    assert whole.name == f"digits:{variant}"
    for subset, seed in ((50, 3), (200, 3), (60, 8)):
        subset_data = load(f"digits:{variant}", subset=subset, seed=seed)
        rows = torch.from_numpy(draw_subset(1438, subset, seed))
        images = raw(whole, whole.train[0])[rows]
        torch.testing.assert_close(
            raw(subset_data, subset_data.train[0]), images, atol=1e-6, rtol=0
        )
        torch.testing.assert_close(raw(subset_data, subset_data.test[0]), raw(whole, whole.test[0]))
        assert torch.equal(subset_data.train[1], whole.train[1][rows])
        assert torch.equal(subset_data.test[1], whole.test[1])
        # The statistics are those of the drawn images as they are after the transform.
        torch.testing.assert_close(
            subset_data.train[0].double().mean().item(), 0.0, atol=1e-6, rtol=0
        )
        torch.testing.assert_close(subset_data.train[0].double().std(correction=0).item(), 1.0)


@pytest.mark.parametrize("name", ["digits", "mnist5k"])
def test_shipped_sets_are_transformed_before_anything_else(name: str) -> None:
    check_against_the_plain_set(name, None, "scaled", 16 if name == "digits" else 255)


@pytest.mark.parametrize(
    ("name", "variant"),
    [("mnist", "rotated180"), pytest.param("cifar10", "translated8", marks=pytest.mark.long)],
)
def test_real_sets(data_dir: Path, name: str, variant: str) -> None:
    if not (data_dir / f"{name}_train.parquet").is_file():
        pytest.skip(f"no {name} in the data folder")
    check_against_the_plain_set(name, data_dir, variant, 255)


def check_against_the_plain_set(name: str, folder: Path | None, variant: str, largest: int) -> None:
    plain = load(name, folder, subset=40, seed=1)
    data = load(f"{name}:{variant}", folder, subset=40, seed=1)
    assert torch.equal(data.train[1], plain.train[1])
    assert data.class_names == plain.class_names
    whole = {"digits": 1438, "mnist5k": 4000, "mnist": 60_000, "cifar10": 50_000}[name]
    rows = {"train": draw_subset(whole, 40, 1), "test": np.arange(40)}
    for part in ("train", "test"):
        original = raw(plain, getattr(plain, part)[0][:40]).mul(largest).round().numpy()
        u = uniform_draws(part, rows[part]).numpy()
        expected = reference(original.astype(np.uint8), variant, u) / largest
        result = raw(data, getattr(data, part)[0][:40])
        np.testing.assert_allclose(result.numpy(), expected, atol=2e-6)


def test_channels_have_statistics_of_their_own(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    images = pixels(5, (9, 7, 3))
    images[..., 2] = 0
    write(tmp_path / "toy_train.parquet", [png(image) for image in images], [0, 1, 2, 0, 1])
    write(tmp_path / "toy_test.parquet", [png(images[0])], [0])
    data = load("toy:rotated180", tmp_path)
    u = uniform_draws("train", np.arange(5)).numpy()
    expected = reference(images.transpose(0, 3, 1, 2), "rotated180", u) / 255
    np.testing.assert_allclose(data.mean.flatten(), expected.mean((0, 2, 3)), atol=1e-6)
    deviations = expected.std((0, 2, 3))
    np.testing.assert_allclose(data.std.flatten(), [*deviations[:2], 1.0], atol=1e-6)
    assert not data.train[0][:, 2].any()


def test_global_random_states_are_left_alone() -> None:
    ours, numpys = torch.get_rng_state(), np.random.get_state(legacy=False)["state"]["key"].tolist()
    load("digits:rotated90", subset=10)
    assert torch.equal(torch.get_rng_state(), ours)
    assert np.random.get_state(legacy=False)["state"]["key"].tolist() == numpys


def test_names() -> None:
    assert split_name("mnist") == ("mnist", None)
    assert split_name("uci/boston") == ("uci/boston", None)
    assert split_name("mnist:scaled") == ("mnist", "scaled")
