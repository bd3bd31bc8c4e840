"""What can go wrong on a real machine, before a run and during one."""

from __future__ import annotations


class RealRunError(RuntimeError):
    """Something that the executor cannot do; the message says what was expected, what came, and what to do."""


class RefusedError(RealRunError):
    """Refused before the run: it does not fit, or is not supported."""


class LaneError(RealRunError):
    """Work has failed during a run, which has been stopped."""

    @classmethod
    def of(cls, lane: str, error: BaseException) -> LaneError:
        """What everybody who waits for ``lane`` is told: the first cause, once, however many lanes it has stopped."""
        told = str(error) if isinstance(error, LaneError) else f"{lane} has stopped: {error!r}; run on a new machine"
        return cls(told)
