"""The engine in a process of its own, and the RPC over ZMQ that leads there."""

try:
    import msgspec  # noqa: F401 - asked for here, to say what to install
    import zmq  # noqa: F401
except ModuleNotFoundError as missing:
    raise ModuleNotFoundError(
        f"ZMQEngine and EngineClient need {missing.name}: pip install 'mpexec[zmq]'", name=missing.name
    ) from missing
