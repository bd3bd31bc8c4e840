"""Errors of runs on real machines."""

from __future__ import annotations

from trilane.common.errors import TrilaneError


class RefusedError(TrilaneError):
    """A run that cannot be made on this machine, found before it begins: not supported, or too large for memory."""


class LaneError(RuntimeError):
    """Work on a lane has failed, which ends the run."""

    @staticmethod
    def of(lane: str, error: BaseException) -> LaneError:
        """The error for all that waits for ``lane``: the first cause, without repetition if it stops other lanes."""
        if isinstance(error, LaneError):
            return type(error)(str(error))
        if isinstance(error, TrilaneError):
            return LaneInputError(f"{lane} has stopped: {error}")
        return LaneError(f"{lane} has stopped: {error!r}; run on a new machine")


class LaneInputError(LaneError, TrilaneError):
    """Work on a lane has failed for a reason that the user can change, such as the use of GPU memory."""
