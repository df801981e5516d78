"""Exit with 0 if the verifier at an address serves, for a container's health check.

python health.py 127.0.0.1:50552
"""

from __future__ import annotations

import sys

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

DEADLINE_S = 3.0


def main() -> int:
    """Ask the address on the command line, without TLS; a draining verifier does not serve."""
    with grpc.insecure_channel(sys.argv[1]) as channel:
        check = health_pb2_grpc.HealthStub(channel).Check
        try:
            answer = check(health_pb2.HealthCheckRequest(), timeout=DEADLINE_S)
        except grpc.RpcError as error:
            print(error.code().name, file=sys.stderr)
            return 1
    return 0 if answer.status == health_pb2.HealthCheckResponse.SERVING else 1


if __name__ == "__main__":
    raise SystemExit(main())
