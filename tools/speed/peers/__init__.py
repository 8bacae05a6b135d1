"""Other engines beside which tools.speed times this one."""
