"""A session's recurrent layers on the way back: from a savepoint on to where the session stands."""
