"""The ground floor: types, errors, settings, metrics, logs and the API between the tiers."""
