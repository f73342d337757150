"""What benchmarks and checks share: calls and loads, targets, clients that leave, wrappers."""
