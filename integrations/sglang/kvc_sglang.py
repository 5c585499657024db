"""A plugin for SGLang (0.5.23): a decode server that appends to what it holds, and says whether it has room for it.

Unpatched, a decode server answers 400 to a request without a bootstrap room: it has no way to compute a prompt. With this
plugin such a request is prefilled by the decode server itself, on top of its radix cache, between decode steps. All other
requests go the usual way, by a prefill server. `POST /admit_direct_append` answers from the scheduler's own pool.

Needs `--disaggregation-mode decode --disaggregation-decode-enable-radix-cache --disable-overlap-schedule`.
"""

import multiprocessing

from sglang.srt.plugins.hook_registry import HookRegistry, HookType

SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"
DECODE = "sglang.srt.disaggregation.decode.SchedulerDisaggregationDecodeMixin"
# A room that no router draws (theirs are below 2^63): the request is computed here.
LOCAL_ROOM = (1 << 63) - 1


def is_decode(scheduler):
    return scheduler.disaggregation_mode.value == "decode"


def generate(original, scheduler, request):
    """A request without a room is meant for this server alone. The check for the room then lets it pass."""
    if is_decode(scheduler) and request.bootstrap_room is None:
        request.bootstrap_room = LOCAL_ROOM
    return original(scheduler, request)


def enqueue(original, scheduler, req, *args, **kwargs):
    if not (is_decode(scheduler) and req.bootstrap_room == LOCAL_ROOM):
        return original(scheduler, req, *args, **kwargs)
    if scheduler._set_or_validate_priority(req):
        local(scheduler).append(req)
        req.time_stats.set_wait_queue_entry_time()
    return None


def local(scheduler):
    """Requests that wait for a local prefill."""
    return scheduler.__dict__.setdefault("kvc_local", [])


def next_batch(original, scheduler, running_batch):
    """Merges the local prefill that has just run, starts the next one, or goes on decoding."""
    last = scheduler.last_batch
    if last is not None and last.forward_mode.is_extend() and getattr(last, "kvc_local", False):
        last.filter_batch()
        if not last.is_empty() and last is not running_batch:
            if running_batch.is_empty():
                running_batch = last
            else:
                running_batch.merge_batch(last)
    if local(scheduler):
        waiting, scheduler.waiting_queue = scheduler.waiting_queue, local(scheduler)
        # In one piece: nobody here would go on with the next chunk.
        chunk, scheduler.chunked_prefill_size = scheduler.chunked_prefill_size, None
        try:
            plan = scheduler.get_new_batch_prefill(running_batch)
        finally:
            scheduler.kvc_local, scheduler.waiting_queue = scheduler.waiting_queue, waiting
            scheduler.chunked_prefill_size = chunk
        running_batch = plan.running_batch
        if plan.batch_to_run is not None:
            plan.batch_to_run.kvc_local = True
            return plan
    return original(scheduler, running_batch)


def internal_state(output, controller, *_):
    """Adds what /admit_direct_append needs, in tokens."""
    scheduler = controller.scheduler
    if is_decode(scheduler):
        queue = scheduler.disagg_decode_prealloc_queue
        waiting = sum(len(req.origin_input_ids) for req in local(scheduler))
        output.internal_state["kvc"] = {
            "k_d": scheduler.max_total_num_tokens,
            # Free and evictable, less what running requests are promised: as the scheduler counts it itself.
            "room": max(0, int(queue._allocatable_token_budgets()) - waiting),
        }
    return output


async def admit(request):
    """`{request_id, session, input_len, append_len, output_reserve}` → admitted or rejected, with the terms."""
    from fastapi.responses import JSONResponse
    from sglang.srt.entrypoints import http_server

    try:
        asked = await request.json()
        wants = int(asked["append_len"]) + int(asked.get("output_reserve") or 0)
        input_len = int(asked["input_len"])
    except (ValueError, KeyError, TypeError) as problem:
        message = f"admit request: {problem!r}"
        error = {"message": message, "type": "invalid_request_error", "code": "invalid_request"}
        return JSONResponse({"error": error}, status_code=400)
    states = await http_server._global_state.tokenizer_manager.get_internal_state()
    kvc = states[0].get("kvc")
    if kvc is None:
        error = {"message": "not a decode server", "type": "invalid_request_error", "code": "kvc_role"}
        return JSONResponse({"error": error}, status_code=403)
    terms = {"k_d": kvc["k_d"], "used": kvc["k_d"] - kvc["room"], "append_len": wants, "input_len": input_len}
    if wants <= kvc["room"]:
        return JSONResponse({"answer": "admitted", "mode": "direct", "terms": terms})
    return JSONResponse({"answer": "rejected", "reason": "no-d-capacity", "terms": terms})


def add_route(*_args, **_kwargs):
    from fastapi import Request
    from sglang.srt.entrypoints import http_server

    async def route(request: Request):
        return await admit(request)

    http_server.app.post("/admit_direct_append")(route)


registered = False


def register():
    """Once in a process: hooks that are there twice would run a batch twice."""
    global registered
    if registered:
        return
    registered = True
    HookRegistry.register(f"{SCHEDULER}.handle_generate_request", generate, HookType.AROUND)
    HookRegistry.register(f"{SCHEDULER}._add_request_to_queue", enqueue, HookType.AROUND)
    HookRegistry.register(f"{DECODE}.get_next_disagg_decode_batch_to_run", next_batch, HookType.AROUND)
    controller = "sglang.srt.managers.scheduler_components.internal_state.SchedulerInternalStateController"
    HookRegistry.register(f"{controller}.get_internal_state", internal_state, HookType.AFTER)
    # The process that serves HTTP; schedulers are its children.
    if multiprocessing.parent_process() is None:
        HookRegistry.register("sglang.srt.entrypoints.http_server._setup_and_run_http_server", add_route, HookType.BEFORE)
