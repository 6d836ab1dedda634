"""The share log that traced functions can read: a variable holds how the batch last drawn counts."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from unidist.batch import Share, ShareLog


class TracedShareLog(ShareLog):
    """A ShareLog whose scale a graph reads when it runs, since a number would stay as it was when the graph was traced."""

    def __init__(self) -> None:
        super().__init__()
        self._variable: Any = None
        self._written = 1.0

    def draw(self, share: Share | None, scale: float | None = None, exchange: bool = True, begins: bool = True) -> None:
        super().draw(share, scale, exchange, begins)
        self._write(self._drawn[-1].scale)

    def take(self) -> Share | None:
        share = super().take()
        self._write(1.0)
        return share

    def clear(self) -> None:
        super().clear()
        self._write(1.0)

    def traced_scale(self) -> Any:
        """The scale as a 0-d float64 tensor, in a graph."""
        if self._variable is None:
            with tf.init_scope():
                self._variable = tf.Variable(self._written, trainable=False, dtype=tf.float64)
        return self._variable.read_value()

    def _write(self, scale: float) -> None:
        if scale != self._written:
            self._written = scale
            if self._variable is not None:
                self._variable.assign(scale)
