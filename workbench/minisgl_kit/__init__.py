"""What benchmarks and checks share: calls and loads, targets, clients that leave, wrappers."""

import os

# After a fork gRPC starts a poller in the child, which may kill the child before it runs its
# program (grpc/grpc#43055; with busy calls, 9 of 300 died). gRPC reads the variable when imported.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
