"""Helpers for packed sequences, running sums and shardings, in plain JAX."""

from ejkernel.xla_utils.cumsum import chunk_global_cumsum as chunk_global_cumsum
from ejkernel.xla_utils.cumsum import chunk_local_cumsum as chunk_local_cumsum
from ejkernel.xla_utils.sharding import get_corrected_named_sharding as get_corrected_named_sharding
from ejkernel.xla_utils.utils import cdiv as cdiv
from ejkernel.xla_utils.utils import identity_dtype_convert as identity_dtype_convert
from ejkernel.xla_utils.utils import prepare_chunk_indices as prepare_chunk_indices
from ejkernel.xla_utils.utils import prepare_chunk_offsets as prepare_chunk_offsets
from ejkernel.xla_utils.utils import prepare_cu_seqlens_from_mask as prepare_cu_seqlens_from_mask
from ejkernel.xla_utils.utils import prepare_lens as prepare_lens
from ejkernel.xla_utils.utils import prepare_lens_from_mask as prepare_lens_from_mask
from ejkernel.xla_utils.utils import prepare_position_ids as prepare_position_ids
from ejkernel.xla_utils.utils import prepare_sequence_ids as prepare_sequence_ids
from ejkernel.xla_utils.utils import prepare_token_indices as prepare_token_indices
