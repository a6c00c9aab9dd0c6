"""`mpexec models`."""

from __future__ import annotations

import click

from mpexec.cli.report import print_json_line
from mpexec.models import BundledModel, bundled_models


@click.command("models")
@click.option("--json", "as_json", is_flag=True, help="Print one object a line: name, path, description, sizes.")
def command(as_json: bool) -> None:
    """List the language models that come with the package, the default one first."""
    models = bundled_models()
    if as_json:
        for model in models:
            print_json_line(_plain(model))
    else:
        _print_table(models)


def _plain(model: BundledModel) -> dict[str, object]:
    return {
        "name": model.name,
        "path": str(model.path),
        "description": model.description,
        "parameters": model.parameters,
        "bytes": model.bytes,
    }


def _print_table(models: tuple[BundledModel, ...]) -> None:
    from rich.console import Console
    from rich.table import Column, Table
    from rich.text import Text

    path = Column("path", overflow="fold")
    table = Table("name", "parameters", "size", "description", path, box=None, pad_edge=False)
    for model in models:
        millions, megabytes = f"{model.parameters / 1e6:.1f} M", f"{model.bytes / 1e6:.1f} MB"
        table.add_row(model.name, millions, megabytes, model.description, Text(str(model.path)))
    terminal = Console(highlight=False)
    terminal.print(table) if terminal.is_terminal else Console(highlight=False, width=10_000).print(table)
