"""Work that is split over the devices of a mesh axis: where each token lies."""

from ejkernel.parallel.sequence import permute_sequence as permute_sequence
from ejkernel.parallel.sequence import restore_sequence as restore_sequence
