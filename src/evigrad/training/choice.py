"""What estimator ``auto`` chose, from which candidates, and why."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

# The name that asks for a choice, and the file of a run's folder that says what was chosen.
AUTO = "auto"
CHOICE_FILE = "estimator.json"


@dataclass(frozen=True)
class Trial:
    """An estimator that was measured.

    Attributes:
        name: Of the estimator.
        share: The part of its rows that are anchors; None where it has none.
        root: Its root, where it is not the estimator's own.
        is_bound: Whether the expectation of its log evidence is a lower bound on the exact one.
        fits: Whether a step keeps to the budget, and the memory suffices.
        seconds: Of a hyperparameter step; None where it could not be measured.
        mean: Mean of its estimates of the log-determinant, in nats; None where none were made.
        deviation: Standard deviation of one of them; None for fewer than two.
        draws: Their number.
        note: Why there is no more to say of it; mostly empty.
    """

    name: str
    share: float | None
    root: str | None
    is_bound: bool
    fits: bool
    seconds: float | None
    mean: float | None = None
    deviation: float | None = None
    draws: int = 0
    note: str = ""

    @property
    def label(self) -> str:
        """The name, with what else tells it from others."""
        share = "" if self.share is None else f"{100 * self.share:.3g} % anchors"
        root = "" if self.root is None else f"root {self.root}"
        beside = ", ".join(filter(None, (share, root)))
        return f"{self.name} ({beside})" if beside else self.name


@dataclass(frozen=True)
class Choice:
    """What was chosen for the hyperparameter steps of a run, and why.

    It depends on measured times: the same settings may choose otherwise the next time. A run with
    ``name``, ``share`` (as ``anchor_share``) and ``root`` as its settings is the same run.

    Attributes:
        name: Of the estimator.
        share: The part of its rows that are anchors; None where it has none.
        root: Its root, where it is not the estimator's own.
        seconds: Of a hyperparameter step.
        step_seconds: Of a step of the weights, the yardstick.
        step_budget: Time that a hyperparameter step may take, as a multiple of the yardstick.
        lower: A lower bound on the exact log-determinant, in nats, at the time of the choice, as
            some of the rows prove it; None where no rows were seen that do.
        search_seconds: What the search took.
        trials: All that were compared, the chosen one among them.
        reason: In one sentence.
    """

    name: str
    share: float | None
    root: str | None
    seconds: float
    step_seconds: float
    step_budget: float
    lower: float | None
    search_seconds: float
    trials: tuple[Trial, ...]
    reason: str

    @property
    def ratio(self) -> float:
        """Time of a hyperparameter step as a multiple of a step of the weights."""
        return self.seconds / self.step_seconds

    def describe(self) -> str:
        """What was chosen and why, in words."""
        also = "" if self.share is None else f" --anchor-share {self.share:g}"
        also += "" if self.root is None else f" --root {self.root}"
        return (
            f"auto: {self.reason} The search took {self.search_seconds:.3g} s; --estimator"
            f" {self.name}{also} is this run without it."
        )

    def as_record(self) -> dict[str, Any]:
        """Plain numbers, strings, lists and dictionaries, for files."""
        return asdict(self) | {"trials": [asdict(trial) for trial in self.trials]}

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> "Choice":
        """The choice of a file.

        Args:
            record: By ``as_record``.

        Returns:
            The same choice.
        """
        return cls(**{**record, "trials": tuple(Trial(**trial) for trial in record["trials"])})
