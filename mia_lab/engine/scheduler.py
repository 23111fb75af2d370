"""The scheduler's side: edited KV is keyed apart, captures skip cached rows, and a step fits the arena."""
from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..errors import UnsupportedError
from . import cachekey
from .adapters import splits_state_blocks
from .config import EngineOptions, Sizes, refuse_unsupported

if TYPE_CHECKING:
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.request import Request

    from .desk import Desk


def attach(scheduler: Scheduler, options: EngineOptions) -> None:
    """Teach one scheduler about specs. Called once, when an engine that opted in builds it."""
    sizes, desk = _fit(scheduler, options)
    cachekey.install()
    capturing: set[str] = set()
    doubled: set[str] = set()  # those of them that capture a point both before and after its edits
    full_budget = scheduler.max_num_scheduled_tokens
    seats = "max_num_active_reqs" if hasattr(scheduler, "max_num_active_reqs") else "max_num_running_reqs"  # what limits admission
    add_request, schedule, free_request = scheduler.add_request, scheduler.schedule, scheduler._free_request

    def add(request: Request) -> None:
        spec = cachekey.spec_of(request)
        if spec is not None and spec.takes:
            capturing.add(request.request_id)
            request.mia_captures = spec.spans  # looked at in every step
            if spec.takes_twice:
                doubled.add(request.request_id)
        # The last prompt row is always computed; an earlier one could be served from the cache, uncomputed. So could a later one once
        # the request was preempted: what was captured of it is there, but what a gate pools must be pooled without a gap.
        if spec is not None and spec.first_row is not None and (spec.first_row < request.num_prompt_tokens - 1 or spec.pools):
            request.skip_reading_prefix_cache = True
        add_request(request)

    def schedule_within_arena(*args: Any, **kwargs: Any) -> Any:
        if capturing:  # an intersection looks at every request
            capturing.intersection_update(scheduler.requests)
        if not capturing:
            scheduler.max_num_scheduled_tokens = full_budget
            return schedule(*args, **kwargs)
        doubled.intersection_update(capturing)
        running = [request for request in scheduler.running if request.request_id in capturing]
        names = {request.request_id for request in running}
        largest = max((_rows_ahead(scheduler.requests[name]) for name in capturing - names), default=0)
        coming = min(len(capturing) - len(running), getattr(scheduler, seats) - len(scheduler.running))
        wanted = sum(map(_rows_ahead, running)) + coming * largest
        room = sizes.captured_tokens // 2 if doubled else sizes.captured_tokens
        scheduler.max_num_scheduled_tokens = full_budget if wanted <= room else max(1, min(full_budget, room))
        courier = getattr(scheduler.vllm_config, "mia_courier", lambda: None)()
        if courier is None or not courier.congested:
            return schedule(*args, **kwargs)
        free = getattr(scheduler, seats)
        setattr(scheduler, seats, len(scheduler.running))  # nobody new until the host has caught up
        try:
            return schedule(*args, **kwargs)
        finally:
            setattr(scheduler, seats, free)

    def free(request: Request, *args: Any, **kwargs: Any) -> Any:
        desk.leave(request.request_id)  # finished, aborted while it ran, or never run: all come here
        return free_request(request, *args, **kwargs)

    scheduler.add_request, scheduler.schedule, scheduler._free_request = add, schedule_within_arena, free


def _fit(scheduler: Scheduler, options: EngineOptions) -> tuple[Sizes, Desk]:
    """Return the tables' sizes and the engine's desk; UnsupportedError where this scheduler cannot be taught."""
    sizes = Sizes.of(scheduler.vllm_config, options)
    refuse_unsupported(scheduler.vllm_config, sizes)
    cache = scheduler.vllm_config.cache_config
    if getattr(cache, "mamba_cache_mode", "") == "align" and sizes.captured_tokens // 2 < cache.block_size and not splits_state_blocks():
        raise UnsupportedError(f"steps of {sizes.captured_tokens // 2} captured rows are shorter than a block of states, and would never "
                               f"be scheduled. Load with max_captured_tokens={2 * cache.block_size} or enable_prefix_caching=False")
    desk = getattr(scheduler.vllm_config, "mia_desk", lambda: None)()
    if desk is None or not hasattr(scheduler, "_free_request"):
        raise UnsupportedError("this vLLM takes requests in or lets them go in an unknown way, so a wrong one could end the engine; "
                               "load with a vLLM from 0.25.1 to 0.33")
    return sizes, desk


def _rows_ahead(request: Request) -> int:
    """Rows that this request could still capture in one step."""
    done, total, ahead = request.num_computed_tokens, request.num_tokens, 1
    for start, stop in request.mia_captures:
        ahead += max(0, (total if stop is None else min(stop, total)) - max(start, done))
    return ahead
