"""Everything ProTrain raises on purpose.

::

    ProTrainError
     +-- ConfigError      (also a ValueError) a YAML key, or two that exclude each other
     +-- BudgetError      no plan fits the memory of this machine
     +-- DeviceMemoryError  the device ran out of memory and the step cannot be repeated
     +-- LayoutError      no repeated blocks were recognised in the model
     +-- TraceError       the model could not be run without weights
     +-- CheckpointError  a checkpoint could not be written or read back
     +-- DiskError        files of frozen weights cannot be written or read
     +-- AccessError      weights or gradients were touched where they are not
     +-- RequestError     the training service cannot answer a request

Each message names what is at fault and the way out. A broken invariant of
ProTrain itself is not in this tree: nobody should handle it.
"""

import textwrap


def printable(text: str) -> str:
    """Without what steers a terminal: the keys and values of a YAML may be anyone's."""
    return "".join(
        char if char.isprintable() or char in "\n\xa0" else repr(char)[1:-1]
        for char in text
    )


def first_complaint(error: Exception) -> str:
    """Return a line with the first complaint of an error; of pydantic's with its key."""
    message, key = str(error), ""
    if list_errors := getattr(error, "errors", None):
        first = list_errors()[0]
        message = str(first["msg"]).removeprefix("Value error, ").splitlines()[0]
        key = ".".join(map(str, first["loc"]))
    line = textwrap.shorten(message, 300) or type(error).__name__
    return f"{key}: {line}" if key and key not in line else line


class ProTrainError(Exception):
    """Base of the tree: what a caller catches to tell ProTrain's refusals apart."""

    def __str__(self) -> str:
        return printable(super().__str__())


class ConfigError(ProTrainError, ValueError):
    """The YAML asks for something impossible.

    A ValueError too, because pydantic reports only those to the person: any other
    exception leaves a validator as a bare traceback.
    """


class BudgetError(ProTrainError):
    """The model does not fit, with any plan, in the memory that may be used.

    Attributes:
        needs: Bytes that the plan which lacks least takes, of the device if `of_device`,
            else of the host; `has` may be used.
        or_host: Bytes of the host with which another plan would fit the device, 0 for
            none.
    """

    of_device = True
    needs = has = or_host = 0


class DeviceMemoryError(ProTrainError):
    """The device ran out of memory, and no smaller plan could finish the step."""


class LayoutError(ProTrainError):
    """The model has no blocks that ProTrain recognises, so nothing can be paged."""


class TraceError(ProTrainError):
    """The model cannot be run without weights."""


class CheckpointError(ProTrainError):
    """A checkpoint is incomplete, does not match the model, or cannot be written."""


class DiskError(ProTrainError):
    """Files of frozen weights cannot be written, or are not what was written."""


class AccessError(ProTrainError):
    """Somebody read or wrote weights or gradients where they are not."""


class RequestError(ProTrainError):
    """A request to the training service asks for what cannot be; nothing has changed.

    Attributes:
        status: Of HTTP, 4xx.
    """

    def __init__(self, message: str, status: int = 422) -> None:
        super().__init__(message)
        self.status = status


FOREIGN_ERRORS = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    RuntimeError,
    TypeError,
    ValueError,
)
"""Errors that a model's own code raises where it was not made for a batch or its own sizes."""
