"""`specdeft env`: versions and devices, for a bug report. Must always print something."""

import json

import click

from specdeft.cli.options import json_option


@click.command(short_help="Versions and devices, for bug reports.")
@json_option
def env(as_json: bool) -> None:
    """Versions and devices, for bug reports.

    \b
    specdeft env
    """
    from specdeft.evaluate.provenance import environment

    facts = environment()
    if as_json:
        click.echo(json.dumps(facts, indent=2))
        return
    for key, value in facts.items():
        click.echo(f"{key:16} {value}")
