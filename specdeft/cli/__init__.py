"""The command line: one file per command, each with its heavy imports inside, so that --help is instant.

stdout carries the result, stderr the story. What a user did wrong is one line and exit code 2.
"""

import click

from specdeft import __version__
from specdeft.cli.acceptance import evaluate
from specdeft.cli.demo import demo
from specdeft.cli.distill import distill
from specdeft.cli.env import env
from specdeft.cli.generate import generate
from specdeft.cli.group import FriendlyGroup
from specdeft.cli.heads import heads
from specdeft.cli.train import train
from specdeft.cli.trees import trees
from specdeft.cli.tune import tune


@click.group(cls=FriendlyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="specdeft")
@click.option("--traceback", is_flag=True, help="Show where an error came from, for bug reports.")
def main(traceback: bool) -> None:
    """Several tokens per forward pass from a causal language model, without changing what it says.

    \b
    specdeft demo
    specdeft generate "Why is the sky blue?" --max-new-tokens 128
    """


for command in (demo, generate, evaluate, trees, heads, distill, train, tune, env):
    main.add_command(command)
