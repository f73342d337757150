from minisgl_backend.tritonserver.llm_engine import TritonPythonModel

__all__ = ["TritonPythonModel"]
