"""Connections: the port, limits in time and number, clients that leave."""
