"""Which replica of the engine takes a request: the longest cached prefix, within a balance."""
