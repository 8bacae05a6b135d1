"""What ranks of one model write of a session: each a file of its share."""
