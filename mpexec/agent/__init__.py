"""One rank's share of a model: what users subclass, and the causal language model that mpexec brings."""

from mpexec.agent.base import ModelAgent

__all__ = ["ModelAgent"]
