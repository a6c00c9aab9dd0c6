"""What an engine has counted and measured, as values that can be compared, pickled and added up."""

from __future__ import annotations

from dataclasses import dataclass, field

from mpexec.executor.measures import Measures
from mpexec.histogram import Histogram


@dataclass(frozen=True, slots=True)
class Metrics:
    """Counts and durations since the engine was made, and its present load.

    Attributes:
        requests: Requests taken, refused ones included.
        finished: Requests ended by "stop" or "length".
        cancelled: Requests given up by the caller.
        refused: Requests for which there was no room, or that cannot run.
        prompt_tokens: Tokens of all prompts.
        generated_tokens: New tokens handed out.
        steps: Steps of the model.
        running: Requests that have a slot now.
        waiting: Requests that wait for a slot now.
        tokens_per_second: New tokens per second since the first token in the last ten seconds, and over a second at
            least.
        interrupted: Requests that had not ended when an operation (`sleep_async`, `update_params_async`) had waited
            for them as long as it was to, or when the engine was stopped or failed.
        queue_wait: From the arrival of a request to the step that takes in the beginning of its prompt.
        time_to_first_token: From its arrival to its first token.
        inter_token: Between two tokens of a request.
        end_to_end: From its arrival to its last token; of finished requests.
        step: Steps as the driver sees them, one after the other: the way to the ranks and back included.
        executor: What driver and ranks have measured, among it how long each method took on each rank.
    """

    requests: int = 0
    finished: int = 0
    cancelled: int = 0
    refused: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    steps: int = 0
    running: int = 0
    waiting: int = 0
    tokens_per_second: float = 0.0
    interrupted: int = 0
    queue_wait: Histogram = field(default_factory=Histogram)
    time_to_first_token: Histogram = field(default_factory=Histogram)
    inter_token: Histogram = field(default_factory=Histogram)
    end_to_end: Histogram = field(default_factory=Histogram)
    step: Histogram = field(default_factory=Histogram)
    executor: Measures = field(default_factory=Measures)
