"""Experiments of many runs: the paper's figures and tables, and others like them.

An experiment is a YAML file (`definition`). Its kind (`kinds`) makes cases of it (`cases`), which
are read from the results of jobs (`jobs`). `runner` does the jobs that have none in the folder of
results (`store`), by `work`; `present` draws and writes what is known.
"""

from evigrad.experiments.definition import (
    Experiment,
    make_experiment,
    merged,
    paper_experiments,
    read_experiment,
)
from evigrad.experiments.jobs import Job
from evigrad.experiments.present import Shown, State, jobs_of, present, state_of
from evigrad.experiments.runner import Failure, missing, run
from evigrad.experiments.store import Store
from evigrad.experiments.work import Place

__all__ = [
    "Experiment",
    "Failure",
    "Job",
    "Place",
    "Shown",
    "State",
    "Store",
    "jobs_of",
    "make_experiment",
    "merged",
    "missing",
    "paper_experiments",
    "present",
    "read_experiment",
    "run",
    "state_of",
]
