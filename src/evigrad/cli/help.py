"""The texts of ``--help``, each on one screen. They do not need PyTorch, which loads slowly."""

OVERVIEW = """\
usage: evigrad COMMAND [options]

Learn a network's hyperparameters (weight decay for each layer, noise, ...) by gradient
ascent on the marginal likelihood, from the training data only and in one training run.

commands:
  train   Train a network, and learn its weight decay for each layer and its invariances
  doctor  Show how an estimator treats each parameter of a network, and what it costs

'evigrad COMMAND --help' shows the main options of a command, and --help-all shows all.

example:
  evigrad train --data mnist5k --subset 1000 --model mininet --compare-map"""

_GENERAL = """\
  --config FILE      YAML file of options. Options after it replace its values
  --print-config     Print all options as a YAML file and exit
  --help-all         Show all options with types, units and defaults, and exit"""

_PROBLEM = """\
what to train on:
  --data NAME        digits, mnist5k, autompg, or NAME_train.parquet and NAME_test.parquet in the
                     folder --data-dir, or a file that ends in .csv, .tsv or .parquet (digits)
  --target COLUMN    Column of such a file to predict
  --subset N         Number of training examples, drawn at random (all)

model and evidence:
  --model NAME       mlp, digitsnet, mininet, lenet, cnn, resnet18, resnet50, wrn16-4, wide_resnet,
                     transformer or gru (chosen by the shape of the inputs)
  --likelihood NAME  categorical, gaussian, student-t, poisson, ... (chosen by the targets)"""

# The help of each command, by its name.
COMMANDS = {
    "train": f"""\
usage: evigrad train [options]

Train a network and learn its hyperparameters on the training data only. Defaults are in
parentheses.

{_PROBLEM}
  --estimator NAME   Estimator of the log evidence, such as ntk-400-rows-anchored or kfac-400-1, or
                     none for training with a fixed weight decay. The default depends on the sizes
                     of the data and the network (auto)

training and results:
  --epochs N         Number of passes over the data (enough for 2,000 steps, and at least 100)
  --seed N           Seed of the subset, the initial weights and all random draws (0)
  --compare-map      First train with weight decay 5e-4 and the same schedule, and show both runs
  --run-dir DIR      Folder of the run (runs/DATA-MODEL-ESTIMATOR)
  --resume DIR       Resume the interrupted run in this folder
{_GENERAL}

The dataclasses of Python's evigrad.fit are groups of options, such as --schedule.every 5,
--optimization.lr 0.01 or --memory.micro-batch auto.

examples:
  evigrad train --data autompg
  evigrad train --data mnist5k --subset 1000 --model mininet --compare-map""",
    "doctor": f"""\
usage: evigrad doctor [options]

Show how an estimator treats each parameter of a network, and how long an estimate and its gradient
take compared with a plain training step. Nothing is trained, and nothing is written. Defaults are
in parentheses.

{_PROBLEM}
  --estimator NAME   Estimator of the log evidence, such as kfac-400-1 (auto)

general:
{_GENERAL}

example:
  evigrad doctor --data digits --model digitsnet --estimator kfac-100-1""",
}
