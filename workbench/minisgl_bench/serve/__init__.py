"""`minisgl bench serve`: load on a running server over the network, and its clients' latencies."""
