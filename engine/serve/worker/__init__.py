"""The thread that owns the model: slots, mailboxes of answers, metrics."""
