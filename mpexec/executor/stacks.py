"""What ranks are doing right now: their Python stacks, taken from outside, also while a rank holds the interpreter."""

from __future__ import annotations

import select
import time
from collections.abc import Iterable

from mpexec.executor.group import RankGroup
from mpexec.executor.link import Link

_PATIENCE_S = 0.25
_STEP_MS = 5


def collect_stacks(group: RankGroup, link: Link, ranks: Iterable[int]) -> dict[int, str]:
    """The stacks of ranks, as text; where a rank cannot show one, the reason. Takes a quarter of a second at most.

    `faulthandler` in the rank writes them from a signal handler in C into a memory file. A memory file cannot be waited
    for, so its length is looked at until it has stood still for two looks; a rank that ends meanwhile ends the look.
    """
    lengths: dict[int, int] = {}
    reasons: dict[int, str] = {}
    for rank in ranks:
        process, signum = group.processes[rank], group.ready[rank].stack_signal
        state = process.state()
        if state != "running" or not signum:
            reasons[rank] = f"<no stack: the process is {state}>"
            continue
        lengths[rank] = link.ranks[rank].stack_bytes()
        process.send_signal(signum, group=False)
    _await_still(group, link, lengths)
    texts = {rank: link.ranks[rank].read_stacks(start).strip() for rank, start in lengths.items()}
    for rank, text in texts.items():
        if not text:
            reasons[rank] = f"<no stack: the process is {group.processes[rank].state()} and did not react>"
    return {rank: reasons.get(rank) or texts[rank] for rank in sorted(lengths.keys() | reasons.keys())}


def _await_still(group: RankGroup, link: Link, starts: dict[int, int]) -> None:
    end = time.monotonic() + _PATIENCE_S
    poll = select.poll()
    for rank in starts:
        if not group.processes[rank].pidfd.closed:
            poll.register(group.processes[rank].pidfd.fd, select.POLLIN)
    still, last = 0, dict(starts)
    while starts and still < 2 and time.monotonic() < end:
        poll.poll(_STEP_MS)
        now = {rank: link.ranks[rank].stack_bytes() for rank in starts}
        written = all(now[rank] > starts[rank] for rank in starts)
        still = still + 1 if written and now == last else 0
        last = now
