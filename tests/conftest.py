"""Settings of the whole suite: properties are judged by what they find, never by the clock, because
the machines are shared.
"""

from hypothesis import HealthCheck, settings

settings.register_profile(
    "house", deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True
)
settings.load_profile("house")
