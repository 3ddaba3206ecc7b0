"""Side by side with other servers: the same model, images, work and core, one server at a time.

Nothing is imported here: what runs inside another server's environment imports `tests.bench.servers.handlers.work`
through this file, and has none of HawkVision's dependencies.
"""
