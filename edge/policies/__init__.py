"""Other systems' ways of deciding who answers, run in this very node to be compared with; `edge/POLICIES.md`."""
