"""From layout, trace and budget to the fastest plan that fits."""

from .plans import make_plan
from .search import MODES, ONLY_A, Search
