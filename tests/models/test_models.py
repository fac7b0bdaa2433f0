"""Networks by name: sizes, shapes, seeds and errors."""

import pickle

import pytest
import torch

from evigrad.errors import ConfigurationError
from evigrad.models import MODELS, make_model, make_network


def num_parameters(model: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


SHAPES = {
    "mlp": (3, 5),
    "digitsnet": (1, 8, 8),
    "mininet": (1, 28, 28),
    "lenet": (1, 28, 28),
    "cnn": (1, 8, 8),
    "resnet18": (3, 8, 8),
    "resnet50": (3, 8, 8),
    "wrn16-4": (3, 8, 8),
    "wide_resnet": (3, 8, 8),
    "transformer": (5, 2),
    "gru": (5, 2),
}


@pytest.mark.parametrize("name", MODELS)
def test_every_model(name: str) -> None:
    """Outputs of each datum by itself, copies, and weights from the seed alone."""
    torch.manual_seed(5)
    model = make_model(name, SHAPES[name], 10, seed=1).double()
    first, state = model.state_dict(), torch.get_rng_state()
    torch.manual_seed(6)
    again, other = (
        make_model(name, SHAPES[name], 10, seed=seed).double().state_dict() for seed in (1, 2)
    )
    assert all(torch.equal(first[key], again[key]) for key in first)
    assert not all(torch.equal(first[key], other[key]) for key in first)
    torch.manual_seed(5)
    assert torch.equal(torch.get_rng_state(), state)
    x = torch.randn(4, *SHAPES[name], dtype=torch.float64)
    f = model(x)
    assert f.shape == (4, 10)
    torch.testing.assert_close(f[1:2], model(x[1:2]))
    assert torch.equal(pickle.loads(pickle.dumps(model))(x), f)


def test_the_network_of_a_run_has_channels_last() -> None:
    arguments = {"name": "mininet", "input_shape": [3, 28, 28], "num_outputs": 10}
    kernels = [
        p
        for p in make_network({"model": arguments, "invariance": None}).parameters()
        if p.dim() == 4
    ]
    assert kernels and all(p.stride(1) == 1 for p in kernels)


def test_mininet_is_the_papers() -> None:
    model = make_model("mininet", (1, 28, 28), 10)
    assert num_parameters(model) == 14_538
    # What determines the padding: 32 features reach the last layer.
    assert model.get_parameter("output.weight").shape == (10, 32)
    kernels = [model.get_parameter(f"conv{i}.weight").shape for i in (1, 2, 3)]
    assert kernels == [(8, 1, 5, 5), (16, 8, 3, 3), (32, 16, 5, 5)]


def test_mininet_takes_larger_images() -> None:
    assert make_model("mininet", (3, 32, 36), 10)(torch.randn(2, 3, 32, 36)).shape == (2, 10)


@pytest.mark.parametrize(
    ("shape", "count"), [((1, 28, 28), 60_170), ((3, 32, 32), 62_006), ((1, 32, 32), 61_706)]
)
def test_lenet_shrinks_its_image_to_one_pixel(shape: tuple[int, ...], count: int) -> None:
    # 61,706 is LeNet-5's well-known number on 32 x 32 pixels of one channel.
    model = make_model("lenet", shape, 10)
    assert num_parameters(model) == count
    assert model.get_parameter("linear.weight").shape == (84, 120)


def test_digitsnet_is_small() -> None:
    assert num_parameters(make_model("digitsnet", (1, 8, 8), 10)) == 6_090


@pytest.mark.parametrize(("hidden", "count"), [([], 16 * 3 + 3), ([5], 16 * 5 + 5 + 5 * 3 + 3)])
def test_mlp_widths(hidden: list[int], count: int) -> None:
    assert num_parameters(make_model("mlp", (4, 4), 3, hidden=hidden)) == count


def test_mlp_activation() -> None:
    model = make_model("mlp", (2,), 1, hidden=[3], activation="tanh")
    x = torch.randn(5, 2)
    hidden = torch.tanh(
        x @ model.get_parameter("linear1.weight").T + model.get_parameter("linear1.bias")
    )
    expected = hidden @ model.get_parameter("output.weight").T + model.get_parameter("output.bias")
    torch.testing.assert_close(model(x), expected)


def test_without_a_seed_the_global_state_is_used() -> None:
    torch.manual_seed(0)
    first = make_model("mlp", (2,), 1).state_dict()
    second = make_model("mlp", (2,), 1).state_dict()
    torch.manual_seed(0)
    again = make_model("mlp", (2,), 1).state_dict()
    assert all(torch.equal(first[key], again[key]) for key in first)
    assert not all(torch.equal(first[key], second[key]) for key in first)


def test_errors_say_what_to_mend() -> None:
    for name, shape, outputs, settings, words in [
        ("mininett", (1, 28, 28), 10, {}, "Did you mean 'mininet'"),
        ("mlp", (4,), 2, {"hiden": [3]}, "no setting 'hiden'. Did you mean 'hidden'"),
        ("digitsnet", (1, 8, 8), 10, {"width": 3}, "no setting 'width'. It has none"),
        ("mlp", (4,), 2, {"activation": "rellu"}, "Did you mean 'relu'"),
        ("mlp", (4,), 2, {"hidden": [3, 0]}, "Every width"),
        ("mlp", (4, 0), 2, {}, "at least 1"),
        ("mlp", (4,), 0, {}, "at least 1"),
        ("mlp", (), 1, {}, "at least 1"),
        ("mininet", (1, 27, 28), 10, {}, "at least 28x28"),
        ("digitsnet", (64,), 10, {}, "at least 4x4"),
        ("lenet", (1, 24, 28), 10, {}, "at least 28x28"),
        ("resnet50", (3, 7, 8), 10, {}, "at least 8x8"),
        ("resnet18", (3, 8, 8), 10, {"width": 0}, "width must be at least 1, got 0"),
        ("wide_resnet", (3, 8, 8), 10, {"depth": 18}, "10, 16, 22"),
        ("wide_resnet", (3, 8, 8), 10, {"depth": 4}, "10, 16, 22"),
        (
            "wide_resnet",
            (3, 8, 8),
            10,
            {"widen_factor": 0},
            "widen_factor must be at least 1, got 0",
        ),
        ("wrn16-4", (48,), 10, {}, "at least 8x8"),
    ]:
        with pytest.raises(ConfigurationError) as error:
            make_model(name, shape, outputs, **settings)
        assert words in str(error.value)


@pytest.mark.parametrize(("depth", "width", "size"), [(1, 4, 8), (2, 8, 8), (5, 3, 28), (3, 2, 1)])
def test_cnn_has_any_depth_and_width(depth: int, width: int, size: int) -> None:
    model = make_model("cnn", (1, size, size), 10, depth=depth, width=width)
    assert model(torch.randn(2, 1, size, size)).shape == (2, 10)
    convolutions = [w for name, w in model.named_parameters() if name.startswith("conv")]
    assert len(convolutions) == 2 * depth
    assert (
        num_parameters(model)
        == (9 + 1) * width + (depth - 1) * (9 * width + 1) * width + (width + 1) * 10
    )


def test_cnn_of_no_depth_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="must be at least 1, got 0"):
        make_model("cnn", (1, 8, 8), 10, depth=0)
