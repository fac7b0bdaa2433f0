"""Affine transforms against NumPy and SciPy in float64, and what can be learned of them."""

import copy
import math
import pickle

import numpy as np
import pytest
import torch
from scipy.linalg import expm
from scipy.ndimage import map_coordinates
from torch import Tensor, nn

from evigrad.errors import ConfigurationError, InputError
from evigrad.invariances import GENERATORS, AffineInvariance, affine
from evigrad.invariances.affine import LIMITS, matrix_exponential, sampling_grid
from evigrad.invariances.transform import folded

WIDE = {
    "translation_x": 0.4,
    "translation_y": 0.3,
    "rotation": 2.5,
    "scale_x": 0.5,
    "scale_y": 0.6,
    "shear": 0.35,
}


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def images(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=generator(seed), dtype=torch.float64)


def pixel_map(u: np.ndarray, ranges: dict[str, float], height: int, width: int) -> np.ndarray:
    """The map on (x, y, 1) in pixels from the centre, out of the paper's definition."""
    tx, ty, rotation, sx, sy, shear = (u[i] * ranges[name] for i, name in enumerate(GENERATORS))
    algebra = [
        [sx, -rotation + shear, tx * width / 2],
        [rotation + shear, sy, ty * height / 2],
        [0, 0, 0],
    ]
    return expm(np.array(algebra))


def reference(x: np.ndarray, eps: np.ndarray, ranges: dict[str, float]) -> np.ndarray:
    """One image at a time, interpolated linearly between zeros beyond the borders."""
    height, width = x.shape[-2:]
    rows, columns = np.mgrid[:height, :width]
    centre = np.array([(width - 1) / 2, (height - 1) / 2])
    result = np.empty_like(x)
    for n in range(len(x)):
        if eps.shape[1] == 7 and eps[n, 6] < 0:
            seen = columns[:, ::-1]
        else:
            seen = columns
        there = np.stack([seen - centre[0], rows - centre[1], np.ones_like(rows)])
        place = np.tensordot(pixel_map(eps[n], ranges, height, width), there, axes=1)
        for c in range(x.shape[1]):
            result[n, c] = map_coordinates(
                x[n, c],
                [place[1] + centre[1], place[0] + centre[0]],
                order=1,
                mode="grid-constant",
            )
    return result


@pytest.mark.each(1)
@pytest.mark.parametrize("shape", [(1, 8, 8), (3, 9, 9), (2, 6, 11), (5, 13, 4), (1, 1, 7)])
@pytest.mark.parametrize("flip", [False, True])
def test_against_numpy(shape: tuple[int, ...], flip: bool) -> None:
    invariance = AffineInvariance(WIDE, flip=flip).double()
    x = images(12, *shape)
    eps = invariance.sample(12, generator()).double()
    # The initial range is kept in single precision.
    ranges = dict(zip(GENERATORS, invariance.ranges.tolist(), strict=True))
    expected = reference(x.numpy(), eps.numpy(), ranges)
    result = invariance(x, eps).detach()
    assert np.abs(expected).max() > 0.5
    np.testing.assert_allclose(result.numpy(), expected, rtol=0, atol=1e-11)
    single = copy.deepcopy(invariance).float()(x.float(), eps.float())
    np.testing.assert_allclose(single.detach().numpy(), expected, rtol=0, atol=2e-4)


@pytest.mark.parametrize("name", GENERATORS)
def test_each_generator_alone(name: str) -> None:
    invariance = AffineInvariance({name: 0.7}).double()
    x = images(6, 1, 7, 10)
    eps = invariance.sample(6, generator()).double()
    ranges = {**dict.fromkeys(GENERATORS, 0.0), name: float(np.float32(0.7))}
    expected = reference(x.numpy(), eps.numpy(), ranges)
    np.testing.assert_allclose(invariance(x, eps).detach(), expected, rtol=0, atol=1e-11)


def test_right_angles_on_an_image_that_is_not_square() -> None:
    x = torch.zeros(1, 1, 5, 9, dtype=torch.float64)
    x[..., 2, 6] = 1.0  # two pixels to the right of the centre
    invariance = AffineInvariance({"rotation": math.pi}).double()
    result = invariance(x, torch.tensor([[0, 0, 0.5, 0, 0, 0]], dtype=torch.float64))
    place = result[0, 0].detach().nonzero(as_tuple=False)
    brightest = result[0, 0].argmax().item()
    assert result.max().item() == pytest.approx(1.0, abs=1e-6)
    assert divmod(int(brightest), 9) == (0, 4)  # two pixels above or below it
    assert len(place) >= 1


def test_a_translation_of_one_is_half_the_image() -> None:
    x = images(1, 1, 4, 6)
    invariance = AffineInvariance({"translation_x": 1.0, "translation_y": 1.0}).double()
    result = invariance(x, torch.tensor([[1.0, -0.5, 0, 0, 0, 0]], dtype=torch.float64))
    expected = torch.zeros_like(x)
    expected[..., 1:, :3] = x[..., :3, 3:]
    torch.testing.assert_close(result.detach(), expected)


def test_no_ranges_change_nothing() -> None:
    invariance = AffineInvariance(0.0, flip=True).double()
    x = images(20, 2, 6, 7)
    eps = invariance.sample(20, generator()).double()
    mirrored = eps[:, 6] < 0
    assert 0 < mirrored.sum() < 20
    result = invariance(x, eps).detach()
    torch.testing.assert_close(result[~mirrored], x[~mirrored])
    torch.testing.assert_close(result[mirrored], x[mirrored].flip(-1))


# ---------------------------------------------------------------------------- exactness


def corners() -> Tensor:
    """Elements of the Lie algebra at the limits, in all combinations of signs, and inside."""
    signs = torch.cartesian_prod(*[torch.tensor([-1.0, 1.0], dtype=torch.float64)] * 6)
    inside = 2 * torch.rand(40, 6, generator=generator(), dtype=torch.float64) - 1
    signs = torch.cat([signs, inside, inside.sign() * (inside.abs() > 0.5)])
    limits = torch.tensor(list(LIMITS.values()), dtype=torch.float64)
    matrices = torch.tensor(list(affine._MATRICES.values()), dtype=torch.float64)
    return torch.einsum("ni,ijk->njk", signs * limits, matrices)


def test_matrix_exponential_up_to_the_limits() -> None:
    algebra = corners()
    assert torch.linalg.matrix_norm(algebra, ord=1).max() < 7.2  # what its order is made for
    result, expected = matrix_exponential(algebra), expm(algebra.numpy())
    size = np.abs(expected).max(axis=(1, 2), keepdims=True)
    assert np.max(np.abs(result.numpy() - expected) / size) < 1e-12


def test_derivative_of_the_matrix_exponential() -> None:
    algebra = (images(20, 3, 3) * torch.tensor([1.0, 1.0, 0.0])[:, None]).requires_grad_()
    cotangent = images(20, 3, 3, seed=1)
    (result,) = torch.autograd.grad((matrix_exponential(algebra) * cotangent).sum(), algebra)
    (expected,) = torch.autograd.grad((torch.matrix_exp(algebra) * cotangent).sum(), algebra)
    torch.testing.assert_close(result, expected, rtol=1e-11, atol=1e-11)


def test_maps_in_single_precision() -> None:
    invariance = AffineInvariance(WIDE)
    eps = invariance.sample(40, generator())
    ranges = dict(zip(GENERATORS, invariance.ranges.tolist(), strict=True))
    result = invariance.maps(eps, 6, 11).float().detach().numpy()
    sides = np.array([11 / 2, 6 / 2, 1])
    for n in range(40):
        pixels = pixel_map(eps[n].double().numpy(), ranges, 6, 11)
        expected = (pixels * sides / sides[:, None])[:2]
        assert np.abs(result[n] - expected).max() <= 1e-6 * np.abs(expected).max()


def test_sampling_grid_is_that_of_pytorch() -> None:
    maps = images(4, 2, 3)
    expected = nn.functional.affine_grid(maps, [4, 1, 5, 8], align_corners=False)
    torch.testing.assert_close(sampling_grid(maps, 5, 8), expected)


# ---------------------------------------------------------------------------- gradients


def objective(invariance: AffineInvariance, x: Tensor, eps: Tensor) -> Tensor:
    return (invariance(x, eps) * images(*x.shape, seed=7)).sum()


@pytest.mark.parametrize("flip", [False, True])
def test_gradients_of_the_ranges(flip: bool) -> None:
    invariance = AffineInvariance(WIDE, flip=flip).double()
    x = images(10, 2, 7, 9)
    eps = invariance.sample(10, generator()).double()
    gradients = torch.autograd.grad(objective(invariance, x, eps), [*invariance.parameters()])
    step = 1e-6
    for (name, parameter), gradient in zip(invariance.named_parameters(), gradients, strict=True):
        values = []
        for sign in (1, -1):
            with torch.no_grad():
                parameter += sign * step
                values.append(objective(invariance, x, eps).item())
                parameter -= sign * step
        numeric = (values[0] - values[1]) / (2 * step)
        assert gradient.item() == pytest.approx(numeric, rel=1e-5, abs=1e-6), name


@pytest.mark.parametrize("name", GENERATORS)
def test_a_range_of_zero_has_a_gradient(name: str) -> None:
    invariance = AffineInvariance({name: 0.0}).double()
    x, eps = images(5, 1, 8, 8), invariance.sample(5, generator()).double()
    objective(invariance, x, eps).backward()
    gradient = invariance.get_parameter(name).grad
    assert gradient is not None and gradient != 0


@pytest.mark.one_in(3)
@pytest.mark.parametrize("start", [2.0, math.pi, 3.5, 6.0, 100.0, -0.2, -50.0])
def test_no_start_is_stuck(start: float) -> None:
    """From beyond π and from below 0 an optimiser finds back, and to π if that is best."""
    for goal in (1.0, math.pi):
        raw = torch.tensor(start, requires_grad=True)
        optimiser = torch.optim.Adam([raw], lr=0.05)
        for _ in range(250):
            value = folded(raw, math.pi)
            assert 0 <= value <= math.pi + 1e-6
            optimiser.zero_grad()
            (value - goal).square().backward()
            assert raw.grad is not None and (raw.grad != 0 or abs(value.item() - goal) < 1e-6)
            optimiser.step()
        assert folded(raw, math.pi).item() == pytest.approx(goal, abs=0.05)


def test_folding() -> None:
    raw = torch.tensor([-5.0, -2.5, -0.5, 0.0, 0.5, 2.0, 2.5, 4.0, 5.5], requires_grad=True)
    value = folded(raw, 2.0)
    torch.testing.assert_close(
        value.detach(), torch.tensor([1.0, 1.5, 0.5, 0.0, 0.5, 2.0, 1.5, 0.0, 1.5])
    )
    (gradient,) = torch.autograd.grad(value.sum(), raw)
    torch.testing.assert_close(gradient.abs(), torch.ones(9))
    assert gradient[3] == 1  # at zero itself as well
    torch.testing.assert_close(folded(raw, math.inf), raw.abs())


# ---------------------------------------------------------------------------- noise


def test_noise_is_uniform_and_from_the_generator_alone() -> None:
    invariance = AffineInvariance(flip=True)
    state = torch.get_rng_state()
    eps = invariance.sample(4000, generator(3))
    assert torch.equal(eps, invariance.sample(4000, generator(3)))
    assert not torch.equal(eps, invariance.sample(4000, generator(4)))
    assert torch.equal(state, torch.get_rng_state())
    assert eps.shape == (4000, 7) and eps.device.type == "cpu" and eps.dtype == torch.float32
    assert eps.min() >= -1 and eps.max() < 1
    torch.testing.assert_close(eps.mean(0), torch.zeros(7), rtol=0, atol=0.05)
    torch.testing.assert_close(eps.var(0), torch.full((7,), 1 / 3), rtol=0, atol=0.03)
    assert AffineInvariance().sample(2, generator()).shape == (2, 6)


def test_an_image_does_not_depend_on_its_batch() -> None:
    invariance = AffineInvariance(WIDE, flip=True)
    x, eps = images(9, 2, 6, 7).float(), invariance.sample(9, generator())
    whole = invariance(x, eps)
    parts = [invariance(x[i : i + 4], eps[i : i + 4]) for i in range(0, 9, 4)]
    torch.testing.assert_close(torch.cat(parts), whole)


# ---------------------------------------------------------------------------- options


def test_learned_and_fixed_ranges() -> None:
    everything = AffineInvariance(0.2)
    assert list(dict(everything.named_parameters())) == list(GENERATORS)
    assert everything.named_ranges() == pytest.approx(dict.fromkeys(GENERATORS, 0.2))
    rotation = AffineInvariance({"rotation": 1.0})
    assert list(dict(rotation.named_parameters())) == ["rotation"]
    assert rotation.named_ranges()["rotation"] == 1.0
    assert sum(rotation.named_ranges().values()) == 1.0
    fixed = AffineInvariance({"rotation": math.pi}, learn=False)
    assert not list(fixed.parameters())
    assert fixed.named_ranges()["rotation"] == pytest.approx(math.pi)
    partly_learned = AffineInvariance({"rotation": 1.0, "shear": 0.1}, learn=["shear"])
    assert list(dict(partly_learned.named_parameters())) == ["shear"]
    assert list(dict(AffineInvariance(0.1, learn="shear").named_parameters())) == ["shear"]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"ranges": {"rotate": 1.0}}, "Did you mean 'rotation'"),
        ({"learn": ["scalex"]}, "Did you mean 'scale_x'"),
        ({"ranges": -0.1}, "between 0 and 1, got -0.1"),
        ({"ranges": {"rotation": 3.2}}, "between 0 and 3.142, got 3.2"),
        ({"ranges": {"translation_y": 1.1}}, "range of translation_y must be between 0 and 1, got"),
        ({"ranges": {"shear": 2.1}}, "between 0 and 2, got 2.1"),
        ({"ranges": math.nan}, "between 0 and"),
    ],
)
def test_errors_say_what_to_mend(settings: dict, words: str) -> None:
    with pytest.raises(ConfigurationError) as error:
        AffineInvariance(**settings)
    assert words in str(error.value)


@pytest.mark.parametrize("x", [torch.zeros(2, 3, 4), torch.zeros(2, 1, 4, 4, dtype=torch.uint8)])
def test_only_images_of_real_numbers(x: Tensor) -> None:
    invariance = AffineInvariance()
    # Called past the shapes that the tests check, as it is where they are not.
    with pytest.raises(InputError, match="floating-point"):
        invariance._check(x)


def test_state_copies_and_representation() -> None:
    invariance = AffineInvariance(WIDE, learn=["rotation"], flip=True)
    other = AffineInvariance({"rotation": 0.0}, flip=True)
    other.load_state_dict(invariance.state_dict())
    assert other.named_ranges() == invariance.named_ranges()
    assert set(invariance.state_dict()) == set(GENERATORS)
    x, eps = torch.randn(3, 1, 5, 5), invariance.sample(3, generator())
    for copied in (copy.deepcopy(invariance), pickle.loads(pickle.dumps(invariance))):
        assert torch.equal(copied(x, eps), invariance(x, eps))
    assert "rotation=2.5" in repr(invariance) and "flip=True" in repr(invariance)


def test_module_apply_still_visits_modules() -> None:
    invariance = AffineInvariance()
    seen: list[nn.Module] = []
    model = nn.Sequential(nn.ReLU(), invariance)
    assert model.apply(seen.append) is model
    assert seen == [model[0], invariance, model]
    x, eps = torch.randn(3, 1, 5, 5), invariance.sample(3, generator())
    assert torch.equal(invariance.apply(x, eps), invariance(x, eps))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_images(dtype: torch.dtype) -> None:
    invariance = AffineInvariance(WIDE)
    x, eps = torch.randn(4, 1, 32, 32).to(dtype), invariance.sample(4, generator())
    result = invariance(x, eps)
    assert result.dtype == dtype
    torch.testing.assert_close(result, invariance(x.float(), eps).to(dtype))


# ------------------------------------------------------------------ beyond the borders


def test_the_fill_is_what_lies_beyond_the_borders() -> None:
    """The same as zeros, on images from which it was subtracted."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(4, 2, 5, 6, generator=generator, dtype=torch.float64)
    fill = torch.tensor([-0.5, 1.5], dtype=torch.float64)[:, None, None]
    plain = AffineInvariance(1.0, flip=True).double()
    filled = AffineInvariance(1.0, flip=True, fill=[-0.5, 1.5]).double()
    eps = plain.sample(4, generator)
    torch.testing.assert_close(filled(x, eps), plain(x - fill, eps) + fill, rtol=1e-12, atol=1e-12)
    constant = fill.expand(4, 2, 5, 6)
    torch.testing.assert_close(filled(constant, eps), constant.contiguous())
    away = AffineInvariance({"translation_x": 1.0}, fill=3.0).double()
    half = away(x, torch.ones(4, 6, dtype=torch.float64))
    expected = torch.cat([x[..., 3:], torch.full_like(x[..., 3:], 3.0)], dim=-1)
    torch.testing.assert_close(half, expected)


def test_fills_that_do_not_fit() -> None:
    for fill in (float("nan"), [], [0.0, float("inf")]):
        with pytest.raises(ConfigurationError, match="one finite number, or one per channel"):
            AffineInvariance(fill=fill)
    transform = AffineInvariance(fill=[0.0, 1.0])
    with pytest.raises(
        InputError, match="fill must have one value, or one per channel \\(3\\), got 2"
    ):
        transform(torch.zeros(1, 3, 4, 4), torch.zeros(1, 6))
