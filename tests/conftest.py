"""What holds for all tests."""

from hypothesis import settings

# No test may depend on how busy the machine is; a hanging one is ended by pytest-timeout.
settings.register_profile("hawkvision", deadline=None)
settings.load_profile("hawkvision")
