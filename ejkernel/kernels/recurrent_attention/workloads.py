"""Named calls: streams, and decays of the columns of the state."""

from ejkernel.kernels.gla_attention.workloads import attention, ends, log_decays, uneven
from ejkernel.kernels.recurrent_attention.config import RecurrentAttentionConfig
from ejkernel.ops.workload import Workload, normal

_STATE = {"state": normal(2, 2, 8, 12)}
_CALL = attention(value_dim=12)

WORKLOADS = (
    Workload("plain", _CALL),
    Workload("state", _CALL | _STATE),
    Workload(
        "one_token", attention(length=1, value_dim=12) | _STATE | {"gv": log_decays(2, 1, 2, 12)}
    ),
    Workload("columns", _CALL | {"gv": log_decays(2, 40, 2, 12)}),
    Workload("uneven_columns", _CALL | {"gv": uneven(2, 40, 2, 12)}),
    Workload(
        "rows_and_columns",
        _CALL | {"gate": log_decays(2, 40, 2, 8), "gv": log_decays(2, 40, 2, 12)},
    ),
    Workload(
        "everything",
        _CALL
        | _STATE
        | {
            "gate": log_decays(2, 40, 2),
            "g_gamma": log_decays(2),
            "gv": log_decays(2, 40, 2, 12),
            "reverse": True,
        },
    ).core(),
    Workload(
        "packed",
        attention(batch=1, length=45)
        | {
            "gate": log_decays(1, 45, 2, 8),
            "gv": log_decays(1, 45, 2, 8),
            "state": normal(4, 2, 8, 8),
            "cu_seqlens": ends(0, 7, 7, 30, 43),
        },
    ),
)

CONFIGS = (RecurrentAttentionConfig(block_q=8, block_k=1),)
