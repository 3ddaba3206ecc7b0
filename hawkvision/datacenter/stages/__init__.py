"""The stages of a task: which are served, what an ensemble makes of its members, and which stage answers."""
