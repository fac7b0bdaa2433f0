"""Image sets from Parquet files: small ones made here, and real ones where they are present."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from image_files import pixels, png, write

from evigrad.data import load
from evigrad.errors import ConfigurationError, EvigradError, InputError

pa: Any = pytest.importorskip("pyarrow")
pq: Any = pytest.importorskip("pyarrow.parquet")
pytest.importorskip("PIL.Image")


@pytest.fixture
def grey(tmp_path: Path) -> tuple[Path, np.ndarray]:
    """Folder with a data set "toy" of seven and three grey images, and the train pixels."""
    train = pixels(7, (4, 5))
    write(tmp_path / "toy_train.parquet", [png(p) for p in train], [0, 1, 0, 1, 0, 1, 0])
    write(tmp_path / "toy_test.parquet", [png(p) for p in pixels(3, (4, 5), 1)], [2, 1, 0])
    return tmp_path, train


def test_grey_images(grey: tuple[Path, np.ndarray]) -> None:
    folder, train = grey
    data = load("toy", data_dir=folder)
    x, y = data.train
    assert x.shape == (7, 1, 4, 5)
    assert data.test[0].shape == (3, 1, 4, 5)
    # Three classes by the metadata, though the train labels name two.
    assert (data.num_outputs, data.class_names) == (3, ("cat", "dog", "emu"))
    assert y.tolist() == [0, 1, 0, 1, 0, 1, 0]
    scaled = train[:, None] / 255
    np.testing.assert_allclose(data.mean.numpy().ravel(), scaled.mean(), rtol=1e-6)
    np.testing.assert_allclose(data.std.numpy().ravel(), scaled.std(), rtol=1e-6)
    expected = (scaled - scaled.mean()) / scaled.std()
    np.testing.assert_allclose(x.numpy(), expected, atol=1e-5)


def test_test_images_take_the_train_statistics(grey: tuple[Path, np.ndarray]) -> None:
    folder, train = grey
    scaled = train / 255
    expected = (pixels(3, (4, 5), 1) / 255 - scaled.mean()) / scaled.std()
    x = load("toy", data_dir=folder).test[0]
    np.testing.assert_allclose(x[:, 0].numpy(), expected, atol=1e-5)


def test_raw_pixels_are_between_zero_and_one(grey: tuple[Path, np.ndarray]) -> None:
    folder, train = grey
    data = load("toy", data_dir=folder, pixels="raw")
    np.testing.assert_allclose(data.train[0][:, 0].numpy(), train / 255, rtol=1e-6)
    np.testing.assert_allclose(data.test[0][:, 0].numpy(), pixels(3, (4, 5), 1) / 255, rtol=1e-6)
    assert data.mean.tolist() == [[[0.0]]] and data.std.tolist() == [[[1.0]]]
    # Normalized pixels are the raw ones with the statistics of the training images.
    scaled = load("toy", data_dir=folder)
    restored = scaled.train[0] * scaled.std + scaled.mean
    torch.testing.assert_close(restored, data.train[0], rtol=1e-5, atol=1e-6)


def test_a_scale_of_pixels_that_does_not_exist(grey: tuple[Path, np.ndarray]) -> None:
    with pytest.raises(ConfigurationError, match="one of normalized, raw, got 'row'.*'raw'"):
        load("toy", data_dir=grey[0], pixels="row")


def test_environment_variable(
    grey: tuple[Path, np.ndarray], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EVIGRAD_DATA", str(grey[0]))
    assert len(load("toy").train[0]) == 7


def test_subset_has_the_rows_statistics_and_labels_of_the_draw(
    grey: tuple[Path, np.ndarray],
) -> None:
    folder, train = grey
    data = load("toy", data_dir=folder, subset=4, seed=2)
    raw = (data.train[0] * data.std + data.mean).mul(255).round().numpy().astype(np.uint8)
    rows = [int(np.flatnonzero((train == image).all((1, 2)))[0]) for image in raw[:, 0]]
    assert len(set(rows)) == 4
    assert rows != sorted(rows)  # the draw's own order survives the row groups
    assert data.train[1].tolist() == [row % 2 for row in rows]
    scaled = train[rows] / 255
    np.testing.assert_allclose(data.mean.numpy().ravel(), scaled.mean(), rtol=1e-6)
    assert len(data.test[0]) == 3


def test_subset_decodes_only_what_it_draws(tmp_path: Path) -> None:
    images = [png(p) for p in pixels(2, (4, 5))]
    write(tmp_path / "toy_test.parquet", images, [0, 1])
    write(tmp_path / "toy_train.parquet", [b"no image", images[0], b"nor this"], [0, 1, 2])
    drawn = [seed for seed in range(20) if np.random.RandomState(seed).permutation(3)[0] == 1][0]
    assert load("toy", tmp_path, subset=1, seed=drawn).train[1].tolist() == [1]
    with pytest.raises(InputError, match="cannot be decoded"):
        load("toy", tmp_path)


def test_colour_and_grey_mixed(tmp_path: Path) -> None:
    colour, lone = pixels(3, (4, 5, 3)), pixels(1, (4, 5))[0]
    write(tmp_path / "toy_train.parquet", [png(colour[0]), png(lone), png(colour[1])], [0, 1, 2])
    write(tmp_path / "toy_test.parquet", [png(colour[2])], [0])
    data = load("toy", data_dir=tmp_path)
    assert data.input_shape == (3, 4, 5)
    raw = (data.train[0] * data.std + data.mean).mul(255).round().numpy().astype(np.uint8)
    assert np.array_equal(raw[0], colour[0].transpose(2, 0, 1))
    assert np.array_equal(raw[1], np.stack([lone] * 3))
    # Each channel has statistics of its own.
    np.testing.assert_allclose(data.train[0].mean((0, 2, 3)).numpy(), np.zeros(3), atol=1e-5)
    np.testing.assert_allclose(
        data.train[0].std((0, 2, 3), correction=0).numpy(), np.ones(3), rtol=1e-5
    )


def test_grey_train_and_colour_test(tmp_path: Path) -> None:
    write(tmp_path / "toy_train.parquet", [png(pixels(1, (4, 5))[0])], [0])
    write(tmp_path / "toy_test.parquet", [png(pixels(1, (4, 5, 3))[0])], [0])
    assert load("toy", data_dir=tmp_path).input_shape == (3, 4, 5)


def test_constant_channel(tmp_path: Path) -> None:
    image = png(np.full((4, 5), 51, np.uint8))
    write(tmp_path / "toy_train.parquet", [image], [0])
    write(tmp_path / "toy_test.parquet", [image], [0])
    data = load("toy", data_dir=tmp_path)
    assert data.std.item() == 1.0
    torch.testing.assert_close(data.train[0], torch.zeros(1, 1, 4, 5), atol=1e-6, rtol=0)


def test_a_label_that_is_no_class(tmp_path: Path) -> None:
    images = [png(p) for p in pixels(2, (4, 5))]
    for part in ("train", "test"):
        write(tmp_path / f"toy_{part}.parquet", images, [0, 10**9], names=None)
    with pytest.raises(InputError, match="got 1000000000"):
        load("toy", data_dir=tmp_path)


def test_damaged_images(grey: tuple[Path, np.ndarray]) -> None:
    file = grey[0] / "toy_train.parquet"
    content = file.read_bytes()
    refused = 0
    for place in np.random.RandomState(0).randint(0, len(content), 60):
        file.write_bytes(content[:place] + bytes([content[place] ^ 0xFF]) + content[place + 1 :])
        try:
            load("toy", data_dir=grey[0])
        except EvigradError:
            refused += 1
    assert refused > 10


def test_without_class_names(tmp_path: Path) -> None:
    images = [png(p) for p in pixels(3, (4, 5))]
    write(tmp_path / "toy_train.parquet", images, [0, 3, 1], names=None)
    write(tmp_path / "toy_test.parquet", images, [2, 3, 1], names=None)
    data = load("toy", data_dir=tmp_path, subset=1)
    # Counted over all train labels, not over the drawn ones.
    assert data.class_names == ("0", "1", "2", "3")


GOOD = png(pixels(1, (4, 5))[0])


def test_unusable_files(tmp_path: Path) -> None:
    for images, labels, words in [
        ([GOOD, png(pixels(1, (5, 5))[0])], [0, 1], "must have the same size"),
        ([GOOD, None], [0, 1], "row 1: the image has no bytes"),
        ([GOOD, b"junk"], [0, 1], "row 1: the image cannot be decoded"),
        ([GOOD, png(pixels(1, (4, 5, 4))[0])], [0, 1], "mode 'RGBA'"),
        ([GOOD, GOOD], [0, 3], "must be between 0 and 2, got 0 to 3"),
        ([GOOD, GOOD], [-1, 0], "got -1 to"),
        ([GOOD, GOOD], [0, None], "without a label"),
        ([GOOD, GOOD], [0.5, 1.0], "must contain integers"),
        ([], np.zeros(0, np.int64), "no rows"),
    ]:
        for split in ["train", "test"]:
            other = "test" if split == "train" else "train"
            write(tmp_path / f"toy_{split}.parquet", images, labels)
            write(tmp_path / f"toy_{other}.parquet", [GOOD], [0])
            with pytest.raises(InputError) as error:
                load("toy", data_dir=tmp_path)
            assert words in str(error.value)
            assert f"toy_{split}.parquet" in str(error.value)


def test_train_and_test_of_different_size(tmp_path: Path) -> None:
    write(tmp_path / "toy_train.parquet", [GOOD], [0])
    write(tmp_path / "toy_test.parquet", [png(pixels(1, (6, 5))[0])], [0])
    with pytest.raises(InputError, match=r"\(1, 6, 5\)"):
        load("toy", data_dir=tmp_path)


def test_missing_columns(grey: tuple[Path, np.ndarray]) -> None:
    pq.write_table(pa.table({"picture": [1], "label": [0]}), grey[0] / "toy_test.parquet")
    with pytest.raises(InputError, match=r"no column 'image', got picture, label"):
        load("toy", data_dir=grey[0])


def test_columns_as_the_hub_names_them(tmp_path: Path) -> None:
    images, columns = [png(p) for p in pixels(3, (4, 5, 3))], ("img", "fine_label")
    write(tmp_path / "toy_train.parquet", images, [0, 2, 1], columns=columns)
    write(tmp_path / "toy_test.parquet", images, [1, 1, 1], columns=columns)
    hubs = load("toy", tmp_path)
    assert hubs.class_names == ("cat", "dog", "emu")
    assert hubs.train[1].tolist() == [0, 2, 1]
    write(tmp_path / "toy_train.parquet", images, [0, 2, 1])
    assert torch.equal(load("toy", tmp_path).train[0], hubs.train[0])


def test_no_parquet(grey: tuple[Path, np.ndarray]) -> None:
    (grey[0] / "toy_test.parquet").write_text("no parquet")
    with pytest.raises(InputError, match="cannot be read as Parquet"):
        load("toy", data_dir=grey[0])


def test_subset_larger_than_the_train_set(grey: tuple[Path, np.ndarray]) -> None:
    with pytest.raises(ConfigurationError, match="subset must be between 1 and 7, .* got 8"):
        load("toy", data_dir=grey[0], subset=8)


def test_real_mnist(data_dir: Path) -> None:
    if not (data_dir / "mnist_train.parquet").is_file():
        pytest.skip("no mnist in the data folder")
    data = load("mnist", data_dir=data_dir, subset=1000)
    assert data.train[0].shape == (1000, 1, 28, 28)
    assert data.test[0].shape == (10_000, 1, 28, 28)
    assert data.num_outputs == 10
    # The whole set's commonly quoted mean and deviation are 0.1307 and 0.3081.
    assert abs(data.mean.item() - 0.1307) < 0.01
    assert abs(data.std.item() - 0.3081) < 0.01


def test_real_cifar10(data_dir: Path) -> None:
    if not (data_dir / "cifar10_train.parquet").is_file():
        pytest.skip("no cifar10 in the data folder")
    data = load("cifar10", data_dir=data_dir, subset=500)
    assert data.input_shape == (3, 32, 32)
    assert data.class_names[:2] == ("airplane", "automobile")
    expected = torch.tensor([0.4914, 0.4822, 0.4465])
    torch.testing.assert_close(data.mean.flatten(), expected, atol=0.03, rtol=0)
