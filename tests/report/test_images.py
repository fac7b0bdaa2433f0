"""The grid of images and their transforms."""

from itertools import pairwise

import numpy as np
import pytest
import torch

from evigrad.errors import InputError
from evigrad.invariances import AffineInvariance

pytest.importorskip("matplotlib")

from evigrad.report import augmented_images, draw_transforms


def images_of(figure):
    return [np.asarray(image.get_array()) for image in figure.axes[0].images]


def test_the_grid_has_each_image_before_its_transforms():
    generator = torch.Generator().manual_seed(0)
    originals = torch.rand(2, 3, 5, 7, generator=generator)
    transformed = 3 * torch.rand(2, 4, 3, 5, 7, generator=generator) - 1
    figure = augmented_images(originals, transformed, ["cat", "tabby, tabby cat and so on"])
    images = images_of(figure)
    assert len(images) == 2 * 5
    np.testing.assert_array_equal(images[5], originals[1].permute(1, 2, 0))
    np.testing.assert_array_equal(images[7], transformed[1, 1].clamp(0, 1).permute(1, 2, 0))
    texts = [text.get_text() for text in figure.axes[0].texts]
    assert texts == ["cat", "tabby, tabby ca…", "original", "under the transform"]
    # Rows below each other, columns beside each other, and none on top of another.
    boxes = [image.get_extent() for image in figure.axes[0].images]
    for (left, right, bottom, top), (other, *_) in pairwise(boxes[:5]):
        assert other > right > left
        assert (right - left) / (bottom - top) == pytest.approx(7 / 5)
    assert boxes[5][3] > boxes[0][2]


def test_grey_images_are_grey():
    images = torch.full((1, 1, 4, 4), 0.25)
    (original, drawn) = images_of(augmented_images(images, images[:, None]))
    assert original.shape == (4, 4)
    assert original[0, 0] == drawn[0, 0] == 0.25


def test_what_is_no_grid_is_refused():
    images = torch.zeros(2, 1, 4, 4)
    with pytest.raises(InputError, match="height, width"):
        augmented_images(images, images)
    with pytest.raises(InputError, match="must have the same length"):
        augmented_images(images, torch.zeros(3, 5, 1, 4, 4))
    with pytest.raises(InputError, match="must have the same length"):
        augmented_images(images, images[:, None], ["one"])


def test_draws_are_the_transform_of_each_image_and_repeat():
    images = torch.rand(3, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    fixed = draw_transforms(images, AffineInvariance(0.0), 4)
    assert fixed.shape == (3, 4, 1, 8, 8)
    torch.testing.assert_close(fixed, images[:, None].expand_as(fixed), atol=1e-5, rtol=0)
    moving = AffineInvariance(1.0)
    state = torch.get_rng_state()
    first, second = draw_transforms(images, moving, 4), draw_transforms(images, moving, 4)
    assert torch.equal(first, second)
    assert not torch.allclose(first[:, 0], first[:, 1])
    assert torch.equal(torch.get_rng_state(), state)
