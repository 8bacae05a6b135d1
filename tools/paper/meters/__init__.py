"""What a step of full attention leaves: the choices of every layer, sums of a prompt's columns."""
