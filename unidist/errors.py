"""Every exception of unidist; each also derives from the built-in that a caller would expect."""

from typing import TYPE_CHECKING


class UnidistError(Exception):
    """Base of all errors that unidist raises itself."""

    if not TYPE_CHECKING:
        # TensorFlow's autograph keeps the type of an error that was raised while tracing only where it knows this constructor.
        __init__ = Exception.__init__


class UnknownBackendError(UnidistError, ValueError):
    """A backend or framework name that nobody registered."""


class MissingDependencyError(UnidistError, ImportError):
    """A package that the choice needs is absent; the message holds the line that installs it."""


class FrameworkMismatchError(UnidistError, TypeError):
    """An object or a verb of one framework met a backend of the other."""


class UnsupportedError(UnidistError, NotImplementedError):
    """The backend can't do what was asked; the message says what can."""


class NotInitializedError(UnidistError, RuntimeError):
    """A call that needs `unidist.init` came before it or after `unidist.shutdown`."""


class LaunchError(UnidistError, RuntimeError):
    """The job could not be started: variables, ports, devices, or a worker that failed."""


class MismatchError(UnidistError, ValueError):
    """The ranks disagree about something that has to be equal on all of them."""


class CollectiveTimeoutError(UnidistError, TimeoutError):
    """Not every rank came to an operation in time; the message names those that are missing."""


class PeerFailedError(UnidistError, RuntimeError):
    """Another rank failed while this one waited for it; the message holds the other's error."""
