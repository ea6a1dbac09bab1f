"""Sections of `bench.cuda`: how long a cancel takes, inside a prompt chunk and in decode."""

from __future__ import annotations

import threading
import time

import numpy as np

from bench.cuda_bed import Bed, say
from bench.cuda_measure import percentiles
from glm53serve.cuda.decode import decode_loop
from glm53serve.engine.seam import Batch, Halted, Span
from glm53serve.engine.step_device import RowPlan


def bench_cancel(bed: Bed, rows: int) -> None:
    """How long a cancel inside a prompt chunk takes, the device idle and the state restored."""
    ids = np.random.default_rng(0).integers(0, bed.config.vocab_size, rows)
    rng = np.random.default_rng(1)
    whole = bed.prefill(0, rows)
    took = []
    for _ in range(20):
        bed.layers.reset_slot(0)
        bed.layers.snapshot(0)
        bed.device.synchronize()
        flag = threading.Event()
        when = [0.0]

        def fire(flag: threading.Event = flag, when: list[float] = when) -> None:
            when[0] = time.perf_counter()
            flag.set()

        timer = threading.Timer(float(rng.uniform(0.0, whole * 0.9)), fire)
        timer.start()
        try:
            bed.layers.forward_ids(ids, Batch((Span(0, 0, rows),)), flag.is_set)
        except Halted:
            bed.layers.restore(0)
            took.append(1e3 * (time.perf_counter() - when[0]))
        timer.join()
    say(f"cancel inside a chunk of {rows}: {len(took)} hits, ms: {percentiles(np.array(took))}")


def bench_decode_cancel(bed: Bed, position: int) -> None:
    """From a cancel in decode to its commit, in steps and milliseconds."""
    rng = np.random.default_rng(2)
    step = bed.decode(1, 50, position)
    took, after = [], []
    for trial in range(50):
        session = decode_loop(bed.decoder, 1)
        session.start(RowPlan(0, 17, position + trial, 500, 500))
        for _ in range(int(rng.integers(3, 12))):
            session.turn()
        time.sleep(float(rng.uniform(0, step)))
        head, start = bed.decoder.committed(), time.perf_counter()
        session.cancel(0)
        while session.live_slots:
            session.turn()
        took.append(1e3 * (time.perf_counter() - start))
        after.append(session.harvested - head)
        session.drain()
    say(f"cancel in decode: ms {percentiles(np.array(took))}, step {step * 1e3:.2f} ms, steps until its commit, that one included: at most {max(after)}")
