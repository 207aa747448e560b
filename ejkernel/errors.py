"""The exceptions that are ours; a wrong call is a plain `ValueError`."""


class UnsupportedError(NotImplementedError):
    """No implementation, or not the requested one, supports this call on this device."""


class CacheWarning(UserWarning):
    """A cache file could not be read or written; the call went on without it."""


class PerformanceWarning(UserWarning):
    """A call runs on a slower implementation than a small change of the program would allow."""


class TuningWarning(UserWarning):
    """A candidate configuration failed or disagreed and was dropped."""
