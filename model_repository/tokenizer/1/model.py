from minisgl_backend.tritonserver.tokenizer import TritonPythonModel

__all__ = ["TritonPythonModel"]
