"""Time gradients with respect to the inputs of a convolution with few channels, on a CPU.

``ratio`` is the time of oneDNN, which PyTorch uses by default, divided by the time of PyTorch's own
algorithm, which evigrad uses for at most four input channels. Both run in turns in one process.

    python benchmarks/input_gradients.py --threads 1 --csv docs/results/input_gradients.csv
"""

import argparse
from pathlib import Path

import torch
from measure import machine, paired, write_csv

from evigrad.network.convolutions import Geometry

# Number of images, input channels, output channels, side of the image and of the kernel, padding.
CASES = [
    (1280, 1, 8, 28, 5, 0),
    (80, 1, 8, 28, 5, 0),
    (320, 1, 32, 28, 3, 1),
    (320, 2, 16, 32, 5, 0),
    (320, 3, 16, 32, 3, 1),
    (320, 3, 64, 32, 7, 3),
    (320, 4, 32, 16, 5, 0),
]


def main() -> None:
    """Print and write the times of all cases."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--csv", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    rows = []
    for images, channels, outputs, side, kernel, pad in CASES:
        geometry = Geometry((kernel, kernel), (1, 1), (pad, pad), (1, 1), 1)
        weight = torch.randn(outputs, channels, kernel, kernel)
        shape = (images, channels, side, side)
        x = torch.randn(shape)
        gradient = torch.randn_like(geometry.convolve(x, weight))
        times = paired(
            {
                "oneDNN": lambda g=geometry, of_x=x, w=weight, dy=gradient: g._backward(
                    dy, of_x, w, (True, False, False)
                ),
                "evigrad": lambda g=geometry, size=shape, w=weight, dy=gradient: g.input_gradient(
                    size, w, dy
                ),
            },
            arguments.repeats,
        )
        rows.append(
            {
                "images": images,
                "channels": channels,
                "outputs": outputs,
                "side": side,
                "kernel": kernel,
                "onednn_seconds": f"{times['oneDNN']:.4f}",
                "evigrad_seconds": f"{times['evigrad']:.4f}",
                "ratio": f"{times['oneDNN'] / times['evigrad']:.2f}",
                "machine": machine(),
            }
        )
        print({key: value for key, value in rows[-1].items() if key != "machine"}, flush=True)
    if arguments.csv:
        write_csv(arguments.csv, rows)


if __name__ == "__main__":
    main()
