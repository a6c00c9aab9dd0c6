"""Numbers are spread over the ranks, which keep them; then the ranks are asked, all or some, in several ways."""

import numpy as np

from mpexec import BaseWorker, ModelAgent, build_executor


class Store(ModelAgent):
    def keep(self, part: np.ndarray) -> None:
        self.part = part  # large arrays arrive as read-only views of shared memory, valid for as long as they are kept

    def keep_times(self, factor: int) -> None:
        self.part = self.part * factor

    def total(self) -> int:
        return int(self.part.sum())

    def compare(self, whole: np.ndarray) -> bool:
        return bool(whole[self.rank * self.part.size] == self.part[0])


def span(worker: BaseWorker, name: str) -> str:
    """Sent to the ranks, where it gets the worker; the agent is behind it."""
    part = worker.agent.part
    return f"{name} of rank {worker.rank}: {part[0]} to {part[-1]}, read-only: {not part.flags.writeable}"


if __name__ == "__main__":
    numbers = np.arange(900_000)
    with build_executor(Store, world_size=3, init_process_group=False) as executor:  # without a group: without torch
        executor.collective_rpc("keep", args_per_rank=[(part,) for part in np.split(numbers, 3)])  # to each its own
        print("totals:", executor.collective_rpc("total"))
        print("of ranks 0 and 2:", executor.collective_rpc("total", ranks=[0, 2]))
        print("all run it, rank 1 replies:", executor.collective_rpc("total", reply_ranks=1))

        for line in executor.collective_rpc(span, args=("numbers",)):
            print(line)
        print("begins:", executor.collective_rpc(lambda worker: int(worker.agent.part[0])))

        # One copy of the array in shared memory is what all ranks read.
        print("as in the whole array:", executor.collective_rpc("compare", args=(numbers,)))

        futures = [executor.submit_rpc("total", ranks=[rank]) for rank in range(3)]  # all three are on their way
        print("by futures:", [future.result() for future in futures])

        executor.notify("keep_times", args=(10,))  # returns at once; calls keep their order
        print("ten times as much:", executor.collective_rpc("total"))
