"""One of two ranks is killed in the middle of a call. The caller is told which one, and nothing is left behind."""

import os
import signal

from mpexec import ModelAgent, WorkerDiedError, build_executor


class Fragile(ModelAgent):
    def step(self, n: int) -> int:
        if n == 3 and self.rank == 1:
            print("rank 1 has a bad feeling about step 3", flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        return n


if __name__ == "__main__":
    with build_executor(Fragile, world_size=2) as executor:
        try:
            for n in range(10):
                print(executor.collective_rpc("step", args=(n,)))
        except WorkerDiedError as error:
            print(f"{type(error).__name__}: {error}")
            print("rank:", error.rank, "signal:", error.signal_name, "method:", error.method)
