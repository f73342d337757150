"""What a GPU machine without network needs to run the GPU tests, packed into ``.gpu/``."""
