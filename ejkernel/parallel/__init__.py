"""Splitting work over the devices of a mesh axis: what a call inside a `shard_map` needs."""

from ejkernel.parallel.experts import Dispatched as Dispatched
from ejkernel.parallel.experts import ExpertPlan as ExpertPlan
from ejkernel.parallel.experts import combine as combine
from ejkernel.parallel.experts import dispatch as dispatch
