"""What kernels are told about heads: ``Heads`` of ``heads.cuh``."""

from __future__ import annotations

import ctypes


class Heads(ctypes.Structure):
    """``Heads`` of the source."""

    _fields_ = (
        ("positions", ctypes.c_void_p),
        ("slots", ctypes.c_void_p),
        ("cos_sin", ctypes.c_void_p),
        ("q_weight", ctypes.c_void_p),
        ("k_weight", ctypes.c_void_p),
        ("keys", ctypes.c_void_p),
        ("values", ctypes.c_void_p),
        ("k_scale", ctypes.c_void_p),
        ("v_scale", ctypes.c_void_p),
        ("page_stride", ctypes.c_uint64),
        ("slot_stride", ctypes.c_uint32),
        ("head_stride", ctypes.c_uint32),
        ("num_heads", ctypes.c_int),
        ("num_kv_heads", ctypes.c_int),
    )
