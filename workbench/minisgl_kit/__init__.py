"""What benchmarks and checks share: calls, loads, targets, clients that leave, figures shown."""
