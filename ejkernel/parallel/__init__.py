"""Work that is split over the devices of a mesh axis."""

from ejkernel.parallel.experts import Dispatched as Dispatched
from ejkernel.parallel.experts import ExpertPlan as ExpertPlan
from ejkernel.parallel.experts import combine as combine
from ejkernel.parallel.experts import dispatch as dispatch
from ejkernel.parallel.sequence import permute_sequence as permute_sequence
from ejkernel.parallel.sequence import restore_sequence as restore_sequence
