"""Commands about models: those that HawkVision builds, and a user's own."""
