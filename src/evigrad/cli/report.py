"""``evigrad report``: an HTML page of figures and tables for one or more runs."""

from jsonargparse import Namespace

from evigrad.cli.messages import show
from evigrad.cli.parser import Parser
from evigrad.errors import ConfigurationError
from evigrad.report import write_report

_DESCRIPTION = """\
Write one self-contained HTML page about a run: learning curves, learned hyperparameters (prior
precisions, noise, ranges of invariances), test images under the learned augmentation, metrics
and settings. The page is RUN/report.html, and its figures are also in RUN/figures. An unfinished
run is shown up to its last epoch. Several runs share a page, RUN/comparison/report.html in
the folder of the first run. --out sets another folder.

examples:
  evigrad report runs/digits-digitsnet-ntk-400-rows-anchored
  evigrad report runs/a runs/b --out pages/a-b
  evigrad report runs/a runs/b --data-dir DIR       if the runs' data have moved to DIR"""


def make_parser() -> Parser:
    """Return the parser for the options of ``evigrad report``."""
    parser = Parser(description=_DESCRIPTION, usage="evigrad report RUN [RUN ...] [options]")
    parser.add_argument_group("what to show").add_argument(
        "runs", type=str, nargs="*", metavar="RUN", default=[], help="Folders of runs."
    )
    parser.add_group("where", write_report, ("out",))
    parser.add_group("augmented images", write_report, ("data_dir", "examples"))
    return parser


def run(parser: Parser, options: Namespace) -> int:
    """Write the report, and return the exit code."""
    if not options.runs:
        raise ConfigurationError(
            "A report needs the folder of a run, got none. Use evigrad report RUN."
        )
    page = write_report(
        *options.runs, out=options.out, data_dir=options.data_dir, examples=options.examples
    )
    show("note", f"Report: {page}")
    return 0
