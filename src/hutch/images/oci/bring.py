"""An image, from wherever it is, onto this machine: its layers three at a time, then its name."""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor, as_completed

from hutch.images.stopping import WorkStopped

from . import kept, layers
from .kept import StoredImage
from .layers import LayerSource
from .manifest import ImageLayer
from .progress import LayerProgress, Report
from .reference import Reference

AT_ONCE = 3


def bring(source: LayerSource, name: Reference, report: Report) -> StoredImage:
    """Have an image under a name. However that ends, there is all of it or nothing.

    `report` is called by several threads; what it raises ends the work. Raises InvalidRequest for
    an image that is not right, NoSpace, BackendUnavailable, and what its source raises.
    """
    stopped = threading.Event()
    held: list[int] = []
    wanted = list({layer.diff_id: layer for layer in source.image.layers}.values())

    def tell(step: LayerProgress) -> None:
        if stopped.is_set():
            raise WorkStopped
        report(step)

    def take(layer: ImageLayer) -> None:
        held.append(layers.take(layer, source, tell))

    pool = ThreadPoolExecutor(AT_ONCE, thread_name_prefix="hutch-layer")
    try:
        work = [pool.submit(take, layer) for layer in wanted]
        for count, each in enumerate(as_completed(work), 1):
            each.result()
            report(LayerProgress("", "layers", count, len(wanted)))
        return kept.keep(name, source.image)
    finally:
        stopped.set()
        source.stop()
        pool.shutdown(cancel_futures=True)
        for lock in held:
            os.close(lock)
        # What was made for nothing; and what somebody left who was killed.
        layers.sweep(kept.needed)
