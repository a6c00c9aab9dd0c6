"""Python imports this in a rank before the script, by its name. It registers `end_quickly`, and takes itself out again.

The interpreter itself then runs the script, as always: tracebacks, signals, exit codes and `__main__` are its own.
Nothing of mpexec is imported, and any version of Python may come here.
"""

import atexit
import os
import sys


def end_quickly(streams: "frozenset[int]") -> None:
    """Spare Python its last garbage collections, in which torch's objects take half a second.

    Only if nobody can tell: no object is left, but for the standard `streams` (by id), that has a `__del__` to call.
    What no reference cycle holds is finalized in any case.
    """
    import gc

    objects = gc.get_objects()
    # by identity: a metaclass may have an __eq__ of its own
    kinds = {id(kind): kind for kind in map(type, objects)}
    finalized = {key for key, kind in kinds.items() if any("__del__" in vars(base) for base in kind.__mro__)}
    if all(id(one) in streams for one in objects if id(type(one)) in finalized):
        gc.freeze()


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
    del sys.modules["atexit"], sys.modules[__name__]


# the first that is registered is the last that is called
atexit.register(end_quickly, standard_streams())
leave_no_trace(os.path.dirname(__file__))
__import__(__name__)  # the user's own, if there is one; the error if there is none is the one that Python expects
