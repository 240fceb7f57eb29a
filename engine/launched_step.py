"""A step that the device has been given."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from engine.pooling import PendingVectors
from engine.prompt_logprobs import PendingScores
from engine.sampler import PendingDraw
from engine.step import StepResult


class LaunchedStep:
    """A forward pass on its way, and the draw that follows it.

    Args:
        launch_draw: launches the draw; None where no row draws.
        scores: None where no row has a scoring.
        vectors: None where no row has a pooling.
    """

    def __init__(
        self,
        launch_draw: Callable[[], PendingDraw] | None,
        scores: PendingScores | None = None,
        vectors: PendingVectors | None = None,
    ) -> None:
        self._launch_draw = launch_draw
        self._drawing: PendingDraw | None = None
        self._scores = scores
        self._vectors = vectors

    def draw(self) -> None:
        """Launches the draw, unless it has been.

        A draw from what a grammar allows must wait until the step before has been read: what may come next
        follows from what came. The forward pass need not, so the host finds it out while the device computes.
        """
        if self._launch_draw is not None and self._drawing is None:
            self._drawing = self._launch_draw()

    def result(self) -> StepResult:
        """What each row drew, once the device has: the only call that waits for it."""
        self.draw()
        result = StepResult() if self._drawing is None else self._drawing.result()
        if self._scores is not None:
            result = replace(result, prompt_logprobs=self._scores.result())
        return result if self._vectors is None else replace(result, vectors=self._vectors.result())
