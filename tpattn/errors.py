"""The errors of tpattn: every one derives from `TpattnError`, so one `except` catches what the library refuses or loses."""


class TpattnError(Exception):
    """Base of every error that tpattn raises on purpose."""


class Unsupported(TpattnError, ValueError):
    """A value or combination that tpattn refuses, the same on every rank and before anything is sent."""


class ContextClosed(TpattnError, RuntimeError):
    """A group of a `ParallelContext` was used after `close()`."""


class CollectiveMismatch(TpattnError, RuntimeError):
    """Ranks disagree about a collective: other sizes, other dtypes, another order."""


class PeerLost(TpattnError, RuntimeError):
    """A rank of the group ended, or its connection broke, while others waited for it."""


class CollectiveTimeout(TpattnError, RuntimeError):
    """A message did not arrive within the context's timeout."""
