"""What an experiment is made of: jobs, each known by the hash of all that its result depends on."""

import hashlib
import json
from dataclasses import dataclass
from functools import cached_property
from typing import Any

# Results of another format are not taken up.
FORMAT = 1
_DIGITS = 16


@dataclass(frozen=True, eq=False)
class Job:
    """A piece of work with a result that is kept.

    Attributes:
        kind: Which work, a name of ``evigrad.experiments.work.KINDS``.
        config: All that the result depends on, resolved: plain numbers, texts, lists of them.
        needs: The job whose result this one starts from.
        label: Words for people; not part of the identity.
    """

    kind: str
    config: dict[str, Any]
    needs: "Job | None" = None
    label: str = ""

    @cached_property
    def id(self) -> str:
        """A hash: the same for the same work, another for any other."""
        parent = None if self.needs is None else self.needs.id
        text = json.dumps([FORMAT, self.kind, self.config, parent], sort_keys=True)
        return hashlib.sha256(text.encode("utf-8")).hexdigest()[:_DIGITS]

    def chain(self) -> "list[Job]":
        """This job behind all that it needs."""
        return [*([] if self.needs is None else self.needs.chain()), self]


def distinct(jobs: list[Job]) -> list[Job]:
    """All jobs with what they need, each once, in an order in which they can be done.

    Args:
        jobs: Wanted.

    Returns:
        The jobs.
    """
    return list({each.id: each for job in jobs for each in job.chain()}.values())
