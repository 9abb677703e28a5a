"""Hypothesis settings: a busy machine is no reason for a property to fail."""

from hypothesis import HealthCheck, settings

settings.register_profile(
    "core", deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("core")
