"""The engine of one model in this process: a thread of its own runs the loop.

Knows the loop and its inbox. Must not know Triton, text, or what a step does.
"""

from __future__ import annotations

import dataclasses
import logging
import threading
import time
from collections.abc import Sequence

from minisgl_backend.errors import EngineFailure, EngineLost, shutting_down
from minisgl_backend.grammar.matchers import Grammars
from minisgl_backend.request import Failed, Finished, FinishReason, RequestId
from minisgl_backend.runtime.adapters import Adapters
from minisgl_backend.runtime.engine_base import EngineBase, EngineInfo, Health
from minisgl_backend.runtime.loop import Abort, Fail, Loop, Stop
from minisgl_backend.runtime.open_requests import OpenRequest
from minisgl_backend.runtime.ports import Executor, Scheduler
from minisgl_backend.runtime.recorder import EngineStats, Observations
from minisgl_backend.runtime_files import State

logger = logging.getLogger(__name__)


class Engine(EngineBase):
    """Submits requests to a loop, which it runs on a thread of its own."""

    def __init__(
        self,
        info: EngineInfo,
        scheduler: Scheduler,
        executor: Executor,
        *,
        overlap: bool,
        grammars: Grammars | None = None,
        adapters: Adapters | None = None,
    ) -> None:
        """``grammars`` is None if requests may bring none, ``adapters`` if they may name none."""
        super().__init__(info, adapters)
        self.pool = adapters
        """The adapters in main memory."""
        self._loop = Loop(
            scheduler,
            executor,
            overlap=overlap,
            recorder=self._recorder,
            on_admitted=self._forget_waiting,
            on_ended=self._forget,
            max_queue_time_s=info.max_queue_time_s,
            grammars=grammars,
            adapters=adapters,
        )
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    def _enter(self, entries: Sequence[OpenRequest]) -> None:
        for entry in entries:
            # with the lock held: ``_run`` takes it, too, before it refuses what is in the inbox
            self._loop.inbox.put(entry)

    def abort(
        self, request_id: RequestId, why: FinishReason | EngineFailure = FinishReason.CANCELLED
    ) -> None:
        event = Finished(why) if isinstance(why, FinishReason) else Failed(why)
        self._loop.inbox.put(Abort(request_id, event))

    def fail(self, error: EngineFailure) -> None:
        """End the engine because its executor is lost. ``error``, the cause, is only logged: every
        open request fails with an ``EngineFailure`` that says that the engine stopped.
        """
        self._loop.inbox.put(Fail(error))

    def stats(self) -> EngineStats:
        scheduler = self._loop.scheduler_stats
        stats = self._recorder.snapshot(scheduler, self._num_open)
        if self.pool is None:
            return stats
        asked_for, running = self.pool.asked_for(), scheduler.running_adapters
        return dataclasses.replace(
            stats,
            running_adapters=tuple(asked_for[one] for one in running if one in asked_for),
            waiting_adapters=tuple(n for one, n in asked_for.items() if one not in running),
        )

    def take_observations(self) -> Observations:
        return self._recorder.take_observations()

    def health(self) -> Health:
        pulse = self._loop.pulse
        age_s = 0.0 if pulse.is_waiting else max(0.0, time.monotonic() - pulse.tick_s)
        return Health(self._state, age_s)

    def close(self, *, drain_s: float, patience_s: float | None = None) -> bool:
        self._drain(drain_s)
        self._loop.inbox.put(Stop(shutting_down()))
        self._thread.join(patience_s)
        return not self._thread.is_alive()

    # --- the engine's thread -----------------------------------------------------------------

    def _run(self) -> None:
        state = State.BROKEN
        try:
            self._loop.run()
            state = State.ENDING
        except BaseException:
            logger.exception("the engine's loop broke")
        finally:
            with self._changed:
                self._state = state
                self._loop.refuse_rest(EngineLost("the engine is down"))
                self._changed.notify_all()
            self._loop.close()
