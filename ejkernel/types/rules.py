"""The rules that a mask is made of: small immutable pytrees, combined with `&` and `|`.

| rule | pair (q, k) is allowed when |
|---|---|
| `Everything()` | always |
| `Segments(q_ids, kv_ids)` | the ids are equal and not negative |
| `Band(low, high, q_positions)` | `low <= k - p(q) <= high`; causal and sliding windows |
| `Chunks(size, q_start, k_start)` | both lie in the same chunk |
| `KeyLength(length)`, `QueryLength(length)` | `k < length`, `q < length` |
| `TokenTypes(q_types, kv_types, zero_policy)` | the types are equal, zeros as the policy says |
| `Dense(mask)` | `mask[q, k]` |
| `Blocks(mask, block_q, block_k)` | `mask[q // block_q, k // block_k]` |
| `And(rules)`, `Or(rules)` | all rules, or some rule, allow it |

>>> rule = Band(None, 0) & KeyLength(3)
>>> rule.dense(4, 4)[0].astype(int).tolist()
[[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [1, 1, 1, 0]]
>>> sorted(rule.features())
['causal', 'lengths']
"""

from ejkernel.types.rule import And as And
from ejkernel.types.rule import Everything as Everything
from ejkernel.types.rule import Or as Or
from ejkernel.types.rule import Rule as Rule
from ejkernel.types.rules_array import NO_KEY as NO_KEY
from ejkernel.types.rules_array import NO_QUERY as NO_QUERY
from ejkernel.types.rules_array import Dense as Dense
from ejkernel.types.rules_array import Match as Match
from ejkernel.types.rules_array import Segments as Segments
from ejkernel.types.rules_array import TokenTypes as TokenTypes
from ejkernel.types.rules_array import ZeroPolicy as ZeroPolicy
from ejkernel.types.rules_blocks import Blocks as Blocks
from ejkernel.types.rules_index import Band as Band
from ejkernel.types.rules_index import Chunks as Chunks
from ejkernel.types.rules_index import KeyLength as KeyLength
from ejkernel.types.rules_index import QueryLength as QueryLength
