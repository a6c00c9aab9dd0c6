"""The engine in a process of its own, and the RPC over ZMQ that leads there."""
