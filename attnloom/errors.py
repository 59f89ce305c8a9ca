"""Every exception attnloom raises for a user's mistake, in one place.

A message says what is wrong (in the user's names and values), why, and what to do.
Each class also derives from the built-in exception that code written for torch expects.
"""


class AttnloomError(Exception):
    """Base class of every error that attnloom raises on purpose."""


class TraceError(AttnloomError, TypeError):
    """A score_mod or mask_mod does something that cannot be placed inside a kernel."""


class ModError(AttnloomError, ValueError):
    """A mod factory or combinator was given values that make no mod."""


class ShapeError(AttnloomError, ValueError):
    """Sizes of tensors, masks or blocks do not fit together."""


class DtypeError(AttnloomError, ValueError):
    """A tensor has a dtype that attention cannot use there."""


class DeviceError(AttnloomError, RuntimeError):
    """Tensors or masks that must share a device do not."""


class OptionError(AttnloomError, ValueError):
    """An argument or a kernel option has a value that means nothing."""


class UnsupportedError(AttnloomError, NotImplementedError):
    """An explicitly chosen backend or path cannot run this problem."""


class CompileError(AttnloomError, RuntimeError):
    """The system compiler refused or could not be run."""


class CacheError(AttnloomError, RuntimeError):
    """The on-disk kernel cache cannot be trusted or used."""


class OutOfPagesError(AttnloomError, RuntimeError):
    """A paged cache has no room for what should be written; nothing was written."""


class ModelError(AttnloomError, ValueError):
    """A model's folder lacks something, or holds something that cannot be served."""


class RequestError(AttnloomError, ValueError):
    """A request for text asks for something that means nothing or does not fit."""


class NotFiniteError(AttnloomError, ArithmeticError):
    """A model's logits are NaN or infinite, which ends the request that they belong to."""


class CopyError(AttnloomError, TypeError):
    """Something was to be copied or pickled that there can be one of alone."""


class OverloadedError(AttnloomError, RuntimeError):
    """More requests are waiting than may; nothing was queued."""


class OverlapError(AttnloomError, RuntimeError):
    """An engine was to take a step while it takes another."""


class CaptureError(AttnloomError, RuntimeError):
    """A step of a model cannot become a CUDA graph; it can still run eagerly."""


_PLURALS = {"axis": "axes", "index": "indices"}


def counted(count: int, noun: str, verb: str = "") -> str:
    """A number and what it counts, as messages say it: "1 key", "2 keys", "0 batch entries".

    verb: "are", which is "is" for one.
    """
    if count == 1:
        return f"1 {noun} is" if verb else f"1 {noun}"
    regular = f"{noun[:-1]}ies" if noun.endswith("ry") else f"{noun}s"
    return f"{count} {_PLURALS.get(noun, regular)} {verb}".rstrip()


def any_of(counts: tuple[int, ...], noun: str) -> str:
    """Allowed numbers of something: "1 dimension", "2, 3 or 4 dimensions"."""
    *first, last = counts
    before = f"{', '.join(map(str, first))} or " if first else ""
    return before + counted(last, noun)
