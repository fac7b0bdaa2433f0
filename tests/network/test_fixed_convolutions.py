"""A convolution with a fixed weight against PyTorch's own."""

from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from evigrad.network import Linearization, convolutions, plan
from evigrad.network.convolutions import Geometry, fixed_convolution

GEOMETRIES = {
    "same": Geometry((3, 3), (1, 1), (1, 1), (1, 1), 1),
    "strided": Geometry((2, 3), (2, 1), (0, 1), (1, 1), 1),
    "dilated, grouped": Geometry((3, 2), (1, 2), (2, 0), (2, 1), 2),
    "one dimension": Geometry((3,), (2,), (1,), (1,), 2),
    "three dimensions": Geometry((2, 1, 3), (1, 1, 2), (0, 0, 1), (1, 1, 1), 1),
    "one position": Geometry((6, 6), (1, 2), (0, 0), (1, 1), 1),
}


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("name", GEOMETRIES)
def test_value_and_two_derivatives(name: str) -> None:
    g = GEOMETRIES[name]
    x = random(2, 4, *(6,) * len(g.kernel)).requires_grad_()
    weight = random(6, 4 // g.groups, *g.kernel)
    for offset in (random(6), None):
        ours = partial(fixed_convolution, weight=weight, bias=offset, g=g)
        torch.testing.assert_close(ours(x), g.convolve(x, weight, offset))
        assert torch.autograd.gradcheck(ours, x, fast_mode=True)
        assert torch.autograd.gradgradcheck(lambda x, f=ours: f(x).sin(), x, fast_mode=True)


@pytest.mark.each(2)
@pytest.mark.parametrize("settings", [((1, 1), (0, 0)), ((2, 1), (2, 1))])
@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_gradient_of_inputs_with_few_channels(settings, channels, layout, monkeypatch) -> None:
    stride, padding = settings
    g = Geometry((3, 2), stride, padding, (1, 1), 1)
    x, weight = random(7, channels, 6, 5), random(4, channels, 3, 2)
    gradient = torch.randn_like(g.convolve(x, weight)).to(memory_format=layout)
    expected = g.input_gradient(x.shape, weight, gradient)
    monkeypatch.setattr(convolutions, "_PATCHES_BYTES", 3 * 4 * weight[0].numel() * 40)
    calls = []
    monkeypatch.setattr(Geometry, "_backward", lambda *_: calls.append("oneDNN"))
    result = g.input_gradient(x.shape, weight.float(), gradient.float())
    assert not calls
    torch.testing.assert_close(result, expected.float(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("channels", [1, 4])  # of one channel the layout is seen in strides alone
def test_layout_is_that_of_the_input(channels: int, layout: torch.memory_format) -> None:
    x = random(2, channels, 6, 6).clone(memory_format=layout)
    weight = random(6, channels, 3, 3).clone(memory_format=torch.channels_last)
    outputs = fixed_convolution(x, weight, None, GEOMETRIES["same"])
    assert outputs.is_contiguous(memory_format=layout)


@pytest.mark.each(2)
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("settings", [((1, 1), (0, 0)), ((2, 1), (2, 1))])
def test_few_small_images(settings, bias, layout, monkeypatch) -> None:
    stride, padding = settings
    g = Geometry((3, 2), stride, padding, (1, 1), 1)
    x, weight, offset = random(3, 8, 6, 5), random(4, 8, 3, 2), random(4) if bias else None
    expected = F.conv2d(x, weight, offset, stride, padding)
    gradient = torch.randn_like(expected)
    (of_input,) = torch.autograd.grad(
        F.conv2d(leaf := x.clone().requires_grad_(), weight, offset, stride, padding),
        leaf,
        gradient,
    )
    monkeypatch.setitem(convolutions.CONVOLUTIONS, 2, None)
    monkeypatch.setattr(Geometry, "_backward", None)
    x, gradient = (t.float().to(memory_format=layout) for t in (x, gradient))
    offset = offset if offset is None else offset.float()
    result = g.convolve(x, weight.float(), offset)
    assert result.is_contiguous(memory_format=layout)
    torch.testing.assert_close(result, expected.float(), rtol=1e-5, atol=1e-5)
    pulled = g.input_gradient(x.shape, weight.float(), gradient)
    torch.testing.assert_close(pulled, of_input.float(), rtol=1e-5, atol=1e-5)


@pytest.mark.each(1)
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("space", [(3,), (2, 3), (2, 1, 3), (1, 1)])
def test_a_kernel_as_large_as_the_input_is_a_matrix(space, bias, layout, monkeypatch) -> None:
    dims = len(space)
    g = Geometry(space, (2,) * dims, (0,) * dims, (1,) * dims, 1)
    x, weight, offset = random(5, 4, *space), random(3, 4, *space), random(3) if bias else None
    if dims == 2:
        x, weight = (t.contiguous(memory_format=layout) for t in (x, weight))
    expected = convolutions.CONVOLUTIONS[dims](leaf := x.clone().requires_grad_(), weight, offset)
    gradient = torch.randn_like(expected)
    (of_input,) = torch.autograd.grad(expected, leaf, gradient)
    monkeypatch.setitem(convolutions.CONVOLUTIONS, dims, None)
    monkeypatch.setattr(Geometry, "_backward", None)
    torch.testing.assert_close(g.convolve(x, weight, offset), expected.detach())
    torch.testing.assert_close(g.input_gradient(x.shape, weight, gradient), of_input)
    assert g.convolve(x[:0], weight, offset).shape == (0, *expected.shape[1:])
    assert g.input_gradient((0, *x.shape[1:]), weight, gradient[:0]).shape == (0, *x.shape[1:])


@pytest.mark.parametrize(
    "layers",
    [
        (nn.Conv2d(2, 4, 4), nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(4, 3)),
        (nn.Conv2d(2, 4, 3), nn.Tanh(), nn.Conv2d(4, 5, 2), nn.ReLU(inplace=True), nn.Flatten()),
    ],
)
def test_the_model_may_change_the_output_of_one_position_in_place(layers) -> None:
    model = nn.Sequential(*layers).double().eval()
    words = plan(model, dict(model.named_parameters()), random(4, 2, 4, 4)).describe()
    assert set(words.values()) <= {"conv2d", "linear"}


def test_autocast_does_not_round_the_gradient_of_one_position() -> None:
    g = GEOMETRIES["one position"]
    weight, gradient = random(3, 4, 6, 6).float(), random(5, 3, 1, 1).float()
    expected = g.input_gradient((5, 4, 6, 6), weight, gradient)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        result = g.input_gradient((5, 4, 6, 6), weight, gradient)
        assert g.convolve(result, weight).dtype == torch.bfloat16
    torch.testing.assert_close(result, expected, rtol=0, atol=0)


def test_other_convolutions_are_not_a_matrix() -> None:
    plain = Geometry((2, 3), (1, 1), (0, 0), (1, 1), 1)
    assert plain.has_one_position((2, 3))
    assert not plain.has_one_position((3, 3))
    for change in ({"padding": (0, 1)}, {"groups": 2}, {"dilation": (2, 1)}):
        assert not replace(plain, **change).has_one_position((2, 3))


def test_other_images_use_the_usual_algorithm() -> None:
    g, weight = GEOMETRIES["same"], random(4, 8, 3, 3).float()
    few, most = random(3, 8, 6, 6), convolutions._FEW_MULTIPLICATIONS
    assert g._is_small(few.float(), weight)
    assert not g._is_small(few, weight.double())
    assert not g._is_small(few[:0].float(), weight)
    assert not g._is_small(few[:, :0].float(), weight[:, :0])
    assert not g._is_small(random(17, 8, 6, 6).float(), weight)
    size = 1 + round((most / weight.numel()) ** 0.5)
    assert not g._is_small(random(1, 8, size, size).float(), weight)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert not g._is_small(few.float(), weight)
        assert g.convolve(few.float(), weight).dtype == torch.bfloat16
    assert g.convolve(few[:0].float(), weight).shape == (0, 4, 6, 6)


class Branches(nn.Module):
    """Two parameters of which each datum's rows are the same gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(random(1, 3))
        self.second = nn.Parameter(random(1, 3))

    def forward(self, x: Tensor) -> Tensor:
        return (x + self.first + self.second).sin()


def test_rows_never_share_memory() -> None:
    """What keeps rows may write over them."""
    model = Branches().eval()
    weights, x = dict(model.named_parameters()), random(4, 3)
    jacobian_plan = plan(model, weights, x)
    rows = Linearization(model, weights, x, jacobian_plan, False).rows(random(4, 1, 3))
    kept = rows["second"].clone()
    rows["first"].zero_()
    torch.testing.assert_close(rows["second"], kept)
