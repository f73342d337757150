from minisgl_backend.tritonserver.detokenizer import TritonPythonModel

__all__ = ["TritonPythonModel"]
