"""One rank: the worker that holds the agent, the loop that answers calls, and the side thread that always answers."""
