"""`minisgl bench serve`: load on a running server over the network, and latencies of its clients."""
