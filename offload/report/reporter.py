"""Reporter: hands the reports of finished steps to whoever logs them."""

import threading
from collections.abc import Callable

from offload.errors import warn_user
from offload.report import StepReport

Callback = Callable[[StepReport], object]


class _Log:
    """One callback, and the reports it has not been given yet."""

    def __init__(self, steps: int, callback: Callback) -> None:
        self._steps = steps
        self._callback = callback
        self._waiting: list[StepReport] = []
        self._lock = threading.Lock()
        self._calling = False
        self.failed = False

    def keep(self, report: StepReport) -> None:
        self._waiting.append(report)

    def flush(self, *, at_least: int | None = None) -> None:
        """Hand out what waits, if that is enough. What a callback's own steps add to it waits for
        the next time.
        """
        with self._lock:
            if self._calling or len(self._waiting) < (at_least or self._steps):
                return
            reports, self._waiting = self._waiting, []
            self._calling = True
        try:
            self._callback(StepReport.summed(reports))
        except Exception as e:  # whatever it is: a log is not worth a training
            self.failed = True
            warn_user(
                f"the callback of log_every raised {type(e).__name__}: {e}; it is not called again"
            )
        finally:
            self._calling = False


class Reporter:
    """The callbacks of one session. Never called under the tiers' lock, as they may be slow."""

    def __init__(self) -> None:
        self._logs: list[_Log] = []
        self.is_open = True

    def add(self, steps: int, callback: Callback) -> None:
        """See ``Session.log_every``."""
        if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
            raise ValueError(f"steps is {steps!r}; give a number of steps of at least 1")
        if not callable(callback):
            raise TypeError(f"callback is {callback!r}; give a function that takes a StepReport")
        self._logs.append(_Log(steps, callback))

    def report(self, finished: StepReport | None) -> None:
        """A step has finished: call whose turn it is."""
        if finished is not None and self._logs:
            self.keep(finished)
            for log in tuple(self._logs):
                log.flush()
            self._forget_failed()

    def keep(self, finished: StepReport | None) -> None:
        """A step has finished, of which callbacks are told later."""
        if finished is not None:
            for log in self._logs:
                log.keep(finished)

    def close(self, last: StepReport) -> None:
        """Hand out the last step, if there was one, and what is left."""
        self.is_open = False
        self.report(last if last.steps else None)
        for log in self._logs:
            log.flush(at_least=1)
        self._forget_failed()

    def _forget_failed(self) -> None:
        self._logs = [log for log in self._logs if not log.failed]
