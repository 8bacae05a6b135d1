"""Methods in which few layers choose for all: what differs is for whom, and how heads share."""
