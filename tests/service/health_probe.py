"""``python -m tests.service.health_probe ADDRESS``: checks health until stdin ends; prints the times in seconds.

In a process of its own, so that the interpreter lock of the test, which reads streams meanwhile, is not measured.
"""

import json
import select
import sys
import time

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc


def main() -> None:
    stub = health_pb2_grpc.HealthStub(grpc.insecure_channel(sys.argv[1]))
    stub.Check(health_pb2.HealthCheckRequest(), timeout=10)
    print("ready", flush=True)
    times = []
    while not select.select([sys.stdin], [], [], 0.01)[0]:
        begin = time.perf_counter()
        assert stub.Check(health_pb2.HealthCheckRequest(), timeout=10).status == 1
        times.append(time.perf_counter() - begin)
    print(json.dumps(times), flush=True)


if __name__ == "__main__":
    main()
