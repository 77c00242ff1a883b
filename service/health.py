"""grpc.health.v1: readiness under "" and the inference service, liveness under "liveness"."""

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from service.instance import Instance

INFERENCE_SERVICE = "picovllm.inference.v1.InferenceService"
LIVENESS = "liveness"
_READINESS = ("", INFERENCE_SERVICE)
Status = health_pb2.HealthCheckResponse.ServingStatus


class HealthServicer(health_pb2_grpc.HealthServicer):
    """Derived from the instance's state; nothing is stored here. Watches end when the instance has ended."""

    def __init__(self, instance: Instance) -> None:
        self._instance = instance

    async def Check(
        self, request: health_pb2.HealthCheckRequest, context: grpc.aio.ServicerContext
    ) -> health_pb2.HealthCheckResponse:
        status = self._status(request.service)
        if status == health_pb2.HealthCheckResponse.SERVICE_UNKNOWN:
            await context.abort(grpc.StatusCode.NOT_FOUND, "unknown service")
        return health_pb2.HealthCheckResponse(status=status)

    async def Watch(self, request: health_pb2.HealthCheckRequest, context: grpc.aio.ServicerContext) -> None:
        told = None
        while True:
            change, ended, status = self._instance.next_change, self._instance.ended, self._status(request.service)
            if status != told:
                await context.write(health_pb2.HealthCheckResponse(status=status))
                told = status
            if ended:
                return
            await change.wait()

    def _status(self, service: str) -> int:
        if service == LIVENESS:
            return self._serving(not self._instance.ended)
        if service in _READINESS:
            return self._serving(self._instance.ready)
        return int(health_pb2.HealthCheckResponse.SERVICE_UNKNOWN)

    @staticmethod
    def _serving(yes: bool) -> int:
        response = health_pb2.HealthCheckResponse
        return int(response.SERVING if yes else response.NOT_SERVING)
