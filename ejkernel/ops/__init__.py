"""The framework: picks platform and configuration by measurement, caches and ships the result."""

from ejkernel.ops.autotuning import autotune as autotune
from ejkernel.ops.cache import ConfigCache as ConfigCache
from ejkernel.ops.cache import overlay_cache as overlay_cache
from ejkernel.ops.config import BwdParams as BwdParams
from ejkernel.ops.config import Config as Config
from ejkernel.ops.config import FwdParams as FwdParams
from ejkernel.ops.executor import Executor as Executor
from ejkernel.ops.executor import default_executor as default_executor
from ejkernel.ops.invocation import Invocation as Invocation
from ejkernel.ops.kernel import Kernel as Kernel
from ejkernel.ops.persistent import PersistentCache as PersistentCache
from ejkernel.ops.platform import Backend as Backend
from ejkernel.ops.platform import Platform as Platform
from ejkernel.ops.platform import device_fingerprint as device_fingerprint
from ejkernel.ops.platform import target_device as target_device
from ejkernel.ops.policy import AutotunePolicy as AutotunePolicy
from ejkernel.ops.policy import policy_override as policy_override
from ejkernel.ops.recording import AutotuningResult as AutotuningResult
from ejkernel.ops.recording import autotune_recorded as autotune_recorded
from ejkernel.ops.recording import get_invocations as get_invocations
from ejkernel.ops.recording import record_invocations as record_invocations
from ejkernel.ops.registry import kernel_registry as kernel_registry
from ejkernel.ops.selection import ConfigSelectorChain as ConfigSelectorChain
from ejkernel.ops.tuner import Tuner as Tuner
