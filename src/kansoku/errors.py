"""The exception tree.

::

    KansokuError
    ├── InputError          a file, row, flag or argument is wrong       exit 2
    ├── ConfigurationError  a cluster file, policy or setting is wrong   exit 2
    ├── PlatformError       the machine lacks something it needs         exit 3
    │   └── StoreError      the store cannot answer or keep rows         exit 3
    │       └── BusyError   its queue is full: send the same again later exit 3
    └── DependencyError     an optional package is missing or too old    exit 3

Messages say what is wrong, where (file, row, column, value), what was expected, and the remedy.
"""

from typing import ClassVar

__all__ = [
    "BusyError",
    "ConfigurationError",
    "DependencyError",
    "InputError",
    "KansokuError",
    "PlatformError",
    "StoreError",
]


class KansokuError(Exception):
    """Base of every error that kansoku raises on purpose."""

    exit_code: ClassVar[int] = 70

    def __init__(self, message: str, *, where: str | None = None, remedy: str | None = None):
        """Keep what happened, ``where`` (``file:row``, flag, host) and the ``remedy``."""
        super().__init__(message)
        self.message = message
        self.where = where
        self.remedy = remedy

    def __str__(self) -> str:
        text = f"{self.where}: {self.message}" if self.where else self.message
        return f"{text} ({self.remedy})" if self.remedy else text


class InputError(KansokuError):
    """A file, row, flag or argument given by the user is wrong."""

    exit_code = 2


class ConfigurationError(KansokuError):
    """A cluster file, policy or setting is wrong; we refuse to start."""

    exit_code = 2


class PlatformError(KansokuError):
    """The machine lacks something: a program, a right, a device, a kernel feature."""

    exit_code = 3


class StoreError(PlatformError):
    """The store cannot answer, or could not keep rows: nothing of them was acknowledged."""


class BusyError(StoreError):
    """The store's queue is full; the sender keeps the batch and sends the same again later."""


class DependencyError(KansokuError):
    """An optional package is missing or too old."""

    exit_code = 3

    @classmethod
    def missing(cls, feature: str, package: str, extra: str) -> "DependencyError":
        """Name the feature, the package and the extra that brings it."""
        return cls(
            f"{feature} needs the package {package}",
            remedy=f"pip install 'kansoku[{extra}]'",
        )
