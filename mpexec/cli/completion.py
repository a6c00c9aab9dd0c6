"""`mpexec completion`."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

SHELLS = ("bash", "zsh", "fish")
VARIABLE = "_MPEXEC_COMPLETE"  # click's name for it: what the script sets when it asks this command


@click.command(
    "completion",
    epilog="""\b
Examples:
  mpexec completion bash > ~/.local/share/bash-completion/completions/mpexec
  mpexec completion zsh > "${fpath[1]}/_mpexec"
  mpexec completion fish > ~/.config/fish/completions/mpexec.fish
  source <(mpexec completion bash)""",
)
@click.argument("shell", type=click.Choice(SHELLS))
def command(shell: str) -> None:
    """Print the script that completes commands and options of mpexec in a shell."""
    completion = get_completion_class(shell)
    assert completion is not None
    root = click.get_current_context().find_root().command
    click.echo(completion(root, {}, "mpexec", VARIABLE).source())
