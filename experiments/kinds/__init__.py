"""The kinds of experiments. The ``kind`` of a file names a class in lower case."""

from experiments.kinds.bounds import Bounds
from experiments.kinds.comparison import Comparison
from experiments.kinds.learning import Learning
from experiments.kinds.overview import Overview
from experiments.kinds.pareto import Pareto
from experiments.kinds.selection import Selection
from experiments.kinds.subsets import Subsets

__all__ = ["Bounds", "Comparison", "Learning", "Overview", "Pareto", "Selection", "Subsets"]
