"""Modules for libraries that are not installed have no examples to run."""

import importlib.util

_NEEDS = {"ejkernel/integrations/equinox.py": "equinox"}
collect_ignore = [path for path, name in _NEEDS.items() if not importlib.util.find_spec(name)]
