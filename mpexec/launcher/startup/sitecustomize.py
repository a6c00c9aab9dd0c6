"""Python imports this in a rank before the script, by its name. It registers `end_quickly`, and takes itself out again.

The interpreter itself then runs the script, as always: tracebacks, signals, exit codes and `__main__` are its own.
Nothing of mpexec is imported, and any version of Python may come here.
"""

import os
import sys


def end_quickly(streams: "frozenset[int]") -> None:
    """Spare Python its last garbage collections, in which torch's objects take half a second.

    Called after all other functions of `atexit`. Changes something only where somebody waits and nobody can tell:
    others may wait for this rank's end, and no object but the standard `streams` (by id) has a `__del__` to call.
    """
    if others_may_wait() and not finalizers_left(streams):
        import gc

        gc.freeze()


def others_may_wait() -> bool:
    """True after an exception that nobody caught, or if this rank has not left its process group.

    Nothing tells of `sys.exit(3)`: Python has forgotten the SystemExit by now.
    """
    is_initialized = getattr(sys.modules.get("torch.distributed"), "is_initialized", None)
    return hasattr(sys, "last_type") or (is_initialized is not None and is_initialized())


def finalizers_left(streams: "frozenset[int]") -> bool:
    """True if an object other than `streams` has a `__del__`, as open files have, which write what they hold.

    A training loop that raised stands in torch's samplers. They are generators that clean nothing up, and do not count.
    """
    import gc
    from itertools import compress

    objects = gc.get_objects()  # 170 000 with torch: what follows loops in C
    try:
        kinds = set(map(type, objects))
    except Exception:  # the hash of a class is its metaclass's to compute, or to refuse
        return True
    finalized = {kind for kind in kinds if any("__del__" in vars(base) for base in kind.__mro__)}
    found = compress(objects, map(finalized.__contains__, map(type, objects)))
    return not all(id(one) in streams or is_generator_of_torch(one) for one in found)


def is_generator_of_torch(one: object) -> bool:
    """True if its code is in torch's folder."""
    from types import GeneratorType

    file = getattr(sys.modules.get("torch"), "__file__", None)
    if not isinstance(file, str) or type(one) is not GeneratorType:
        return False
    return one.gi_code.co_filename.startswith(os.path.join(os.path.dirname(file), ""))


def standard_streams() -> "frozenset[int]":
    """The ids of stdin, stdout, stderr, and of the layers beneath them."""
    found = set()
    for stream in (sys.stdin, sys.stdout, sys.stderr):
        layer = stream
        while layer is not None:  # from the text to the raw file; None from the start if there is no such descriptor
            found.add(id(layer))
            layer = getattr(layer, "buffer", None) or getattr(layer, "raw", None)
    return frozenset(found)


def leave_no_trace(folder: str) -> None:
    """Undo what made Python look into `folder`, so that neither the script nor its children see it."""
    rest = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry != folder]
    os.environ.pop("PYTHONPATH", None)
    if rest:
        os.environ["PYTHONPATH"] = os.pathsep.join(rest)
    sys.path[:] = [entry for entry in sys.path if entry != folder]
    sys.path_importer_cache.pop(folder, None)
    del sys.modules[__name__]


if __name__ == "sitecustomize":
    loaded = set(sys.modules)
    import atexit

    # the first that is registered is the last that is called
    atexit.register(end_quickly, standard_streams())
    if "atexit" not in loaded:
        del sys.modules["atexit"]
    leave_no_trace(os.path.dirname(__file__))
    __import__(__name__)  # the user's own, if there is one; if not, the error is the one that Python expects
