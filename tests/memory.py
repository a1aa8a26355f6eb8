"""How much memory a call takes, from the events of torch's allocator."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.profiler import ProfilerActivity, profile


def peak(run: Callable[[], Any]) -> int:
    """Bytes of tensors that are alive at the peak of the call, over those that were when it began."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as prof:
        run()
    found = prof.profiler
    assert found is not None
    events = [e for e in found.kineto_results.events() if e.name() == "[memory]"]
    alive = top = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        alive += event.nbytes()
        top = max(top, alive)
    return top
