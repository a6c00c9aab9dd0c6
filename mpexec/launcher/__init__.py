"""N copies of a script, torchrun's way: the first one that fails ends all, and the launcher's end ends them too."""

from mpexec.launcher.job import Job, Std
from mpexec.launcher.launch import launch_job

__all__ = ["Job", "Std", "launch_job"]
