"""The exceptions and warnings of ejkernel; a wrong call is a plain `ValueError` or `TypeError`."""


class UnsupportedError(NotImplementedError):
    """No implementation, or not the requested one, supports this call on this device."""


class CacheWarning(UserWarning):
    """A cache file or a stored configuration could not be used; the call went on without it."""


class PerformanceWarning(UserWarning):
    """A call runs on a slower implementation than a small change of the program would allow."""


class TuningWarning(UserWarning):
    """A candidate configuration was dropped, or a call could not be measured."""
