"""What happens to documents' KV right after a layer's attention: the correction changes it, a calibration looks at it.

Both are prepared before a pass, as functions that are called with each layer in order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch

from daric_rag.engine.scheduling.plan import StepPlan
from daric_rag.engine.token_ranges import TokenRange
from daric_rag.engine.worker.calibration import Calibration
from daric_rag.engine.worker.correction import Correction, Positions
from daric_rag.engine.worker.passes import Generation, Pass
from daric_rag.engine.worker.transfer import InPlace
from daric_rag.engine.worker.transfer_builder import TransferBuilder

AfterLayer = Callable[[int], None]
"""Called with the layer whose attention has run."""


def correcting(
    corrections: dict[str, Correction],
    generations: Sequence[Generation],
    builder: Callable[[], TransferBuilder],
) -> Iterator[AfterLayer]:
    """What corrects generated chunks, one a profile; `corrections` by the profile's digest."""
    for profile in dict.fromkeys(one.chunk.profile for one in generations):
        if profile in corrections:
            chunks = [one for one in generations if one.chunk.profile == profile]
            yield _correcting(corrections[profile], *_alone(chunks, builder()))


def _correcting(correction: Correction, kv: InPlace, positions: Positions) -> AfterLayer:
    def correct(layer: int) -> None:
        if correction.corrects(layer):
            correction.apply(kv.read(layer), positions, layer)
            kv.write(layer)

    return correct


def watching_alone(
    calibration: Calibration | None,
    generations: Sequence[Generation],
    builder: Callable[[], TransferBuilder],
) -> Iterator[AfterLayer]:
    """What shows a calibration its chunks, generated alone."""
    if calibration is None:
        return
    for one in generations:
        # What stands at position 0 has nothing before it in context either.
        if one.plan.calibration is not None and one.chunk.start > 0:
            yield _watching_alone(calibration, one, *_alone([one], builder()))


def _watching_alone(
    calibration: Calibration, one: Generation, kv: InPlace, positions: Positions
) -> AfterLayer:
    request_id, start = one.plan.request_id, one.chunk.start
    return lambda layer: calibration.see_alone(request_id, start, kv.read(layer), positions, layer)


def watching_in_context(
    calibration: Calibration | None,
    plans: Sequence[StepPlan],
    one: Pass,
    builder: Callable[[], TransferBuilder],
) -> Iterator[AfterLayer]:
    """What shows a calibration the documents' tokens that a pass computes in full context."""
    if calibration is None:
        return
    watched = {plan.request_id: plan for plan in plans if plan.calibration is not None}
    for row in one.rows:
        if row.request_id in watched:
            end = row.num_computed + row.num_scheduled
            for inside in calibration.unseen(row.request_id, row.num_computed, end):
                yield _watching_in_context(calibration, watched[row.request_id], inside, builder())


def _watching_in_context(
    calibration: Calibration, plan: StepPlan, inside: TokenRange, builder: TransferBuilder
) -> AfterLayer:
    part, chunk_start = plan.calibration, calibration.chunk_at(plan.request_id, inside[0])
    assert part is not None
    encoded = torch.arange(*inside)
    kv = builder.in_place([builder.window(plan, *inside)])
    positions = builder.positions(encoded, encoded - chunk_start)
    return lambda layer: calibration.see_in_context(
        plan.request_id, part, chunk_start, inside, kv.read(layer), positions, layer
    )


def _alone(generations: Sequence[Generation], builder: TransferBuilder) -> tuple[InPlace, Positions]:
    """The KV of chunks that were generated alone, so that their keys hold the offsets in the chunk."""
    windows = [builder.window(one.plan, one.chunk.start, one.chunk.end) for one in generations]
    offsets = torch.cat([torch.arange(window.num_tokens) for window in windows])
    return builder.in_place(windows), builder.positions(offsets, offsets)
