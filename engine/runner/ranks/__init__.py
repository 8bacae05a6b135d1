"""What several processes of one model do together, each to its own copy of a session."""
