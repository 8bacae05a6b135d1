"""Steps of a session: run, commit, rollback and replay."""
