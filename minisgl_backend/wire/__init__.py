"""The wire format, as pure conversion: names, ranges, parsing, records, packets and answers.

Must not know ``triton_python_backend_utils``, sockets, threads or the engine: numpy arrays and JSON
texts go in, values of ``request`` come out, and the reverse.
"""
