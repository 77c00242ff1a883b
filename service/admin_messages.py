"""AdminService's messages, made from the state of the instance."""

import logging
import os
from dataclasses import dataclass

from engine.outputs import EngineLoad, RequestSummary
from protos.picovllm.admin.v1 import admin_pb2 as pb
from service.front_link import LiveRow
from service.instance import DrainProgress, State
from service.load_history import Rates
from service.messages import duration, timestamp
from service.peers import Peers
from service.runtime import Runtime
from service.version import server_version

_STATES = {
    State.STARTING: pb.INSTANCE_STATE_STARTING,
    State.SERVING: pb.INSTANCE_STATE_SERVING,
    State.DEGRADED: pb.INSTANCE_STATE_DEGRADED,
    State.LAME_DUCK: pb.INSTANCE_STATE_LAME_DUCK,
    State.DRAINING: pb.INSTANCE_STATE_DRAINING,
    State.STOPPED: pb.INSTANCE_STATE_STOPPED,
    State.FAILED: pb.INSTANCE_STATE_FAILED,
}


@dataclass(frozen=True, slots=True)
class Workers:
    """The other processes of the instance, by process id."""

    engine_pid: int


def status_message(runtime: Runtime, workers: Workers, peers: Peers) -> pb.Status:
    instance, engine = runtime.instance, runtime.engine
    reason = engine.stage if instance.state is State.STARTING else instance.reason
    status = pb.Status(
        state=_STATES[instance.state],
        reason=reason,
        epoch=instance.epoch,
        role=pb.ROLE_PREFILL_DECODE,
        workers=[
            pb.Worker(name="front-0", kind=pb.WORKER_KIND_FRONT, pid=os.getpid(), alive=True),
            *(pb.Worker(name=p.name, kind=pb.WORKER_KIND_FRONT, pid=p.pid, alive=p.alive) for p in peers),
            pb.Worker(name="engine-0", kind=pb.WORKER_KIND_ENGINE, pid=workers.engine_pid, alive=not engine.lost),
        ],
        start_time=timestamp(instance.start_time),
        model=runtime.options.served_model_name,
        server_version=server_version(),
    )
    if engine.last_step_time is not None:
        status.last_step_time.CopyFrom(timestamp(runtime.wall_time(engine.last_step_time)))
    if instance.drain is not None:
        status.drain.CopyFrom(_drain_message(instance.drain, runtime.registry.live_in_instance))
    status.effective_config.update(runtime.options.effective())
    return status


def _drain_message(progress: DrainProgress, left: int) -> pb.DrainProgress:
    return pb.DrainProgress(
        start_time=timestamp(progress.start_time),
        deadline_time=timestamp(progress.deadline_time),
        requests_at_start=progress.requests_at_start,
        requests_left=left,
        requests_cut=progress.requests_cut,
        shutdown=progress.shutdown,
    )


def load_message(load: EngineLoad, rates: Rates) -> pb.GetLoadResponse:
    return pb.GetLoadResponse(
        queued_requests=load.queued_requests,
        queued_prompt_tokens=load.queued_prompt_tokens,
        prefilling_requests=load.prefilling_requests,
        decoding_requests=load.decoding_requests,
        kv_blocks_used=load.kv_blocks_used,
        kv_blocks_reusable=load.kv_blocks_cached,
        kv_blocks_total=load.kv_blocks_total,
        prompt_tokens_per_second=rates.prompt,
        generated_tokens_per_second=rates.generated,
        rate_duration=duration(rates.seconds),
        oldest_queued_duration=duration(load.oldest_queued_age) if load.queued_requests else None,
    )


def request_message(row: LiveRow, known: RequestSummary | None) -> pb.RequestInfo:
    """``known`` is None for a request that the engine does not have: it is being tokenised, or it just ended."""
    info = pb.RequestInfo(
        request_id=row.request_id, state=pb.REQUEST_STATE_QUEUED, receive_time=timestamp(row.receive_time)
    )
    if known is not None:
        if known.state == "running":
            info.state = pb.REQUEST_STATE_DECODING if known.completion_tokens else pb.REQUEST_STATE_PREFILLING
        info.prompt_tokens, info.completion_tokens = known.prompt_tokens, known.completion_tokens
        info.priority, info.tenant = known.priority, known.tenant
    return info


def log_level(level: int) -> pb.LogLevel:
    """The proto's name for a level of the logging module: the nearest one below or at it."""
    if level >= logging.ERROR:
        return pb.LOG_LEVEL_ERROR
    if level >= logging.WARNING:
        return pb.LOG_LEVEL_WARNING
    return pb.LOG_LEVEL_INFO if level >= logging.INFO else pb.LOG_LEVEL_DEBUG
